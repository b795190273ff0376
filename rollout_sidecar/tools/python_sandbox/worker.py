"""A worker as the pool sees it: a process behind a socket that takes one request at a time."""

import asyncio
import json
import os
import socket
import struct
from typing import Any

from rollout_sidecar.tools.python_sandbox.errors import SandboxUnavailableError, WorkerLostError
from rollout_sidecar.tools.python_sandbox.inside.zygote import PRELOAD
from rollout_sidecar.tools.python_sandbox.launch import Launcher, hint
from rollout_sidecar.tools.python_sandbox.options import SandboxOptions

START_TIMEOUT_S = 30.0
_LAST_WORDS_BYTES = 4096


class Worker:
    """Made by `start`. Whoever takes it out of a pool must give it back or `kill` it."""

    def __init__(self, launcher: Launcher, bundle: int):
        """Starts the process, in the calling thread."""
        self._socket, theirs = socket.socketpair()
        self._stderr, stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        self._socket.setblocking(False)
        try:
            self._process = launcher.start(bundle, theirs.fileno(), stderr)
        except BaseException:
            self._socket.close()
            os.close(self._stderr)
            raise
        finally:
            theirs.close()
            os.close(stderr)
        self._asking = False
        self._killed = False

    @classmethod
    async def start(cls, launcher: Launcher, bundle: int, options: SandboxOptions) -> "Worker":
        """A worker that is ready for a request. SandboxUnavailableError gives what the process said before it ended."""
        try:
            worker = cls(launcher, bundle)
        except OSError as error:
            raise SandboxUnavailableError(f"a sandbox could not be started: {error}") from error
        try:
            await worker.request(_config(options, launcher.isolated), START_TIMEOUT_S)
        except WorkerLostError as error:
            await worker.buried()
            if str(error).startswith(PRELOAD):
                raise SandboxUnavailableError(
                    f"the Python sandbox {error} (see its options preload and python)"
                ) from error
            raise SandboxUnavailableError(
                f"bubblewrap could not make a sandbox here: {error}.{hint()}"
                if launcher.isolated
                else f"the Python of the sandbox did not start: {error}"
            ) from error
        except BaseException:
            worker.kill()
            await worker.buried()
            raise
        return worker

    @property
    def alive(self) -> bool:
        """The process runs, as far as is known."""
        return self._process.poll() is None

    async def request(
        self, message: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The reply's header and payloads. WorkerLostError if there is none; the worker is then dead.

        After a cancellation the worker is of no use either, and whoever holds it must kill it.
        """
        self._asking = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(message)
                (size,) = struct.unpack("!I", await self._receive(4))
                header = json.loads(await self._receive(size))
                return header, [await self._receive(size) for size in header["sizes"]]
        except TimeoutError:
            self.kill()
            raise WorkerLostError(f"no answer within {timeout_s:g} s") from None
        except (OSError, EOFError):
            self.kill()
            raise WorkerLostError(self._last_words() or "it ended without a word") from None
        finally:
            self._asking = False
            if self._killed:
                self._close()

    def kill(self) -> None:
        """Ends the process and, with its namespace, everything in it. A request under way fails. May be repeated."""
        self._killed = True
        if self.alive:
            self._process.kill()
        if not self._asking:  # else the request would wait for ever on a socket that is closed
            self._close()

    def kill_now(self) -> None:
        """The same where no event loop runs any more."""
        self._asking = False
        self.kill()
        self._process.wait()

    async def buried(self) -> None:
        """Returns when the killed process is gone."""
        while self.alive:
            await asyncio.sleep(0.002)

    async def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, struct.pack("!I", len(body)) + body)

    async def _receive(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        buffer = memoryview(bytearray(size))
        got = 0
        while got < size:
            count = await loop.sock_recv_into(self._socket, buffer[got:])
            if not count:
                raise EOFError
            got += count
        return bytes(buffer)

    def _close(self) -> None:
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self._stderr)

    def _last_words(self) -> str:
        try:
            text = os.read(self._stderr, _LAST_WORDS_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        # Of a traceback, the sentence.
        return text.strip().splitlines()[-1] if "Traceback" in text else " ".join(text.split())


def _config(options: SandboxOptions, isolated: bool) -> dict[str, Any]:
    return {
        "isolated": isolated,
        "work_folder": "/sandbox",
        "cpu_s": options.cpu_s,
        "memory_bytes": options.memory_mb << 20,
        "disk_bytes": options.disk_mb << 20,
        "max_processes": options.max_processes,
        "max_files": options.max_files,
        "output_bytes": options.output_bytes,
        "last_value": options.last_value,
        "preload": list(options.preload),
    }
