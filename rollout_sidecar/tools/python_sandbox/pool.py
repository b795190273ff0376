"""Workers kept warm, lent to one call or one session at a time.

A call takes the worker that has rested longest. When calls wait, the pool grows up to max_workers: a few programs that
run into their time limit must not hold up all others. A worker whose call was cancelled is killed, never reused.
"""

import asyncio
import logging
import os
from collections import deque

from rollout_sidecar.tools.python_sandbox.errors import SandboxUnavailableError
from rollout_sidecar.tools.python_sandbox.launch import Launcher, make_bundle, make_launcher
from rollout_sidecar.tools.python_sandbox.options import SandboxOptions
from rollout_sidecar.tools.python_sandbox.worker import Worker

STALLED_S, LONG_WAIT_S = 0.05, 0.5
"""The pool grows if no worker came free for the one time, or if a call has waited for the other. To start a worker
costs as much as ten calls, so a queue that moves is left alone."""
SHRINK_AFTER_S = 300.0
"""How long workers beyond `workers` are kept idle."""
STARTS_AT_ONCE = max(2, os.cpu_count() or 1)

_log = logging.getLogger(__name__)


class Pool:
    """`open`, then `take` and `give_back` or `discard`, then `close`. Belongs to one event loop."""

    def __init__(self, options: SandboxOptions):
        self._options = options
        self._wanted = options.workers_at_start()
        self._launcher: Launcher | None = None
        self._bundle = -1
        self._idle: deque[Worker] = deque()
        self._lent: set[Worker] = set()
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._asked: dict[asyncio.Future[Worker], float] = {}
        self._moved = 0.0
        self._starting = 0
        self._tasks: set[asyncio.Task] = set()
        self._growing: asyncio.TimerHandle | None = None
        self._shrinking: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def size(self) -> int:
        """Workers alive, those that are starting too."""
        return len(self._idle) + len(self._lent) + self._starting

    @property
    def lent(self) -> int:
        """Workers in calls and sessions."""
        return len(self._lent)

    async def open(self) -> None:
        """Starts the workers. SandboxUnavailableError if the first cannot be."""
        # It runs bubblewrap and Python once to see what they are.
        self._launcher = await asyncio.to_thread(make_launcher, self._options)
        self._bundle = make_bundle()
        self._idle.append(await Worker.start(self._launcher, self._bundle, self._options))
        self._start(self._wanted - 1)
        while self._starting:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def take(self) -> Worker:
        """A worker for the caller alone. SandboxUnavailableError if there is none and none can be started."""
        if self._closed:
            raise SandboxUnavailableError("the Python sandbox was closed")
        while self._idle and not self._waiting:
            worker = self._idle.popleft()
            if worker.alive:
                return self._lend(worker)
            self.discard(worker)  # something killed it while it rested
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Worker] = loop.create_future()
        self._waiting.append(turn)
        self._asked[turn] = loop.time()
        if not self.size:
            self._start(1)
        if self._growing is None:
            self._growing = loop.call_later(STALLED_S, self._grow)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(turn.result())
            raise
        finally:
            del self._asked[turn]
            if turn in self._waiting:
                self._waiting.remove(turn)

    def give_back(self, worker: Worker) -> None:
        """The worker is as it was when it was taken."""
        self._lent.discard(worker)
        self._moved = asyncio.get_running_loop().time()
        self._offer(worker)

    def discard(self, worker: Worker) -> None:
        """The worker is of no use any more; another takes its place."""
        self._lent.discard(worker)
        self._end(worker)
        if not self._closed:
            self._start(max(self._wanted - self.size, min(1, len(self._waiting))))

    async def close(self) -> None:
        """Ends all workers, also those in use, and waits until they are gone."""
        self._closed = True
        for timer in (self._growing, self._shrinking):
            if timer is not None:
                timer.cancel()
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(SandboxUnavailableError("the Python sandbox was closed"))
        for worker in (*self._idle, *self._lent):
            self._end(worker)
        self._idle.clear()
        self._lent.clear()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._bundle >= 0:
            os.close(self._bundle)
            self._bundle = -1

    def abandon(self) -> None:
        """Kills the workers of an event loop that is gone, as far as that can be done without it."""
        self._closed = True
        for worker in (*self._idle, *self._lent):
            worker.kill_now()
        if self._bundle >= 0:
            os.close(self._bundle)
            self._bundle = -1

    def _lend(self, worker: Worker) -> Worker:
        self._lent.add(worker)
        return worker

    def _offer(self, worker: Worker) -> None:
        if self._closed:
            return self._end(worker)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                return turn.set_result(self._lend(worker))
        self._idle.append(worker)
        if self.size > self._wanted and self._shrinking is None:
            loop = asyncio.get_running_loop()
            self._shrinking = loop.call_later(SHRINK_AFTER_S, self._shrink)

    def _shrink(self) -> None:
        self._shrinking = None
        while self.size > self._wanted and self._idle:
            self._end(self._idle.pop())

    def _grow(self) -> None:
        if self._growing is not None:
            self._growing.cancel()
            self._growing = None
        if not self._waiting or self._closed:
            return
        loop = asyncio.get_running_loop()
        waited_s = loop.time() - self._asked[self._waiting[0]]
        if loop.time() - self._moved > STALLED_S or waited_s > LONG_WAIT_S:
            self._start(len(self._waiting) - self._starting)
        self._growing = loop.call_later(STALLED_S, self._grow)

    def _start(self, count: int) -> None:
        room = self._options.max_workers - self.size
        for _ in range(min(count, room, STARTS_AT_ONCE - self._starting)):
            self._starting += 1
            self._spawn(self._start_one())
        # The rest follows when one of these is there.

    async def _start_one(self) -> None:
        assert self._launcher is not None, "open comes first"
        try:
            worker = await Worker.start(self._launcher, self._bundle, self._options)
        except SandboxUnavailableError as error:
            self._starting -= 1
            _log.warning("a worker of the Python sandbox could not be started: %s", error)
            if not self.size:
                for turn in self._waiting:
                    if not turn.done():
                        turn.set_exception(error)
            return
        self._starting -= 1
        self._offer(worker)
        if not self._closed:
            self._start(self._wanted - self.size)
            self._grow()

    def _end(self, worker: Worker) -> None:
        worker.kill()
        self._spawn(worker.buried())

    def _spawn(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
