"""The stdio transport: a server process of our own, and what is left of it afterwards, which is nothing.

A transport for the SDK's client, in place of the SDK's own for these reasons: the process tree is killed whatever
happens to the task that started it, descendants that left the process group included; a line is of bounded length;
stderr goes to the log, bounded, and its end into the message about a server that does not start.
"""

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from rollout_sidecar.tools.mcp.servers import McpServer

MAX_MESSAGE_BYTES = 2**24
"""Of one message from a server. A longer one ends the session: it would be held in memory several times over."""

STOP_PATIENCE_S = 1.0
"""For the process to end once its stdin is closed, then once it was asked to (SIGTERM), then once it was killed."""

_MARKER = "TOOLJAX_MCP_SESSION"
_MAX_LOGGED_LINES = 200
_MAX_LINE_CHARACTERS = 500

_log = logging.getLogger(__name__)


@dataclass
class ServerLog:
    """What a server process said on stderr, and how it ended."""

    server: str
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    lines: int = 0
    fault: str = ""
    """Why we gave it up."""
    exit_code: int | None = None

    def add(self, line: str) -> None:
        """Logs a line, up to a bound; keeps the last ones for `describe`."""
        if not line.strip():
            return
        line = line.rstrip()[:_MAX_LINE_CHARACTERS]
        self.tail.append(line)
        self.lines += 1
        if self.lines <= _MAX_LOGGED_LINES:
            _log.debug("%s: stderr: %s", self.server, line)
        elif self.lines == _MAX_LOGGED_LINES + 1:
            _log.debug("%s: stderr: more lines are not logged", self.server)

    def describe(self) -> str:
        """How it ended."""
        if self.fault:
            return self.fault
        ending = "it closed its output"
        if self.exit_code is not None and self.exit_code < 0:
            ending = f"its process was killed by {signal.Signals(-self.exit_code).name}"
        elif self.exit_code is not None:
            ending = f"its process ended with exit code {self.exit_code}"
        return ending

    def last_words(self) -> str:
        """The end of what it said on stderr, for the log and for whoever starts the sidecar. Not for the policy."""
        return f"; it said: {' | '.join(self.tail)}" if self.tail else ""


Streams = tuple[
    MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]
]


@asynccontextmanager
async def stdio_transport(server: McpServer, log: ServerLog) -> AsyncIterator[Streams]:
    """Starts the server's process, and ends it. OSError if it cannot be started."""
    mark = f"{os.getpid()}-{uuid4().hex}"
    environment = {**get_default_environment(), **dict(server.env), _MARKER: mark}
    process = await asyncio.create_subprocess_exec(
        server.command,
        *server.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        cwd=server.cwd or None,
        start_new_session=True,
    )
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with incoming, read, write, outgoing, anyio.create_task_group() as group:
            group.start_soon(_read_messages, process, incoming, log)
            group.start_soon(_write_messages, process, outgoing)
            group.start_soon(_read_errors, process, log)
            try:
                yield read, write
            finally:
                read.close()  # else a reader that nobody listens to stays stuck, and the process with it
                with anyio.CancelScope(shield=True):
                    await _stop(process, mark)
                group.cancel_scope.cancel()
    finally:
        # Not a single await: a second cancellation may have cut the orderly end short.
        _signal_tree(process, mark, signal.SIGKILL)
        _close_pipes(process)


async def _read_messages(
    process: asyncio.subprocess.Process,
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
    log: ServerLog,
) -> None:
    assert process.stdout is not None
    parts: list[bytes] = []
    size = 0
    with incoming:  # closing it is how the session learns of the end
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while chunk := await process.stdout.read(2**16):
                *lines, rest = chunk.split(b"\n")
                if lines:
                    lines[0] = b"".join([*parts, lines[0]])
                    parts, size = [], 0
                parts.append(rest)
                size += len(rest)
                if max(size, *map(len, lines), 0) > MAX_MESSAGE_BYTES:
                    log.fault = f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes (MAX_MESSAGE_BYTES)"
                    break
                for line in lines:
                    message = _parse(line, log)
                    if message is not None:
                        await incoming.send(message)
        await _wait_for_exit(process, 0.2)
        log.exit_code = process.returncode
    while await process.stdout.read(2**16):  # let it say the rest, so that it can end by itself
        pass


def _parse(line: bytes, log: ServerLog) -> SessionMessage | None:
    text = line.decode("utf-8", "replace").strip()
    if not text:
        return None
    try:
        message = mcp_types.jsonrpc_message_adapter.validate_json(text, by_name=False)
    except ValueError:
        log.add(f"(on stdout, and no message:) {text[:_MAX_LINE_CHARACTERS]}")
        return None
    return SessionMessage(message)


async def _write_messages(
    process: asyncio.subprocess.Process, outgoing: MemoryObjectReceiveStream[SessionMessage]
) -> None:
    assert process.stdin is not None
    with suppress(OSError, anyio.ClosedResourceError):
        async with outgoing:
            async for item in outgoing:
                line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(line.encode("utf-8", "replace") + b"\n")
                await process.stdin.drain()


async def _read_errors(process: asyncio.subprocess.Process, log: ServerLog) -> None:
    assert process.stderr is not None
    rest = ""
    while chunk := await process.stderr.read(2**16):
        *lines, rest = (rest + chunk.decode("utf-8", "replace")).split("\n")
        rest = rest[-_MAX_LINE_CHARACTERS:]
        for line in lines:
            log.add(line)
    log.add(rest)


async def _stop(process: asyncio.subprocess.Process, mark: str) -> None:
    """The order the specification asks for: close its stdin and wait, then ask, then kill."""
    assert process.stdin is not None
    process.stdin.close()
    if await _wait_for_exit(process, STOP_PATIENCE_S):
        return
    _signal_tree(process, mark, signal.SIGTERM)
    if await _wait_for_exit(process, STOP_PATIENCE_S):
        return
    _signal_tree(process, mark, signal.SIGKILL)
    if not await _wait_for_exit(process, STOP_PATIENCE_S):
        _log.warning("process %d of an MCP server cannot be killed; it is left behind", process.pid)


async def _wait_for_exit(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """By looking: `process.wait()` also waits for the pipes, which a descendant may hold open."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while process.returncode is None:
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def _signal_tree(process: asyncio.subprocess.Process, mark: str, number: signal.Signals) -> None:
    """Signals the process group, and descendants that left it, which still carry the mark in their environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    for pid in _marked_processes(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _marked_processes(mark: str) -> list[int]:
    """None on systems without /proc."""
    needle = f"{_MARKER}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if needle in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _close_pipes(process: asyncio.subprocess.Process) -> None:
    """A descendant that survives may hold the pipes open, and asyncio closes its end only with the other; it has no
    public method for it."""
    transport = getattr(process, "_transport", None)
    if transport is not None:
        with suppress(ProcessLookupError, PermissionError):
            transport.close()
