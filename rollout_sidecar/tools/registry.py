"""Reads verl's tool_config YAML and makes its tools.

    tools:
      - class_name: rollout_sidecar.tools.calculator.CalculatorTool   # import path of a BaseTool
        config: {type: native}
        tool_schema: {type: function, function: {name: ..., description: ..., parameters: {...}}}

Differs from verl: schemas reach the policy unchanged (verl drops nested properties, items and defaults), tool_schema
may be left to the class for every tool, config.type may be left out, and two tools of one name are an error.
"""

import importlib
from pathlib import Path
from typing import Any

import yaml

from rollout_sidecar.tools.base import BaseTool


def load_tools(path: str | Path) -> dict[str, BaseTool]:
    """The tools of a tool_config file by name, in its order. ValueError names the file and the entry at fault."""
    entries = _read_entries(Path(path))
    tools: dict[str, BaseTool] = {}
    for i, entry in enumerate(entries):
        where = f"{path}: tools[{i}]"
        tool = _make_tool(entry, where)
        if tool.name in tools:
            raise ValueError(f"{where}: a tool named {tool.name!r} comes earlier in the file")
        tools[tool.name] = tool
    return tools


def _read_entries(file: Path) -> list[Any]:
    if not file.is_file():
        raise ValueError(f"{file}: no such tool_config file")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{file}: expected a list under the key `tools`")
    return entries


def _make_tool(entry: Any, where: str) -> BaseTool:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a mapping with class_name, got {entry!r}")
    # In verl's files an empty key means that it is absent.
    entry = {key: value for key, value in entry.items() if value is not None}
    unknown = sorted(set(entry) - {"class_name", "config", "tool_schema", "mcp"})
    if unknown:
        raise ValueError(
            f"{where}: unknown key {unknown[0]!r}; an entry has class_name, config, tool_schema and mcp"
        )
    config = _mapping(entry, "config", where)
    kind = config.get("type") or "native"
    if kind == "mcp" or "mcp" in entry:
        raise ValueError(
            f"{where}: mcp tools come with a later version; wrap the server in a BaseTool"
        )
    if kind != "native":
        raise ValueError(f"{where}: config.type is {kind!r}, expected native or mcp")
    if "class_name" not in entry:
        raise ValueError(f"{where}: class_name is missing (the import path of a BaseTool)")
    schema = _mapping(entry, "tool_schema", where) or None
    if schema is not None:
        _check_schema(schema, where)
    tool_class = _import_class(str(entry["class_name"]), where)
    try:
        tool = tool_class(config, schema)
    except Exception as error:
        # Foreign code: say whose it was.
        raise ValueError(f"{where}: {entry['class_name']} could not be made: {error!r}") from error
    if schema is None:
        _check_schema(tool.tool_schema, f"{where}: the schema of {entry['class_name']}")
    return tool


def _mapping(entry: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = entry.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key} must be a mapping, got {value!r}")
    return value


def _check_schema(schema: dict[str, Any], where: str) -> None:
    function = schema.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: tool_schema.function.name is missing")


def _import_class(path: str, where: str) -> type[BaseTool]:
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{where}: class_name {path!r} must be an import path, module.Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{where}: cannot import {module_name} for class_name {path!r}: {error} (is it on PYTHONPATH?)"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ValueError(f"{where}: {module_name} has no class {class_name}")
    missing = [
        name for name in ("create", "execute", "calc_reward", "release") if not hasattr(found, name)
    ]
    if not isinstance(found, type) or missing:
        raise ValueError(
            f"{where}: {path} is not a tool: it lacks {', '.join(missing) or 'a class'}"
        )
    return found
