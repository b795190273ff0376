"""MCP tools: the tools of MCP servers as BaseTools.

    tools:
      - class_name: rollout_sidecar.tools.mcp.McpTool      # verl's class names mean the same
        config: {type: mcp, timeout: 120, rate_limit: 120, session: trajectory}
        mcp:
          mcp_servers_config_path: ./mcp_server.json       # or a list of files
          tool_selected_list: [tavily_search_tool]         # optional; all tools without it

Differs from verl: sessions last for the trajectory, not for the call; `timeout` is honoured, and the server told to
stop; schemas reach the policy unchanged; two servers with a tool of the same name are an error; an error that a server
reports makes a failed call; a lost connection is opened again; text parts are joined by line breaks. Needs the MCP SDK
(mcp>=2.3,<3), which is imported when the first entry is opened.
"""

import asyncio
import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from rollout_sidecar.errors import DeadlineError, ToolError, safe_text
from rollout_sidecar.tools.base import BaseTool, ToolFailure, ToolResponse
from rollout_sidecar.tools.mcp.entry import McpEntry, SessionOptions, call_timeout, read_entry
from rollout_sidecar.tools.mcp.results import structured_text, text_of
from rollout_sidecar.tools.mcp.servers import McpServer
from rollout_sidecar.tools.schemas import read_schema, wrong_types
from rollout_sidecar.verl_names import import_user_object

if TYPE_CHECKING:
    import mcp_types

    from rollout_sidecar.tools.mcp.sessions import SessionPool

T = TypeVar("T")

LATE_START_S = 10.0
"""How long a server that does not listen yet is waited for when the sidecar starts."""
RETRY_S = 0.5
"""Between looks for it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """A tool on its server."""

    pool: "SessionPool"
    name: str
    idempotent: bool


class McpTool(BaseTool):
    """A tool of an MCP server. Made by `open_mcp_tools`, one for each tool of each server.

    Keys of `config`, beside those that the gate of every tool reads:
        session: "trajectory" (default), "run" or "call": how long a session with the server lasts.
        timeout_s, or verl's default_timeout or timeout: of one call. Default 30.
        idempotent: a call that was lost with its connection is made again. Default: what the server declares
            (idempotentHint or readOnlyHint).
        connect_timeout_s: for starting or finding a server, and the handshake. Default 20.
        max_sessions: with one server at once; more wait. Default 256.
        prestart: sessions kept ready for new trajectories, which saves these the start of a process. Default 0.
        session_idle_s: a session without a call for so long is closed. Default 1800.
        prefix: true calls tools <server>__<tool>.

    Subclasses may override `_parse_tool_result`, or `execute` around `_call_tool`, as those of verl's MCPBaseTool do.
    """

    idempotent = False

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """As BaseTool; `bind` says where the calls go."""
        super().__init__(config, tool_schema)
        self.timeout: float = call_timeout(config)
        self._remote: Remote | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, remote: Remote) -> None:
        """Says where the calls go. The sessions live in the running loop; a user's subclass is called on another."""
        self._remote, self._loop = remote, asyncio.get_running_loop()
        self.idempotent = remote.idempotent

    @property
    def remote(self) -> Remote:
        """Where the calls go."""
        if self._remote is None:
            raise RuntimeError(f"tool {self.name!r} has no server; open_mcp_tools gives it one")
        return self._remote

    async def startup(self) -> None:
        """Opens what is to be open before the first call: the session of the run, and those kept ready. ValueError if a
        server cannot be used."""
        from rollout_sidecar.tools.mcp.connection import ServerUnavailable

        try:
            await self._at_home(self.remote.pool.start)
        except ServerUnavailable as error:
            raise ValueError(error.detail) from error

    async def shutdown(self) -> None:
        """Closes the sessions with the last tool that uses them."""
        await self._at_home(self.remote.pool.stop)

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """A trajectory may use the tool. Its first call opens the session."""
        instance_id = instance_id or str(uuid4())
        await self._at_home(_soon(self.remote.pool.acquire), instance_id)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls the tool.

        Raises:
            ToolFailure: what the server says is wrong with the call.
            ToolError: what is wrong with the server, or the connection to it.
            DeadlineError: no answer within `timeout`.
        """
        text, metrics = await self._call_tool(instance_id, parameters)
        return ToolResponse(text=text), 0.0, metrics

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """The trajectory ended; with its last tool of a server its session is closed."""
        await self._at_home(self.remote.pool.release, instance_id)

    async def _at_home(
        self, method: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any
    ) -> T:
        """Calls a method of the pool in the pool's event loop."""
        home = self._loop
        if home is None or home is asyncio.get_running_loop():
            return await method(*args, **kwargs)
        call = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), home)
        return await asyncio.wrap_future(call)

    async def _call_tool(
        self, instance_id: str, parameters: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """The text of the answer, and metrics."""
        remote = self.remote
        result, stats = await self._at_home(
            remote.pool.call,
            instance_id,
            remote.name,
            json.loads(
                safe_text(json.dumps(parameters, ensure_ascii=False))
            ),  # half surrogate pairs
            timeout_s=self.timeout,
            retry=self.idempotent,
        )
        content = list(result.content)
        if result.is_error:
            raise ToolFailure(
                text_of(content) or "the tool failed, and its server does not say why"
            )
        text, metrics = self._parse_tool_result(content)
        if not content and result.structured_content is not None:
            text = structured_text(result.structured_content)
        text = text or ("" if content else "The tool ran and returned nothing.")
        return text, {"connect_s": stats.connect_s, "reconnects": stats.reconnects, **metrics}

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """Text for the policy, and metrics, from the parts of a result (each has a `type`, text parts a `text`)."""
        return text_of(content), {}


def _soon(function: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    async def call(*args: Any) -> T:
        return function(*args)

    return call


async def open_mcp_tools(
    entry: dict[str, Any], *, where: str, base_dir: Path
) -> dict[str, BaseTool]:
    """The tools of an mcp entry of a tool_config, by name, in the servers' order.

    Connects to each server, lists its tools, and disconnects. A server that does not listen yet is waited for, up to
    LATE_START_S or connect_timeout_s, whichever is less.

    Args:
        entry: class_name (an import path, or the class itself), config and mcp; see the top of this file.
        where: the entry, for messages.
        base_dir: the tool_config file's folder.

    Raises:
        ValueError: the entry, the MCP JSON, a server or its tools cannot be used: which, why, and the way out.
    """
    _require_sdk(where)
    _quieten_libraries()
    read = read_entry(entry, where=where, base_dir=base_dir)
    tool_class = _tool_class(read)
    listings = await asyncio.gather(
        *(_list_tools(server, read.options, where) for server in read.servers.values()),
        return_exceptions=True,  # so that none is left half open
    )
    found: dict[str, list[mcp_types.Tool]] = {}
    for name, listing in zip(read.servers, listings, strict=True):
        if isinstance(listing, BaseException):
            raise listing
        found[name] = listing
    offered = _select(read, found)
    return {
        name: _make_tool(read, tool_class, name, read.servers[server], tool)
        for name, (server, tool) in offered.items()
    }


def _make_tool(
    entry: McpEntry,
    tool_class: type[McpTool],
    name: str,
    server: McpServer,
    listed: "mcp_types.Tool",
) -> McpTool:
    from rollout_sidecar.tools.mcp.sessions import shared_pool

    function = {
        "name": name,
        "description": listed.description or "",
        "parameters": listed.input_schema,
    }
    where = f"{entry.where}: tool {listed.name!r} of {server}"
    schema = read_schema({"type": "function", "function": function}, where)
    for problem in wrong_types(schema):
        _log.warning("%s: %s; left as it is", where, problem)
    try:
        tool = tool_class(config=dict(entry.config), tool_schema=schema)
    except Exception as error:
        # Foreign code: say whose it was.
        raise ValueError(f"{where}: {entry.class_name} could not be made: {error!r}") from error
    hints = listed.annotations
    declared = hints is not None and bool(hints.idempotent_hint or hints.read_only_hint)
    tool.bind(
        Remote(
            pool=shared_pool(server, entry.options),
            name=listed.name,
            idempotent=bool(entry.config.get("idempotent", declared)),
        )
    )
    return tool


def _select(
    entry: McpEntry, found: "dict[str, list[mcp_types.Tool]]"
) -> "dict[str, tuple[str, mcp_types.Tool]]":
    """By the name shown to the policy: the server and its tool."""
    names = [
        (f"{_identifier(server)}__{tool.name}" if entry.prefix else tool.name, server, tool)
        for server, tools in found.items()
        for tool in tools
    ]
    known = {name for name, _, _ in names} | {tool.name for _, _, tool in names}
    missing = [name for name in entry.selected if name not in known]
    if missing:
        raise ValueError(
            f"{entry.where}: mcp.tool_selected_list names {missing[0]!r}, which no server has; there are:"
            f" {', '.join(name for name, _, _ in names) or 'none'}"
        )
    offered: dict[str, tuple[str, mcp_types.Tool]] = {}
    for name, server, tool in names:
        if entry.selected and name not in entry.selected and tool.name not in entry.selected:
            continue
        if name in offered:
            raise ValueError(
                f"{entry.where}: the servers {offered[name][0]!r} and {server!r} both have a tool {name!r};"
                " set config.prefix: true (tools are then called <server>__<tool>), or give each server a file and an"
                " entry of its own, with a tool_selected_list"
            )
        offered[name] = (server, tool)
    if not offered:
        raise ValueError(f"{entry.where}: these servers have no tools: {', '.join(found)}")
    return offered


def _identifier(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name)


async def _list_tools(
    server: McpServer, options: SessionOptions, where: str
) -> "list[mcp_types.Tool]":
    from rollout_sidecar.tools.mcp.connection import McpConnection, ServerUnavailable

    patience_s = min(LATE_START_S, options.connect_timeout_s)
    deadline = time.monotonic() + patience_s
    waited = False
    while True:
        connection = McpConnection(server, connect_timeout_s=options.connect_timeout_s)
        try:
            await connection.open()
            return await connection.list_tools(options.connect_timeout_s)
        except ServerUnavailable as error:
            if not error.refused or time.monotonic() + RETRY_S > deadline:
                late = f" (waited {patience_s:g} s for it to start)" if error.refused else ""
                raise ValueError(f"{where}: {error.detail}{late}") from error
            if not waited:
                _log.warning(
                    "nobody listens at %s yet; waiting up to %g s for %s",
                    *(server.address, patience_s, server),
                )
            waited = True
        except (ToolError, DeadlineError) as error:
            raise ValueError(f"{where}: {server} does not list its tools: {error}") from error
        finally:
            await connection.close()
        await asyncio.sleep(RETRY_S)


def _tool_class(entry: McpEntry) -> type[McpTool]:
    name = entry.class_name
    if name is None:
        return McpTool
    found = import_user_object(name, entry.where) if isinstance(name, str) else name
    if not isinstance(found, type) or not issubclass(found, McpTool):
        raise ValueError(
            f"{entry.where}: class_name {name!r} is no MCP tool: it must be rollout_sidecar.tools.mcp.McpTool (verl's"
            " MCPBaseTool means the same), or a subclass"
        )
    return found


def _require_sdk(where: str) -> None:
    wanted = "the MCP SDK, mcp>=2.3,<3: pip install 'tooljax[tools]'"
    try:
        import mcp  # noqa: F401
        import mcp_types  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{where}: tools of MCP servers need {wanted} ({error})") from error
    installed = importlib.metadata.version("mcp")
    release = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if not (2, 3) <= release < (3,):
        raise ValueError(
            f"{where}: mcp {installed} is installed, and tools of MCP servers need {wanted}"
        )


def _quieten_libraries() -> None:
    """They log each request, and each lost connection with its traceback. What matters is in our own messages."""
    for name, level in (
        ("httpx", logging.WARNING),
        ("httpx2", logging.WARNING),
        ("httpcore", logging.WARNING),
        ("httpcore2", logging.WARNING),
        ("mcp", logging.CRITICAL),
    ):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(level)
