"""Reads verl's MCP JSON: which servers there are, and how each is reached.

    {"mcpServers": {
       "search":  {"url": "https://host/mcp", "auth_token": "${SEARCH_TOKEN}"},
       "browser": {"url": "https://host/sse", "headers": {"X-Team": "rl"}},
       "files":   {"command": "npx", "args": ["-y", "some-server", "."], "env": {"DEBUG": "1"}}}}

The same file as other MCP clients read: `type` or `transport` may name the transport, `disabled: true` leaves a server
out, null means absent, and keys that only other clients understand are ignored with a warning. ${NAME} and
${NAME:-default} in url, auth_token, headers and env are taken from the sidecar's environment.

Differs from verl: an auth_token with a url does not decide for SSE. Streamable HTTP is tried first, then SSE, unless
the url ends in /sse or the entry names its transport.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollout_sidecar.user_files import find_file, read_json

Transport = Literal["stdio", "http", "sse", "http_or_sse"]

_TRANSPORTS: dict[str, Transport] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "sse": "sse",
}
_REMOTE_KEYS = {"url", "auth_token", "headers"}
_LOCAL_KEYS = {"command", "args", "env", "cwd"}
_OTHER_KEYS = {"type", "transport", "disabled"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class McpServer:
    """How one server is reached. Hashable: equal servers may share their sessions."""

    name: str
    file: str
    """Where it was read from, for messages."""
    transport: Transport
    url: str = ""
    command: str = ""
    args: tuple[str, ...] = ()
    cwd: str = ""
    """Of the process; "" is the sidecar's."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"MCP server {self.name!r} of {self.file}"

    @property
    def address(self) -> str:
        """Its url without what may be secret in it, or its command line."""
        if self.url:
            return re.sub(r"//[^/@]*@", "//", self.url.split("?", 1)[0])
        return " ".join([self.command, *self.args])


def read_servers(
    paths: Any, *, where: str, base_dir: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, McpServer]:
    """The servers of one MCP JSON file, or of several, by name.

    Args:
        paths: mcp_servers_config_path of a tool_config entry: a string or a list of them.
        where: the entry, for messages.
        base_dir: the tool_config file's folder: relative paths are looked up there, then in the working directory.
        environ: what ${NAME} is taken from.

    Raises:
        ValueError: the first fault found: file, server, field, and the way out.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Sequence) or not paths or not all(map(_is_path, paths)):
        raise ValueError(
            f"{where}: mcp.mcp_servers_config_path must be the path of an MCP JSON file, or a list of paths,"
            f" got {paths!r}"
        )
    servers: dict[str, McpServer] = {}
    for path in paths:
        file = find_file(str(path), base_dir, f"{where}: mcp_servers_config_path")
        for name, entry in _read_entries(file).items():
            server = _read_server(name, entry, str(file), environ)
            if server is None:
                continue
            if name in servers:
                raise ValueError(
                    f"{file}: a server named {name!r} is also in {servers[name].file}; rename one of them"
                )
            servers[name] = server
    if not servers:
        raise ValueError(f"{where}: no server in {', '.join(map(str, paths))} that is not disabled")
    return servers


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(str(value))


def _read_entries(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        found = f"it is {content!r:.40}"
    elif "mcpServers" not in content:
        found = f"its keys are: {', '.join(content) or 'none'}"
    else:
        found = f"mcpServers is {content['mcpServers']!r:.40}"
    entries = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ValueError(
            f"{file}: expected an object with a key `mcpServers` (an object of servers by name); {found}"
        )
    return entries


def _read_server(name: str, entry: Any, file: str, environ: Mapping[str, str]) -> McpServer | None:
    """None if it is disabled."""
    where = f"{file}: server {name!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object with url or command, got {entry!r}")
    entry = {key: value for key, value in entry.items() if value is not None}
    if entry.get("disabled") is True:
        return None
    unknown = sorted(set(entry) - _REMOTE_KEYS - _LOCAL_KEYS - _OTHER_KEYS)
    if ("url" in entry) == ("command" in entry):
        problem = "both url and command" if "url" in entry else "neither url nor command"
        raise ValueError(
            f"{where} has {problem}; give the url of a running server, or the command that starts one"
            + (f" (unknown keys: {', '.join(unknown)})" if unknown else "")
        )
    if unknown:
        _log.warning("%s: these keys are ignored: %s", where, ", ".join(unknown))
    transport = _read_transport(entry, where)
    _check_keys(entry, where)
    if "url" in entry:
        return McpServer(
            name=name,
            file=file,
            transport=transport,
            url=_expand(_string(entry, "url", where), "url", where, environ),
            headers=_headers(entry, where, environ),
        )
    return McpServer(
        name=name,
        file=file,
        transport=transport,
        command=_command(entry, file, where),
        args=_arguments(entry, where),
        env=_strings(entry, "env", where, environ),
        cwd=_beside(file, _string(entry, "cwd", where)) if "cwd" in entry else "",
    )


def _read_transport(entry: dict[str, Any], where: str) -> Transport:
    key = "type" if "type" in entry else "transport"
    if key not in entry:
        if "command" in entry:
            return "stdio"
        path = str(entry["url"]).split("?", 1)[0]
        return "sse" if path.rstrip("/").endswith("/sse") else "http_or_sse"
    transport = _TRANSPORTS.get(entry[key]) if isinstance(entry[key], str) else None
    if transport is None:
        raise ValueError(
            f"{where}: {key} is {entry[key]!r}, expected stdio, http, streamable-http or sse"
        )
    if (transport == "stdio") != ("command" in entry):
        given = "command" if "command" in entry else "url"
        raise ValueError(f"{where}: {key} is {entry[key]!r} and there is a {given}; drop one")
    return transport


def _check_keys(entry: dict[str, Any], where: str) -> None:
    wrong = sorted(set(entry) & (_LOCAL_KEYS if "url" in entry else _REMOTE_KEYS))
    if wrong:
        given = "url" if "url" in entry else "command"
        raise ValueError(f"{where}: {wrong[0]} means nothing beside {given}; drop one of them")


def _string(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {key} must be text, got {value!r}")
    if key == "url" and not re.match(r"https?://[^/]|\$\{", value):
        raise ValueError(f"{where}: url must start with http:// or https://, got {value!r}")
    return value


def _command(entry: dict[str, Any], file: str, where: str) -> str:
    command = _string(entry, "command", where)
    return _beside(file, command) if "/" in command else command  # else it is sought on the PATH


def _beside(file: str, path: str) -> str:
    """A path that is there beside the file, absolute, since the process may run elsewhere; another one as it is."""
    beside = Path(file).absolute().parent / path
    return str(beside) if beside.exists() else path


def _arguments(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    args = entry.get("args", [])
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise ValueError(
            f'{where}: args must be a list of texts, got {args!r} (write numbers as "8080")'
        )
    return tuple(args)


def _headers(
    entry: dict[str, Any], where: str, environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    headers = dict(_strings(entry, "headers", where, environ))
    if "auth_token" in entry:
        if any(key.lower() == "authorization" for key in headers):
            raise ValueError(f"{where}: auth_token and headers.Authorization; drop one of them")
        token = _expand(_string(entry, "auth_token", where), "auth_token", where, environ)
        headers["Authorization"] = f"Bearer {token}"
    for key, value in headers.items():
        if not (key + value).isascii() or "\n" in value or "\r" in value:
            raise ValueError(
                f"{where}: the header {key!r} must be one line of ASCII text (it may come from an environment variable)"
            )
    return tuple(headers.items())


def _strings(
    entry: dict[str, Any], key: str, where: str, environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    values = entry.get(key, {})
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {key} must be an object of texts, got {values!r}")
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f'{where}: {key}.{name} must be text, got {value!r} (write numbers as "1")'
            )
    return tuple(
        (name, _expand(value, f"{key}.{name}", where, environ))
        for name, value in values.items()
        if value is not None
    )


def _expand(text: str, key: str, where: str, environ: Mapping[str, str]) -> str:
    """${NAME} and ${NAME:-default}, as other clients and shells write them."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        found = environ.get(name) or default
        if found is None:
            raise ValueError(
                f"{where}: {key} refers to ${{{name}}}, which is not set in the sidecar's environment;"
                f" export it, or write ${{{name}:-default}}"
            )
        return found

    return re.sub(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", value, text)
