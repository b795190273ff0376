"""The sandbox as its users see it: run code, alone or in a session."""

import asyncio
import time
from typing import Any, NamedTuple

from rollout_sidecar.tools.python_sandbox.errors import SandboxUnavailableError, WorkerLostError
from rollout_sidecar.tools.python_sandbox.options import SandboxOptions
from rollout_sidecar.tools.python_sandbox.pool import Pool
from rollout_sidecar.tools.python_sandbox.result import (
    MAX_CODE_CHARACTERS,
    SandboxResult,
    make_result,
)
from rollout_sidecar.tools.python_sandbox.worker import Worker

_GRACE_S = 10.0
"""What a worker may take beyond a call's time limit before it is given up."""
_END_TIMEOUT_S = 5.0

_shared: dict[asyncio.AbstractEventLoop, dict[SandboxOptions, "PythonSandbox"]] = {}


class PythonSandbox:
    """`start`, `run` as often and as many at once as you like, `close`. `run` starts it if nobody did."""

    def __init__(self, options: SandboxOptions):
        self._options = options
        self._pool: Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._sessions: dict[str, _Session] = {}
        self._users = 0

    @property
    def live(self) -> int:
        """Calls that run, and sessions that hold a worker."""
        return self._pool.lent if self._pool is not None else 0

    async def start(self) -> None:
        """Starts the pool, once; each `start` wants its own `close`. SandboxUnavailableError says what is missing."""
        self._users += 1
        try:
            await self._ready()
        except BaseException:
            self._users -= 1
            raise

    async def close(self) -> None:
        """Ends the pool and every session when the last of those that started it closes it."""
        self._users = max(0, self._users - 1)
        if self._users or self._pool is None:
            return
        pool, self._pool = self._pool, None
        self._sessions.clear()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        await pool.close()

    async def run(
        self, code: str, *, stdin: str = "", session: str = "", timeout_s: float | None = None
    ) -> SandboxResult:
        """Runs a program to its end, or to a limit.

        Args:
            code: the source. Of a session: its variables stay for the session's next call.
            stdin: what the program reads from its standard input.
            session: any name; "" is a program of its own. Calls of one session run one after the other.
            timeout_s: this call's limit of wall time, in place of the options'.

        Raises SandboxUnavailableError where no sandbox can be made; everything else is a status of the result.
        """
        for name, text in (("code", code), ("stdin", stdin)):
            if len(text) > MAX_CODE_CHARACTERS:
                reason = f"The {name} has {len(text)} characters, at most {MAX_CODE_CHARACTERS} are allowed."
                return SandboxResult(status="too_long", reason=reason)
        pool = await self._ready()
        wall_s = self._options.wall_s if timeout_s is None else timeout_s
        message = {
            "op": "run",
            "code": code,
            "stdin": stdin,
            "wall_s": wall_s,
            "keep": bool(session),
        }
        call = _Call(message, self._options, time.monotonic())
        if session:
            return await self._sessions.setdefault(session, _Session(pool)).run(call)
        worker = await pool.take()
        usable = False
        try:
            result = await call.on(worker)
            usable = result.status != "lost"
        finally:
            if usable:
                pool.give_back(worker)
            else:
                pool.discard(worker)
        return result

    async def end_session(self, session: str) -> None:
        """Ends a session's processes and forgets its state. A call that is still running ends as "lost"."""
        held = self._sessions.pop(session, None)
        if held is not None:
            await held.end()

    def abandon(self) -> None:
        """Ends the pool of an event loop that is gone."""
        if self._pool is not None:
            self._pool.abandon()
        self._pool, self._opening, self._users = None, None, 0
        self._sessions.clear()

    async def _ready(self) -> Pool:
        loop = asyncio.get_running_loop()
        if self._pool is not None and self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(
                    "a Python sandbox serves one event loop; make another for this one"
                )
            self.abandon()
        if self._pool is None:
            self._loop, self._pool = loop, Pool(self._options)
            self._opening = loop.create_task(self._pool.open())
        pool, opening = self._pool, self._opening
        if opening is not None:
            try:
                # A caller that gives up must not take the others' pool with it.
                await asyncio.shield(opening)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise SandboxUnavailableError("the Python sandbox was closed") from None
            except Exception:
                if self._pool is pool:
                    self._pool = self._opening = None
                    await pool.close()
                raise
            self._opening = None
        return pool


class _Session:
    """The worker of a session, from its first call to its end."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._worker: Worker | None = None
        self._one_at_a_time = asyncio.Lock()
        self._ended = False

    async def run(self, call: "_Call") -> SandboxResult:
        """The session's next call."""
        async with self._one_at_a_time:
            if self._worker is None and not self._ended:
                self._worker = await self._pool.take()
            if self._worker is None:
                return _lost("the session was ended")
            if self._ended:  # while it waited for the worker
                self._pool.give_back(self._worker)
                self._worker = None
                return _lost("the session was ended")
            usable = False
            try:
                result = await call.on(self._worker)
                usable = result.status != "lost"
            finally:
                if not usable:
                    self._drop()
            return result

    async def end(self) -> None:
        """Ends what runs; the worker, if it is unharmed, goes back to the pool."""
        self._ended = True
        worker = self._worker
        if worker is None:
            return
        if self._one_at_a_time.locked():
            worker.kill()  # its call ends as lost, and drops it
            return
        self._worker = None
        usable = False
        try:
            await worker.request({"op": "end"}, _END_TIMEOUT_S)
            usable = True
        except WorkerLostError:
            pass
        finally:
            if usable:
                self._pool.give_back(worker)
            else:
                self._pool.discard(worker)

    def _drop(self) -> None:
        if self._worker is not None:
            self._pool.discard(self._worker)
            self._worker = None


class _Call(NamedTuple):
    """One request, and what its result needs to be told."""

    message: dict[str, Any]
    options: SandboxOptions
    asked: float

    async def on(self, worker: Worker) -> SandboxResult:
        """Runs it. The worker is of no use any more if this raises, or if the status is lost."""
        queue_s = time.monotonic() - self.asked
        wall_s = self.message["wall_s"]
        try:
            header, outputs = await worker.request(self.message, wall_s + _GRACE_S)
        except WorkerLostError as error:
            return _lost(str(error))
        return make_result(
            header,
            outputs,
            self.options,
            wall_s=wall_s,
            queue_s=queue_s,
            session=self.message["keep"],
        )


def _lost(why: str) -> SandboxResult:
    return SandboxResult(status="lost", reason=f"The sandbox was lost: {why}.")


def shared_sandbox(options: SandboxOptions) -> PythonSandbox:
    """The sandbox of the running event loop with these options: tools and rewards that agree on them share its workers.
    Users' own code runs on other loops than the rest (`foreign_loops`)."""
    for loop in [loop for loop in list(_shared) if loop.is_closed()]:
        for ended in _shared.pop(loop, {}).values():
            ended.abandon()
    return _shared.setdefault(asyncio.get_running_loop(), {}).setdefault(
        options, PythonSandbox(options)
    )
