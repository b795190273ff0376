"""Opens the SDK's transports the way we need them.

Deadlines are ours, a session that ends is noticed, HTTP statuses and causes are remembered for the error message.
"""

import functools
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import mcp_types
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from rollout_sidecar.errors import describe
from rollout_sidecar.tools.mcp.servers import McpServer
from rollout_sidecar.tools.mcp.stdio import MAX_MESSAGE_BYTES, ServerLog, stdio_transport

NAMES = {"stdio": "stdio", "http": "streamable HTTP", "sse": "SSE"}

_NO_TIMEOUT_S = 24 * 3600.0


@dataclass
class Watch:
    """What was seen of one connection."""

    server: McpServer
    kind: str = ""
    status: int | None = None
    """Of the last HTTP response, if it was no success."""
    log: ServerLog = field(init=False)

    def __post_init__(self):
        self.log = ServerLog(str(self.server))

    def explain(self, cause: BaseException) -> str:
        """What went wrong, for people."""
        if self.status is not None and is_http_status(cause):
            hint = " (see auth_token and headers)" if self.status in (401, 403) else ""
            return f"HTTP status {self.status}{hint}"
        if isinstance(cause, FileNotFoundError | NotADirectoryError | PermissionError):
            place = f" in the folder {self.server.cwd!r}" if self.server.cwd else ""
            return f"its command {self.server.command!r} cannot be started{place}: {cause.strerror}"
        if self.server.transport == "stdio" and is_closed(cause):
            return self.log.describe()
        if is_refusal(cause):
            return "it cannot be connected to"
        if isinstance(cause, httpx2.TransportError):
            return f"the connection broke: {describe(cause)}"
        return describe(cause)


@asynccontextmanager
async def open_transport(
    kind: str, watch: Watch, on_end: Callable[[], None], *, timeout_s: float
) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of a session that the SDK's client is made on.

    Args:
        kind: stdio, http or sse.
        watch: whom to talk to, and where to note what is seen.
        on_end: called when the other side ends the session.
        timeout_s: of single HTTP operations, answers excepted.
    """
    server = watch.server
    watch.kind, watch.status = kind, None
    if kind == "stdio":
        async with stdio_transport(server, watch.log) as (read, write):
            yield _WatchedStream(read, on_end), write
    elif kind == "sse":
        opened = sse_client(
            server.url,
            timeout=timeout_s,
            sse_read_timeout=_NO_TIMEOUT_S,
            httpx_client_factory=lambda *_, **__: _http_client(watch, timeout_s),
        )
        async with opened as (read, write):
            yield _WatchedStream(read, on_end), write
    else:
        async with _http_client(watch, timeout_s) as client:
            opened = streamable_http_client(
                server.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
            )
            async with opened as (read, write):
                yield _WatchedStream(read, on_end), write


def cause_of(error: BaseException) -> BaseException:
    """The first failure within nested groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def is_refusal(cause: BaseException) -> bool:
    """Nobody listens there: nothing was sent."""
    return isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout)


def is_closed(cause: BaseException) -> bool:
    """The session ended before the answer came."""
    return isinstance(cause, MCPError) and cause.code == mcp_types.CONNECTION_CLOSED


def is_http_status(cause: BaseException) -> bool:
    """The server answered with an HTTP error that is no message of the protocol; the SDK makes these two of it."""
    messages = ("Server returned an error response", "Not Found")
    made_up = isinstance(cause, MCPError) and cause.message in messages
    return made_up or isinstance(cause, httpx2.HTTPStatusError)


def is_unknown_session(error: MCPError, status: int | None) -> bool:
    """The server does not know the session (any more), so it did not run the call. SDKs disagree about how to say so:
    with a code and words of the protocol, or with an HTTP status alone."""
    codes = (mcp_types.INVALID_REQUEST, mcp_types.CONNECTION_CLOSED, mcp_types.REQUEST_TIMEOUT)
    in_words = error.code in codes and "session" in error.message.lower()
    return in_words or (is_http_status(error) and status in (400, 404))


def _http_client(watch: Watch, timeout_s: float) -> httpx2.AsyncClient:
    async def note(response: httpx2.Response) -> None:
        # Not the GET with which streamable HTTP asks for a stream it can do without: many servers refuse it.
        if watch.kind == "sse" or response.request.method == "POST":
            watch.status = response.status_code if response.status_code >= 400 else None

    return httpx2.AsyncClient(
        headers=dict(watch.server.headers),
        timeout=httpx2.Timeout(timeout_s, read=_NO_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        verify=_ssl_context(),
        event_hooks={"response": [note]},
        trust_env=not _is_loopback(
            watch.server.url
        ),  # proxies do not reach servers on this machine
    )


def _is_loopback(url: str) -> bool:
    host = httpx2.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """One for all: reading the certificates takes longer than a session over plain HTTP."""
    return httpx2.create_ssl_context()


class _WatchedStream:
    """A transport's stream of messages that says when it has ended."""

    def __init__(self, stream: Any, on_end: Callable[[], None]):
        self._stream = stream
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        """Where the SDK keeps the sender's context variables."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        self._stream.close()

    async def __aenter__(self) -> "_WatchedStream":
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> Any:
        return await self._stream.__aexit__(*exc)

    def __aiter__(self) -> "_WatchedStream":
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._on_end()
            raise
