"""A server written with the official SDK, for tests: over stdio, or over HTTP on a port that it prints.

python sdk_server.py [stdio | http | sse] [PORT]
"""

import asyncio
import os
import socket
import sys
import warnings
from typing import Any, Literal

import mcp_types
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

warnings.simplefilter("ignore")  # some of what other revisions of the protocol have is deprecated
server = MCPServer("for tests", log_level="ERROR")
cancelled: list[str] = []


class Place(BaseModel):
    """Where."""

    city: str
    coordinates: list[float] | None = None
    tags: dict[str, list[int]] = Field(default_factory=dict)


@server.tool()
def inc(ctx: Context) -> str:
    """Counts in this session."""
    # What the SDK keeps for a connection; over stdio, HTTP and SSE alike.
    state = ctx.session._connection.state
    state["count"] = state.get("count", 0) + 1
    return str(state["count"])


@server.tool()
async def slow(seconds: float, name: str = "") -> str:
    """Takes its time."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        cancelled.append(name)
        raise
    return f"slept {name}"


@server.tool()
def blocked(seconds: float) -> str:
    """Holds up the whole server."""
    import time

    time.sleep(seconds)
    return "done"


@server.tool()
def cancelled_calls() -> str:
    """Names of the slow calls that were cancelled."""
    return ",".join(cancelled)


@server.tool()
def fail(reason: str) -> str:
    """Reports an error."""
    raise ToolError(reason)


@server.tool()
def wide(
    place: Place,
    mode: Literal["fast", "safe"] = "safe",
    level: Literal[1, 2, 3] = 2,
    ids: list[int | str] | None = None,
) -> str:
    """Many kinds of arguments."""
    return f"{place.city} {mode} {level} {ids}"


@server.tool()
def huge(characters: int) -> str:
    """A long text."""
    return "x" * characters


@server.tool()
def echo(text: str) -> str:
    """The text again."""
    return text


@server.tool()
async def chatty(ctx: Context) -> str:
    """Reports progress and logs before it answers."""
    for step in range(20):
        await ctx.report_progress(step, 20)
        await ctx.session.send_log_message("info", f"step {step}")
    return "done"


@server.tool(structured_output=False)
def parts() -> Any:
    """A result of several kinds of parts."""
    return mcp_types.CallToolResult(
        content=[
            mcp_types.TextContent(type="text", text="first"),
            mcp_types.TextContent(type="text", text="second"),
            mcp_types.ImageContent(type="image", data="AAAA", mime_type="image/png"),
            mcp_types.EmbeddedResource(
                type="resource",
                resource=mcp_types.TextResourceContents(uri="note://1", text="a note"),
            ),
            mcp_types.ResourceLink(type="resource_link", name="paper", uri="file:///paper.pdf"),
        ]
    )


@server.tool(structured_output=False)
def only_structured() -> Any:
    """A result without parts."""
    return mcp_types.CallToolResult(content=[], structured_content={"naïve": [1, 2]})


@server.tool(structured_output=False)
def nothing() -> Any:
    """An empty result."""
    return mcp_types.CallToolResult(content=[])


def guarded(app: Any) -> Any:
    """The app for whoever has the token in TOKEN, if there is one."""
    expected = f"Bearer {os.environ.get('TOKEN', '')}".encode()

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and "TOKEN" in os.environ:
            if dict(scope["headers"]).get(b"authorization") != expected:
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"who are you"})
                return
        await app(scope, receive, send)

    return guard


def main(transport: str = "stdio", port: str = "0") -> None:
    """Serves until killed."""
    if transport == "stdio":
        server.run("stdio")
        return
    app = server.sse_app(sse_path="/events") if transport == "sse" else server.streamable_http_app()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(port)))
    listener.listen(128)  # so that nobody who reads the port is refused
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(guarded(app), log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
