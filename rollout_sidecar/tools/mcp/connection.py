"""One session with one MCP server, entered and left in a task of its own.

The SDK's client is made of cancel scopes, which must be left in the task that entered them, while trajectories come and
go in other tasks. So each connection has an owner task that enters the client, waits, and leaves it; calls are made
from anywhere in between. Closing is asked for, then enforced, and takes bounded time.

Handshake first: up to revision 2025-11-25 of the protocol a connection is a session, which a server can keep state for.
Revision 2026-07-28 has none over HTTP, so it is spoken only with servers that refuse the handshake.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import Any, TypeVar

import mcp
import mcp_types
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from rollout_sidecar.errors import DeadlineError, ToolError, describe
from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.mcp.servers import McpServer
from rollout_sidecar.tools.mcp.transports import (
    NAMES,
    Watch,
    cause_of,
    is_closed,
    is_http_status,
    is_refusal,
    is_unknown_session,
    open_transport,
)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
"""For a session to end in order (a process needs up to three times STOP_PATIENCE_S); then it is cut off."""

PING_TIMEOUT_S = 2.0
MAX_PAGES = 1000

_log = logging.getLogger(__name__)
_left_behind: set[asyncio.Future] = set()


# Both are ToolErrors and no ToolFailures: they say something about the server, not about the call.


class ServerUnavailable(ToolError):
    """No session could be had with a server."""

    def __init__(self, message: str, *, detail: str, refused: bool):
        super().__init__(message)
        self.detail = detail
        """What only the user should read: file, address, stderr."""
        self.refused = refused
        """Nobody listens there (yet)."""


class ConnectionLost(ToolError):
    """A session ended under a call."""

    def __init__(self, message: str, *, detail: str, may_have_run: bool):
        super().__init__(message)
        self.detail = detail
        """With what only the user should read: stderr."""
        self.may_have_run = may_have_run


class McpConnection:
    """`open`, any number of calls at once, `close`. Of no use once `alive` is false."""

    def __init__(
        self,
        server: McpServer,
        *,
        connect_timeout_s: float,
        known: dict[str, str] | None = None,
        place: AbstractAsyncContextManager[Any] | None = None,
        start: AbstractAsyncContextManager[Any] | None = None,
    ):
        """Nothing happens yet.

        Args:
            server: whom to talk to.
            connect_timeout_s: for start, handshake and fallbacks together.
            known: what was found to work (transport, mode); tried first, and filled.
            place: held as long as the session lives.
            start: held while connecting.
        """
        self.server = server
        self.suspect = False
        """A call went unanswered: see whether it still answers before the next."""
        self.connect_s = 0.0
        self._connect_timeout_s = connect_timeout_s
        self._known = known if known is not None else {}
        self._place = place or nullcontext()
        self._start = start or nullcontext()
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._over = asyncio.Event()
        self._client: mcp.Client | None = None
        self._watch = Watch(server)
        self._failure = ""
        self._refused = False
        self._expired = False
        self._calls: set[asyncio.Future] = set()
        self._calls_made = 0

    @property
    def alive(self) -> bool:
        """Open, opening, or about to be."""
        return not self._over.is_set()

    async def open(self) -> None:
        """Connects, or waits for whoever already does. Raises ServerUnavailable."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            # Looked at here, or asyncio complains where nobody waits for it any more.
            self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
            self._owner = asyncio.create_task(self._own(self._ready))
        await asyncio.shield(self._ready)

    async def list_tools(self, timeout_s: float) -> list[mcp_types.Tool]:
        """The server's tools, from all pages. Raises as `call` does."""
        return await self._bounded(self._list_tools(), timeout_s, "list its tools")

    async def call(
        self, name: str, arguments: dict[str, Any], timeout_s: float
    ) -> mcp_types.CallToolResult:
        """Calls a tool; without an answer (deadline, cancellation) the server is told that the call is cancelled.

        Raises:
            DeadlineError: no answer within timeout_s.
            ConnectionLost: the session ended.
            ToolError: the server answered with an HTTP error, or with what is no result.
            ToolFailure: the server refused the call.
        """
        return await self._bounded(self._call(name, arguments), timeout_s, f"answer {name!r}")

    async def answers(self) -> bool:
        """It reacts to a ping within PING_TIMEOUT_S."""
        assert self._client is not None
        session = self._client.session
        ping = session.send_ping() if self._shakes_hands() else session.list_tools()
        try:
            await self._bounded(ping, PING_TIMEOUT_S, "answer a ping")
        except ToolFailure:
            pass  # an answer all the same
        except (DeadlineError, ToolError):
            return False
        self.suspect = False
        return self.alive

    async def close(self) -> None:
        """Ends the session, once the calls under way have ended if `retire` was called before. A cancelled `close`
        goes on by itself."""
        self._over.set()
        owner = self._owner
        if owner is None or owner.done():
            return
        if self._ready is not None and not self._ready.done():
            owner.cancel()
        closing = asyncio.ensure_future(self._enforce_end(owner))
        _remember(closing)
        await asyncio.shield(closing)

    async def retire(self) -> None:
        """Closes once no call is under way: others may still be waiting for their answers."""
        while self._calls:
            await asyncio.wait(set(self._calls))
        await self.close()

    async def _enforce_end(self, owner: asyncio.Task[None]) -> None:
        await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT_S)
        if not owner.done():
            owner.cancel()
            await asyncio.wait({owner}, timeout=1.0)
        if not owner.done():
            _remember(owner)
            _log.warning("%s: a session did not end when told to; it is left behind", self.server)
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=1.0)

    # --- the owner task -----------------------------------------------------------------------------------------

    async def _own(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._place:
                await self._live(ready)
        except asyncio.CancelledError:
            if not self._expired:
                self._failure = self._failure or "the session was closed"
                raise
        except Exception as error:  # whatever the server did to the SDK: the session is over
            cause = cause_of(error)
            self._refused = is_refusal(cause)
            self._failure = self._failure or self._watch.explain(cause)
        finally:
            self._over.set()
            if not ready.done():
                words = self._watch.log.last_words()
                ready.set_exception(
                    ServerUnavailable(
                        f"the MCP server {self.server.name!r} cannot be used: {self._failure}",
                        detail=f"{self.server} ({self.server.address}) cannot be used: {self._failure}{words}",
                        refused=self._refused,
                    )
                )

    async def _live(self, ready: asyncio.Future[None]) -> None:
        """Tries what may work until a session stands, then keeps it."""
        notes: list[str] = []
        attempt: tuple[str, str] | None = self._first_attempt()
        async with AsyncExitStack() as starting:
            await starting.enter_async_context(self._start)
            started = time.monotonic()
            timer = asyncio.get_running_loop().call_later(self._connect_timeout_s, self._expire)
            starting.callback(timer.cancel)
            while attempt is not None:
                kind, mode = attempt
                transport = open_transport(
                    kind, self._watch, self._over.set, timeout_s=self._connect_timeout_s
                )
                try:
                    async with mcp.Client(transport, mode=mode, cache=None) as client:
                        self._client = client
                        self.connect_s = time.monotonic() - started
                        self._known.update(transport=kind, mode=mode)
                        await starting.aclose()
                        ready.set_result(None)
                        await self._over.wait()
                        return
                except Exception as error:
                    if ready.done():
                        raise
                    cause = cause_of(error)
                    notes.append(f"{NAMES[kind]}: {self._watch.explain(cause)}")
                    attempt = self._next_attempt(kind, mode, cause)
                    if attempt is None:
                        self._failure = "; ".join(notes)
                        raise
                    self._over.clear()

    def _expire(self) -> None:
        self._expired = True
        self._failure = f"no answer within {self._connect_timeout_s:g} s (connect_timeout_s)"
        assert self._owner is not None
        self._owner.cancel()

    def _first_attempt(self) -> tuple[str, str]:
        kind = "http" if self.server.transport == "http_or_sse" else self.server.transport
        return self._known.get("transport", kind), self._known.get("mode", "legacy")

    def _next_attempt(self, kind: str, mode: str, cause: BaseException) -> tuple[str, str] | None:
        refuses_handshake = isinstance(cause, MCPError) and cause.code in (
            mcp_types.UNSUPPORTED_PROTOCOL_VERSION,
            mcp_types.METHOD_NOT_FOUND,
        )
        status = self._watch.status
        if refuses_handshake and mode == "legacy" and status in (None, 400):
            return kind, "auto"
        # What the specification has a client do whose POST is refused: the server may be of the older kind.
        either = kind == "http" and self.server.transport == "http_or_sse"
        if either and status in (400, 404, 405, 406, 415, 422):
            return "sse", "legacy"
        return None

    # --- requests -----------------------------------------------------------------------------------------------

    def _shakes_hands(self) -> bool:
        assert self._client is not None
        return self._client.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS

    async def _list_tools(self) -> list[mcp_types.Tool]:
        assert self._client is not None
        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools.extend(page.tools)
            if not page.next_cursor or page.next_cursor == cursor:
                return tools
            cursor = page.next_cursor
        raise ToolError(f"it lists its tools on more than {MAX_PAGES} pages")

    async def _call(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        assert self._client is not None
        if not self._shakes_hands():
            return await self._client.call_tool(name, arguments)
        # Not `call_tool`: it lists the tools once in every session, and turns an answer that does not match the
        # tool's own output schema into an exception.
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments)
        request = mcp_types.CallToolRequest(params=params)
        return await self._client.session.send_request(request, mcp_types.CallToolResult)

    async def _bounded(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        if not self.alive or self._owner is None:
            coroutine.close()
            raise await self._lost(may_have_run=False)
        task = asyncio.ensure_future(coroutine)
        alone = not self._calls
        self._calls.add(task)
        self._calls_made += 1
        number = self._calls_made
        task.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait(
                {task, self._owner}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done() and self.alive:
                raise DeadlineError(
                    f"the MCP server {self.server.name!r} did not {what} within {timeout_s:g} s"
                )
            if not task.done() or task.cancelled():
                raise await self._lost(may_have_run=True)
            return task.result()
        except MCPError as error:
            if is_unknown_session(error, self._watch.status):
                self._failure = self._failure or self._watch.explain(error)
                self._over.set()
                raise await self._lost(may_have_run=False) from error
            if is_closed(error):
                self._over.set()
                await self._owner_ended()
                # Only of a call that had the connection to itself it is known that it was the one refused.
                refused = self._refused and alone and number == self._calls_made
                raise await self._lost(may_have_run=not refused) from error
            if is_http_status(error):
                raise ToolError(
                    f"the MCP server {self.server.name!r} answered {self._watch.explain(error)}"
                ) from error
            raise ToolFailure(describe(error)) from error
        except (ValueError, RuntimeError) as error:  # the SDK's checks of what the server answered
            raise ToolError(
                f"the answer of the MCP server {self.server.name!r} is not valid: {describe(error)}"
            ) from None
        finally:
            if not task.done():
                self.suspect = True
                task.cancel()
                _remember(task)

    async def _owner_ended(self) -> None:
        """It finds out why the session ended, while it ends."""
        if self._owner is not None and not self._owner.done():
            await asyncio.wait({self._owner}, timeout=1.0)

    async def _lost(self, *, may_have_run: bool) -> ConnectionLost:
        await self._owner_ended()
        reason = self._failure
        if self.server.transport == "stdio":
            reason = reason or self._watch.log.describe()
        reason = reason or "it ended the session"
        ran = "the call may have run" if may_have_run else "the call was not run"
        message = (
            f"the connection to the MCP server {self.server.name!r} was lost ({reason}); {ran}"
        )
        detail = message + self._watch.log.last_words()
        return ConnectionLost(message, detail=detail, may_have_run=may_have_run)


def _remember(task: asyncio.Future) -> None:
    """Tasks that nobody awaits are kept from being collected, and their ends from being reported."""
    _left_behind.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Future) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.debug("a call that was given up on ended with: %s", describe(task.exception()))  # type: ignore
