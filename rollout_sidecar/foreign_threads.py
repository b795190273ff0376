"""Threads for foreign plain functions. One that is given up on keeps its thread for as long as it likes; another thread
takes that one's place, so that hanging functions use up no capacity, up to a bound.

    MAX_THREADS         run at once, those that were given up on not counted; more wait for their turn
    MAX_LOST_THREADS    replaced; beyond that the sidecar is not ready, and says why
"""

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_sidecar.relay import ordinary

MAX_THREADS = 256
MAX_LOST_THREADS = 1024

_log = logging.getLogger(__name__)


class Job(concurrent.futures.Future):
    """A function that waits for a thread, runs, or has ended. `cancel` gives it up while it runs."""

    def __init__(self, threads: "Threads", work: Callable[[], Any], what: str):
        super().__init__()
        self.work: Callable[[], Any] | None = work
        self.what = what
        self.given_up = False
        self.ended = False
        self._threads = threads

    def cancel(self) -> bool:
        """True if it never began. Otherwise it goes on, its thread is lost until it ends, and False is returned."""
        return super().cancel() or self._threads.give_up(self)


class Threads:
    """Daemon threads, started as they are needed: nothing waits for them when the process ends."""

    def __init__(self):
        """None yet."""
        self.lost = 0
        """Threads whose functions were given up on and still run."""
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        """Threads that wait for a job which nobody has handed in yet."""
        self._backlog = 0
        """Jobs that no thread is meant for."""
        self._warned: set[str] = set()

    def submit(self, work: Callable[[], Any], what: str = "") -> Job:
        """Runs a function in a thread.

        Args:
            what: how the log calls it.
        """
        job = Job(self, work, what or name_of(work))
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif not self._grow():
                self._backlog += 1
        self._jobs.put(job)
        return job

    def give_up(self, job: Job) -> bool:
        """Counts the thread of a running job as lost; always False."""
        with self._lock:
            if not job.ended and not job.given_up:
                job.given_up = True
                self.lost += 1
                if self._backlog and self._grow():
                    self._backlog -= 1
        return False

    def warn(self, job: Job) -> None:
        """Says, once for each function, that it did not end in time."""
        if job.ended or job.what in self._warned:
            return
        self._warned.add(job.what)
        _log.warning(
            "%s did not end in time, and cannot be stopped: its thread is lost until it ends (%d are lost now)",
            job.what,
            self.lost,
        )

    def _grow(self) -> bool:
        """Whether there is one more thread now."""
        if self._threads >= MAX_THREADS + min(self.lost, MAX_LOST_THREADS):
            return False
        thread = threading.Thread(target=self._work, name="foreign", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no more; those that there are go on
            if not self._threads:
                raise
            _log.warning("no further thread for foreign functions: %s", error)
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            self._run(job)
            with self._lock:
                job.ended = True
                self.lost -= job.given_up
                if self._threads > MAX_THREADS + min(self.lost, MAX_LOST_THREADS):
                    self._threads -= 1
                    return
                if self._backlog:
                    self._backlog -= 1
                else:
                    self._idle += 1
            del job

    def _run(self, job: Job) -> None:
        if not job.set_running_or_notify_cancel():
            return
        work, job.work = job.work, None
        try:
            assert work is not None, "a job runs once"
            result = work()
        except BaseException as error:
            job.set_exception(ordinary(error))
        else:
            job.set_result(result)


THREADS = Threads()
"""Those of this process."""


class LoopExecutor(ThreadPoolExecutor):
    """The same threads as the default executor of an event loop, for `asyncio.to_thread`. Outlives the loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Job:
        """As an executor's."""
        return THREADS.submit(lambda: fn(*args, **kwargs), name_of(fn, *args))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: others use them too."""


def name_of(function: Any, *args: Any) -> str:
    """How the log calls a function. asyncio.to_thread hands over a partial of contextvars' `run`."""
    while hasattr(function, "func"):
        function, args = function.func, (*function.args, *args)
    if getattr(function, "__name__", "") == "run" and args:
        return name_of(*args)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"
