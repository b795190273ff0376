"""Reads verl's tool_config YAML files, and Python files of function tools, and makes their tools.

    tools:
      - class_name: rollout_sidecar.tools.calculator.CalculatorTool   # import path of a BaseTool, or of a function
        config: {type: native}
        tool_schema: {type: function, function: {name: ..., description: ..., parameters: {...}}}
      - function: my_tools.py:convert                                  # a function in a file
      - class_name: verl.tools.mcp_base_tool.MCPBaseTool               # the tools of MCP servers
        config: {type: mcp}
        mcp: {mcp_servers_config_path: mcp_server.json}

A path that ends in .py is verl's function_tool_path: all functions in it that are decorated with @function_tool.

Differs from verl: schemas reach the policy unchanged (verl drops nested properties, items and defaults), tool_schema
may be left to the class for every tool, config.type may be left out, a null key is an absent one everywhere, and two
tools of one name are an error. An unknown key in the config of a tool of ours, a key that is there twice, and a type
that JSON Schema does not have are errors too. Relative paths are looked for beside the file, then from the working
folder.
"""

import inspect
import sys
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from rollout_sidecar.profiles import Profile, get_profile
from rollout_sidecar.tools.base import BaseTool
from rollout_sidecar.tools.config_keys import check_keys
from rollout_sidecar.tools.function_tool import FunctionTool, is_function_tool
from rollout_sidecar.tools.schemas import (
    OpenAIFunctionToolSchema,
    read_schema,
    shown_schema,
    wrong_types,
)
from rollout_sidecar.user_files import find_file, read_yaml
from rollout_sidecar.verl_names import import_user_object, load_user_file

StrPath = str | PathLike[str]

_KEYS = ("class_name", "config", "tool_schema", "mcp", "function")
_METHODS = ("create", "execute", "calc_reward", "release")


def load_tools(path: StrPath, *, profile: Profile | str = "default") -> dict[str, BaseTool]:
    """The tools of one file by name, in its order. ValueError names the file and the entry at fault.

    Args:
        path: a tool_config YAML without mcp entries, or a .py file of function tools.
        profile: decides how schemas look in the prompt.
    """
    tools: dict[str, BaseTool] = {}
    for where, entry, file in _entries([path]):
        if _is_mcp(entry):
            raise ValueError(
                f"{where}: tools of MCP servers need a running event loop; use open_tools"
            )
        _add(tools, make_entry(entry, where, file, profile=profile), where)
    return tools


async def open_tools(
    paths: StrPath | Sequence[StrPath], *, profile: Profile | str = "default"
) -> dict[str, BaseTool]:
    """The tools of several files by name, those of MCP servers included. ValueError names file and entry.

    Nothing is started: `startup` is the caller's to call. MCP servers are asked for their tools.
    """
    tools: dict[str, BaseTool] = {}
    for where, entry, file in _entries([paths] if isinstance(paths, str | PathLike) else paths):
        if _is_mcp(entry):
            from rollout_sidecar.tools.mcp.tools import (
                open_mcp_tools,
            )  # only who has servers needs mcp

            made = await open_mcp_tools(entry, where=where, base_dir=file.parent)
            _add(tools, _shown(made.values(), where, profile), where)
        else:
            _add(tools, make_entry(entry, where, file, profile=profile), where)
    return tools


def make_entry(
    entry: dict[str, Any], where: str, file: Path, *, profile: Profile | str = "default"
) -> dict[str, BaseTool]:
    """The tools of one native entry of `file`, as `read_entries` gives it. ValueError, starting with `where`."""
    tools = _shown(_make_tools(entry, where, file), where, profile)
    for tool in tools.values():
        for problem in wrong_types(tool.tool_schema):
            raise ValueError(f"{where}: {problem}")
    return tools


def read_entries(path: StrPath) -> list[tuple[str, dict[str, Any]]]:
    """The entries of a tool_config file, each with its place in words, without null keys. ValueError as above."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no such tool_config file")
    content = read_yaml(file)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{file}: expected a list under the key `tools`")
    return [
        (where, _checked(entry, where))
        for where, entry in ((f"{path}: tools[{i}]", entry) for i, entry in enumerate(entries))
    ]


def _entries(paths: Iterable[StrPath]) -> Iterable[tuple[str, dict[str, Any], Path]]:
    for path in paths:
        if str(path).endswith(".py"):
            yield str(path), {"function": str(Path(path).absolute())}, Path(path)
        else:
            yield from ((where, entry, Path(path)) for where, entry in read_entries(path))


def _checked(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a mapping with class_name, got {entry!r}")
    entry = {key: value for key, value in entry.items() if value is not None}
    unknown = sorted(map(str, set(entry) - set(_KEYS)))
    if unknown:
        raise ValueError(
            f"{where}: unknown key {unknown[0]!r}; an entry has class_name, config, tool_schema and mcp, "
            "or function instead of class_name"
        )
    for key in ("config", "tool_schema", "mcp"):
        if not isinstance(entry.get(key, {}), dict):
            raise ValueError(f"{where}: {key} must be a mapping, got {entry[key]!r}")
    config = {key: value for key, value in entry.get("config", {}).items() if value is not None}
    kind = config.get("type", "mcp" if "mcp" in entry else "native")
    if kind not in ("native", "mcp"):
        raise ValueError(f"{where}: config.type is {kind!r}, expected native or mcp")
    if kind == "mcp" and "mcp" not in entry:
        raise ValueError(f"{where}: config.type is mcp, so the entry needs the key mcp")
    if kind == "native" and "mcp" in entry:
        raise ValueError(f"{where}: the entry has the key mcp, so config.type must be mcp")
    if kind == "native" and ("class_name" in entry) == ("function" in entry):
        raise ValueError(
            f"{where}: class_name is missing (the import path of a BaseTool, or of a function)"
            if "class_name" not in entry
            else f"{where}: class_name and function are both there; keep one"
        )
    return {**entry, "config": config}


def _is_mcp(entry: dict[str, Any]) -> bool:
    return "mcp" in entry


def _make_tools(entry: dict[str, Any], where: str, file: Path) -> list[Any]:
    """The tool of an entry, or the tools of a whole Python file. Any: users' tools need not be subclasses of ours."""
    config = entry.get("config", {})
    schema = entry.get("tool_schema")
    checked = None if schema is None else read_schema(schema, where)
    if "class_name" in entry:
        name = str(entry["class_name"])
        found = import_user_object(name, where)
        if inspect.isroutine(found):
            _mark_verls_own(found.__module__, where)
            if not is_function_tool(found):
                raise ValueError(
                    f"{where}: class_name {name!r} is a function that is not decorated with @function_tool; decorate"
                    " it, or name a class"
                )
        return [_make_tool(found, name, config, checked, where, file)]
    path, colon, name = str(entry["function"]).rpartition(":")
    if not colon:
        path, name = name, ""
    if not path.endswith(".py"):
        raise ValueError(f"{where}: function {entry['function']!r} must be path/to/file.py:name")
    module = load_user_file(find_file(path, file.parent, where), where)
    if not name:
        check_keys(config, (), where)
        return [FunctionTool(function, config) for function in _decorated(module, where)]
    if not hasattr(module, name):
        raise ValueError(f"{where}: {path} has no function {name!r}")
    return [_make_tool(getattr(module, name), name, config, checked, where, file)]


def _decorated(module: Any, where: str) -> list[Any]:
    """The functions of a file that are tools."""
    _mark_verls_own(module.__name__, where)
    functions = [value for value in vars(module).values() if is_function_tool(value)]
    if not functions:
        raise ValueError(f"{where}: the file has no function decorated with @function_tool")
    return functions


def _mark_verls_own(module: str | None, where: str) -> None:
    """Where verl itself is installed, its decorator does not mark functions, but keeps them in a table."""
    table = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    theirs = {
        entry.fn: FunctionTool(entry.fn, {}, read_schema(entry.tool_schema, where)).tool_schema
        for entry in table.values()
        if entry.fn.__module__ == module
    }
    for function, schema in theirs.items():
        function.tool_schema = schema


def _make_tool(
    found: Any,
    name: str,
    config: dict[str, Any],
    schema: OpenAIFunctionToolSchema | None,
    where: str,
    file: Path,
) -> Any:
    if inspect.isroutine(found):
        found_class, arguments = FunctionTool, {"function": found}
    else:
        missing = [method for method in _METHODS if not hasattr(found, method)]
        if not isinstance(found, type) or missing:
            raise ValueError(
                f"{where}: {name} is not a tool: it lacks {', '.join(missing) or 'a class'}"
            )
        found_class, arguments = found, {}
    own = vars(found_class).get("config_keys")
    if own is not None:
        check_keys(config, own, where)
    for key in getattr(found_class, "path_keys", ()):
        if isinstance(config.get(key), str) and config[key]:
            found_file = find_file(config[key], file.parent, f"{where}: config.{key}")
            config = {**config, key: str(found_file)}
    try:
        # By keyword, as verl does: the order is the user's own.
        return found_class(**arguments, config=config, tool_schema=schema)
    except (Exception, SystemExit) as error:
        # Foreign code: say whose it was.
        raise ValueError(f"{where}: {name} could not be made: {error!r}") from error


def _shown(made: Iterable[Any], where: str, profile: Profile | str) -> dict[str, BaseTool]:
    """Gives each tool the schema that the prompt is to show."""
    profile = get_profile(profile) if isinstance(profile, str) else profile
    tools: dict[str, BaseTool] = {}
    for tool in made:
        given = getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
        schema = read_schema(given, f"{where}: the schema of {type(tool).__name__}")
        tool.tool_schema = shown_schema(schema, profile.schema_fields)
        tool.name = schema.function.name
        _add(tools, {tool.name: tool}, where)
    return tools


def _add(tools: dict[str, BaseTool], more: dict[str, BaseTool], where: str) -> None:
    for name, tool in more.items():
        if name in tools:
            raise ValueError(f"{where}: a tool named {name!r} comes earlier")
        tools[name] = tool
