"""Finds out what a user's file is, and reads it with the reader that a run would use."""

import ast
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollout_sidecar.interactions.registry import load_interactions
from rollout_sidecar.rewards.registry import get_reward
from rollout_sidecar.tools.mcp.entry import read_entry
from rollout_sidecar.tools.mcp.servers import McpServer, read_servers
from rollout_sidecar.tools.registry import make_entry, read_entries
from rollout_sidecar.user_files import read_yaml
from tooljax.compat.option_files import read_script_options, read_yaml_options
from tooljax.compat.options import full_name
from tooljax.compat.points import Subject
from tooljax.data.records import read_rows, to_task

Kind = Literal[
    "tool_config", "interaction", "mcp", "records", "options", "reward", "function_tools", "agent_loops"
]  # fmt: skip

KIND_NAMES: dict[Kind, str] = {
    "tool_config": "tool_config",
    "interaction": "interaction config",
    "mcp": "MCP servers",
    "records": "records",
    "options": "options",
    "reward": "reward function",
    "function_tools": "function tools",
    "agent_loops": "agent loops",
}


@dataclass
class Reading:
    """What one file holds."""

    path: Path
    kind: Kind | None
    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What cannot run, each a sentence."""
    subjects: set[Subject] = field(default_factory=set)
    tools: set[str] = field(default_factory=set)
    """Names of the tools that it brings."""
    interactions: set[str] = field(default_factory=set)
    options: dict[str, Any] = field(default_factory=dict)
    needs: dict[str, set[str]] = field(default_factory=dict)
    """Records: names of tools, tools to offer, interactions and data_sources that they mention."""
    function: str = "compute_score"
    """Of a reward file: its function's name."""


def read_file(
    path: Path, *, profile: str, kind: Kind | None = None, function: str = "compute_score"
) -> Reading:
    """Never raises for what is in the file: that becomes the reading's problems.

    Args:
        profile: what the file is to mean.
        kind: what it must be, where an option says so; else it is found out.
        function: the reward's name, if it is a reward.
    """
    try:
        kind = kind or find_kind(path)
    except (ValueError, OSError) as error:
        return Reading(path, None, problems=[str(error)])
    reading = Reading(path, kind, function=function)
    try:
        _READERS[kind](reading, profile)
    except (ValueError, OSError) as error:
        reading.problems.append(str(error))
    return reading


# --- what it is -------------------------------------------------------------------------------------------------


def find_kind(path: Path) -> Kind:
    """What kind of file it is, by its suffix and its keys. ValueError if it is none that a run could use."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file (looked from {Path.cwd()})")
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".jsonl", ".ndjson"):
        return "records"
    if suffix == ".sh":
        return "options"
    if suffix == ".py":
        return _python_kind(path)
    if suffix == ".json":
        return "mcp" if "mcpServers" in _json_keys(path) else "records"
    if suffix in (".yaml", ".yml"):
        return _yaml_kind(path)
    raise ValueError(f"{path}: files of type {suffix or '(no suffix)'} are none of verl's")


def _json_keys(path: Path) -> set[str]:
    """The keys of the whole file, if it is one object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return set()  # lines of records, or broken: the reader says which
    return set(content) if isinstance(content, dict) else set()


def _python_kind(path: Path) -> Kind:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not valid Python: {error}") from None
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    decorators = [ast.unparse(d) for function in functions for d in function.decorator_list]
    if any(name.partition("(")[0].rpartition(".")[2] == "function_tool" for name in decorators):
        return "function_tools"
    if any(function.name == "compute_score" for function in functions):
        return "reward"
    raise ValueError(f"{path}: neither a function compute_score nor functions with @function_tool")


def _yaml_kind(path: Path) -> Kind:
    content = read_yaml(path)
    if isinstance(content, list) and any("_target_" in (part or {}) for part in content):
        return "agent_loops"
    if isinstance(content, dict):
        if isinstance(content.get("tools"), list):
            return "tool_config"
        if "interaction" in content:
            return "interaction"
        if "mcpServers" in content:
            raise ValueError(f"{path}: MCP servers are named in a JSON file; write it as JSON")
        if any(full_name(name) for name in read_yaml_options(content)):
            return "options"
    raise ValueError(
        f"{path}: no file of verl's: expected the key tools, interaction, or options such as "
        "multi_turn.max_assistant_turns"
    )


# --- reading it -------------------------------------------------------------------------------------------------


def _read_tool_config(reading: Reading, profile: str) -> None:
    reading.subjects.add("tools")
    for where, entry in read_entries(reading.path):
        try:
            if "mcp" in entry:
                _read_mcp_entry(reading, where, entry)
            else:
                _read_native_entry(reading, where, entry, profile)
        except (ValueError, OSError) as error:
            reading.problems.append(str(error))


def _read_native_entry(reading: Reading, where: str, entry: dict[str, Any], profile: str) -> None:
    for name, tool in make_entry(entry, where, reading.path, profile=profile).items():
        if name in reading.tools:
            reading.problems.append(f"{where}: a tool named {name!r} comes earlier")
        reading.tools.add(name)
        module = type(tool).__module__
        reading.facts.append(f"{name}: {module}.{type(tool).__name__}")
        for subject in ("search", "sandbox_fusion"):
            if module.startswith(f"rollout_sidecar.tools.{subject}"):
                reading.subjects.add("search" if subject == "search" else "sandbox")
        dropped = sorted(set(dropped_by_verl(tool.tool_schema)))
        if dropped:
            reading.facts.append(
                f"{name}: the policy sees what verl left out of the prompt: {', '.join(dropped)}"
            )


def _read_mcp_entry(reading: Reading, where: str, entry: dict[str, Any]) -> None:
    reading.subjects.add("mcp")
    found = read_entry(entry, where=where, base_dir=reading.path.parent)
    reading.tools.update(found.selected)
    which = ", ".join(found.selected) or "all their tools"
    reading.facts.append(
        f"MCP servers {', '.join(found.servers)}: {which} (listed when a run starts)"
    )
    reading.problems += _missing_commands(where, found.servers.values())


def dropped_by_verl(schema: dict[str, Any]) -> Iterator[str]:
    """What verl's classes do not hold: "<argument>.<key>", and keys of the parameters."""
    parameters = schema["function"].get("parameters") or {}
    yield from (key for key in parameters if key not in ("type", "properties", "required"))
    for name, part in (parameters.get("properties") or {}).items():
        yield from (f"{name}.{key}" for key in part if key not in ("type", "description", "enum"))


def _read_interactions(reading: Reading, profile: str) -> None:
    reading.subjects.add("interaction")
    for name, interaction in load_interactions(reading.path).items():
        kind = type(interaction)
        reading.interactions.add(name)
        reading.facts.append(f"{name}: {kind.__module__}.{kind.__name__}")


def _read_mcp(reading: Reading, profile: str) -> None:
    reading.subjects.add("mcp")
    servers = read_servers([reading.path], where=str(reading.path), base_dir=reading.path.parent)
    for name, server in servers.items():
        reading.facts.append(f"{name}: {server.transport}, {server.address}")
    reading.problems += _missing_commands(str(reading.path), servers.values())


def _missing_commands(where: str, servers: Iterable[McpServer]) -> Iterator[str]:
    for server in servers:
        command = (
            os.path.join(server.cwd, server.command) if "/" in server.command else server.command
        )
        if server.command and not shutil.which(command, path=dict(server.env).get("PATH")):
            yield f"{where}: {server}: its command {server.command!r} is not there; install it, or give its path"


def _read_records(reading: Reading, profile: str) -> None:
    reading.subjects.add("records")
    counts = {"rows": 0, "rows with tools_kwargs": 0, "rows with an interaction": 0}
    names = ("tools", "offered tools", "interactions", "data_sources")
    needs: dict[str, set[str]] = {name: set() for name in names}
    for row in read_rows(reading.path):
        task = to_task(row.values, task_id=str(row.number), where=row.where)
        counts["rows"] += 1
        counts["rows with tools_kwargs"] += bool(task.tools_kwargs)
        counts["rows with an interaction"] += bool(task.interaction)
        needs["tools"].update(task.tools_kwargs)
        needs["offered tools"].update(task.tools or ())
        needs["data_sources"].add(task.data_source)
        needs["interactions"].update({task.interaction} - {""})
    reading.needs = needs
    reading.facts.append(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    for name, found in needs.items():
        if found - {""}:
            reading.facts.append(f"{name}: {', '.join(sorted(found - {''}))}")


def _read_options(reading: Reading, profile: str) -> None:
    reading.subjects.add("options")
    if reading.path.suffix == ".sh":
        reading.options = read_script_options(reading.path, os.environ)
        if not any(full_name(name) for name in reading.options):
            reading.problems.append(f"{reading.path}: no option of verl (option=value) in it")
    else:
        reading.options = read_yaml_options(read_yaml(reading.path))
    reading.facts.append(f"{len(reading.options)} options")


def _read_reward(reading: Reading, profile: str) -> None:
    reading.subjects.add("reward")
    function = get_reward(f"{reading.path}:{reading.function}")
    arguments = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        reading.problems.append(
            f"{reading.path}: {reading.function} cannot be called with {', '.join(arguments)}: {error}"
        )
    kind = "async" if inspect.iscoroutinefunction(function) else "sync"
    reading.facts.append(f"{reading.function}, {kind}")


def _read_function_tools(reading: Reading, profile: str) -> None:
    reading.subjects.add("tools")
    entry = {"function": str(reading.path.absolute())}
    tools = make_entry(entry, str(reading.path), reading.path, profile=profile)
    reading.tools.update(tools)
    reading.facts.append(f"functions: {', '.join(tools)}")


def _read_agent_loops(reading: Reading, profile: str) -> None:
    reading.problems.append(
        f"{reading.path}: agent loops of your own cannot run here; write what they do as a tool or an interaction"
    )


_READERS: dict[Kind, Callable[[Reading, str], None]] = {
    "tool_config": _read_tool_config,
    "interaction": _read_interactions,
    "mcp": _read_mcp,
    "records": _read_records,
    "options": _read_options,
    "reward": _read_reward,
    "function_tools": _read_function_tools,
    "agent_loops": _read_agent_loops,
}
