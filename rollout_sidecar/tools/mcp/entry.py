"""An mcp entry of a tool_config file, read and checked. Nothing is connected, and the SDK not imported."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollout_sidecar.tools.config_keys import check_keys
from rollout_sidecar.tools.mcp.servers import McpServer, read_servers
from rollout_sidecar.verl_names import STOCK_CLASSES

SessionScope = Literal["trajectory", "run", "call"]

DEFAULT_TIMEOUT_S = 30.0

_KEYS = ("session", "connect_timeout_s", "max_sessions", "prestart", "session_idle_s", "prefix")
"""Of the config of a tool of ours, beside those of every tool."""


@dataclass(frozen=True)
class SessionOptions:
    """How sessions with a server are kept: keys of the tool's config, described at McpTool."""

    scope: SessionScope = "trajectory"
    connect_timeout_s: float = 20.0
    max_sessions: int = 256
    prestart: int = 0
    idle_s: float = 1800.0


@dataclass(frozen=True)
class McpEntry:
    """One entry."""

    where: str
    class_name: Any
    config: dict[str, Any]
    options: SessionOptions
    servers: dict[str, McpServer]
    selected: tuple[str, ...]
    """Names of tools; none for all."""
    prefix: bool
    """Tools are called <server>__<tool>."""


def read_entry(entry: Mapping[str, Any], *, where: str, base_dir: Path) -> McpEntry:
    """Reads an entry and the MCP JSON files that it names. ValueError names the file, the key, and the way out."""
    config = _mapping(entry, "config", where)
    class_name = entry.get("class_name")
    if class_name is None or _is_ours(class_name):
        check_keys(config, _KEYS, where)
    settings = _mapping(entry, "mcp", where)
    unknown = sorted(set(settings) - {"mcp_servers_config_path", "tool_selected_list"})
    if unknown:
        raise ValueError(
            f"{where}: unknown key mcp.{unknown[0]}; there are mcp_servers_config_path and tool_selected_list"
        )
    if "mcp_servers_config_path" not in settings:
        raise ValueError(
            f"{where}: mcp.mcp_servers_config_path is missing (the path of an MCP JSON file)"
        )
    selected = settings.get("tool_selected_list", [])
    if not isinstance(selected, list) or not all(isinstance(name, str) for name in selected):
        raise ValueError(
            f"{where}: mcp.tool_selected_list must be a list of names, got {selected!r}"
        )
    paths = settings["mcp_servers_config_path"]
    return McpEntry(
        where=where,
        class_name=class_name,
        config=config,
        options=_options(config, where),
        servers=read_servers(paths, where=where, base_dir=base_dir),
        selected=tuple(selected),
        prefix=_flag(config, "prefix", where),
    )


def call_timeout(config: Mapping[str, Any]) -> float:
    """Seconds for one call: timeout_s, or verl's default_timeout or timeout."""
    for key in ("timeout_s", "default_timeout", "timeout"):
        if config.get(key) is not None:
            return float(config[key])
    return DEFAULT_TIMEOUT_S


def _is_ours(class_name: Any) -> bool:
    """Users' subclasses may have keys of their own."""
    return class_name in STOCK_CLASSES or str(class_name).startswith("rollout_sidecar.")


def _options(config: dict[str, Any], where: str) -> SessionOptions:
    scope = config.get("session", "trajectory")
    if scope not in ("trajectory", "run", "call"):
        raise ValueError(f"{where}: config.session is {scope!r}, expected trajectory, run or call")
    for key in ("timeout_s", "default_timeout", "timeout"):
        _number(config, key, DEFAULT_TIMEOUT_S, where)
    _flag(config, "idempotent", where)
    defaults = SessionOptions()
    max_sessions = _whole(config, "max_sessions", defaults.max_sessions, where, least=1)
    prestart = _whole(config, "prestart", defaults.prestart, where, least=0)
    if prestart >= max_sessions:
        raise ValueError(
            f"{where}: config.prestart={prestart} must be smaller than max_sessions={max_sessions}"
        )
    return SessionOptions(
        scope=scope,
        connect_timeout_s=_number(config, "connect_timeout_s", defaults.connect_timeout_s, where),
        max_sessions=max_sessions,
        prestart=prestart,
        idle_s=_number(config, "session_idle_s", defaults.idle_s, where),
    )


def _number(config: dict[str, Any], key: str, default: float, where: str) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{where}: config.{key} must be a number above 0, got {value!r}")
    return float(value)


def _whole(config: dict[str, Any], key: str, default: int, where: str, *, least: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{where}: config.{key} must be a whole number from {least} on, got {value!r}"
        )
    return value


def _flag(config: dict[str, Any], key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: config.{key} must be true or false, got {value!r}")
    return value


def _mapping(entry: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """Its null keys are absent ones."""
    value = entry.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key} must be a mapping, got {value!r}")
    return {name: item for name, item in value.items() if item is not None}
