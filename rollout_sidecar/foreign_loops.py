"""Event loops of their own for users' async code: tools, interactions and rewards that are not this package's.

An `async def` that blocks (time.sleep, a request of a blocking library) holds up its loop, and everybody else's calls
on it, but not the sidecar: deadlines are kept in the server's loop. What one Python package of the user's defines
shares one loop, so that sessions and locks may be shared too. A loop that does not react for GRACE_S after a call's
deadline is lost: its thread is left behind, a new loop takes its place, and calls that had not begun are made there.
What had begun goes on when the old loop does, which then ends.

Not covered: C code that keeps the interpreter lock. It holds up every thread of the process.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rollout_sidecar.errors import ToolError
from rollout_sidecar.foreign_threads import LoopExecutor, name_of
from rollout_sidecar.relay import Relay, contained, outcome

GRACE_S = 1.0
"""How long a loop may be silent once a call on it has passed its deadline."""
MAX_LOST_LOOPS = 64
"""Loops that are replaced; beyond that the sidecar is not ready, and says why."""

_OURS = "rollout_sidecar"
_CONTRACTS = ("rollout_sidecar.tools.base", "rollout_sidecar.interactions.base")
"""What is inherited from there touches nothing of the user's, and needs no loop of its own."""
_END_S = 1.0
"""How long what is left on a lost loop may take to be cancelled."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loops: dict[str, "ForeignLoop"] = {}
_lost: set["ForeignLoop"] = set()
_warned: set[str] = set()


def owner_of(method: Callable[..., Any]) -> str:
    """The top-level package of the object that a method belongs to, or of a function; "" if that is ours."""
    while isinstance(method, functools.partial):
        method = method.func
    owner = getattr(method, "__self__", None)
    if owner is None or inspect.ismodule(owner):
        owner = method if inspect.isroutine(method) or isinstance(method, type) else type(method)
    else:
        if getattr(method, "__module__", "") in _CONTRACTS:
            return ""
        owner = owner if isinstance(owner, type) else type(owner)
    package = str(getattr(owner, "__module__", "")).partition(".")[0]
    return "" if package == _OURS else package or "?"


async def call_on_own_loop(
    owner: str, method: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any
) -> Any:
    """Awaits what a method returns on its owner's loop. ToolError if too many of those were lost."""
    foreign = _loops.get(owner)
    if foreign is not None and foreign.loop is asyncio.get_running_loop():
        return await method(*args, **kwargs)
    call = _Call(owner, method, args, kwargs)
    call.move()
    return await call.relay.answer()


def lost_loops() -> int:
    """Loops that were given up on and did not end yet."""
    return len(_lost)


class ForeignLoop:
    """A loop in a daemon thread of its own."""

    def __init__(self, owner: str):
        """Starts it."""
        self.owner = owner
        self.lost = False
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(LoopExecutor())
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._asked: float | None = None
        self._ended = False
        self._thread = threading.Thread(
            target=self._serve, name=f"foreign_loop_{owner}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    def submit(self, call: "_Call") -> bool:
        """Begins a call, in its turn; False if the loop was lost meanwhile."""
        with self._lock:
            if self.lost:
                return False
            self._waiting.append(call)
        self.post(self._begin)
        return True

    def post(self, callback: Callable[[], None]) -> None:
        """Runs a callback in the loop's thread, unless the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            pass

    def withdraw(self, call: "_Call") -> bool:
        """Whether a call had not begun, and now never will."""
        with self._lock:
            if call not in self._waiting:
                return False
            self._waiting.remove(call)
            return True

    def suspect(self, waiting: asyncio.AbstractEventLoop) -> None:
        """A call has passed its deadline: the loop must show that it lives, or it is lost."""
        if self.lost or self._asked is not None:
            return
        self._asked = time.monotonic()
        self.post(self._react)
        waiting.call_later(GRACE_S, self._check, waiting)

    # --- in the loop that waits ---

    def _check(self, waiting: asyncio.AbstractEventLoop) -> None:
        asked = self._asked
        if self.lost or asked is None:
            return
        left_s = asked + GRACE_S - time.monotonic()
        if left_s > 0:
            waiting.call_later(left_s, self._check, waiting)
            return
        self._lose()

    def _lose(self) -> None:
        with self._lock:
            self.lost = True
            moving = list(self._waiting)
            self._waiting.clear()
        with _lock:
            if _loops.get(self.owner) is self:
                del _loops[self.owner]
            _lost.add(self)
        self._warn()
        for call in moving:
            call.move()
        self.post(self._retire)

    def _warn(self) -> None:
        names = sorted({call.what for call in list(self._running) if call.late}) or [self.owner]
        if _warned.issuperset(names):
            return
        _warned.update(names)
        _log.warning(
            "%s holds up its event loop%s: no sign of life for %g s after a deadline. Its thread is left behind, and"
            " others get a new loop (%d are lost now); in an async def await what takes time, or make it a plain"
            " function, which runs in a thread",
            " or ".join(names),
            self._where(),
            GRACE_S,
            lost_loops(),
        )

    def _where(self) -> str:
        """The line that its thread is at: the innermost one outside of Python's own library."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        library = str(Path(asyncio.__file__).parent.parent)
        while frame is not None and frame.f_code.co_filename.startswith((library, "<")):
            frame = frame.f_back
        return f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""

    # --- in its own thread ---

    def _begin(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            call = self._waiting.popleft()
        self._running.add(call)
        call.begin(self._ran)

    def _ran(self, call: "_Call") -> None:
        self._running.discard(call)
        self._retire()

    def _react(self) -> None:
        self._asked = None

    def _retire(self) -> None:
        """Ends a lost loop with its last call."""
        if self.lost and not self._running:
            self._ended = True
            self.loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ended:
            try:
                self.loop.run_forever()
            except BaseException as error:  # a task of the user's called exit()
                _log.warning("something on the event loop of %s raised %r", self.owner, error)
        try:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        except BaseException as error:
            _log.warning("the event loop of %s did not end well: %r", self.owner, error)
        finally:
            self.loop.close()
            _lost.discard(self)


class _Call:
    """One call of a method, on whichever loop of its owner can begin it."""

    def __init__(
        self,
        owner: str,
        method: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.relay = Relay(self._stop)
        self.what = name_of(method)
        self.late = False
        self._owner = owner
        self._work = functools.partial(method, *args, **kwargs)
        self._context = contextvars.copy_context()
        self._foreign: ForeignLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def move(self) -> None:
        """To its owner's present loop."""
        while True:
            try:
                self._foreign = _loop_of(self._owner)
            except Exception as error:
                self.relay.settle(error)
                return
            if self._foreign.submit(self):
                return

    def begin(self, ran: Callable[["_Call"], None]) -> None:
        """In the loop's thread: runs it as a task."""

        def end(task: asyncio.Task[Any]) -> None:
            ran(self)
            self._task = None
            self.relay.settle(*outcome(task))

        self._task = asyncio.get_running_loop().create_task(
            contained(_awaited(self._work)), context=self._context
        )
        self._task.add_done_callback(end)

    def _stop(self, late: bool) -> bool:
        foreign = self._foreign
        if foreign is None or foreign.withdraw(self):
            return True
        self.late = late
        foreign.post(self._cancel)
        if late:
            foreign.suspect(self.relay.get_loop())
        return False

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


def _loop_of(owner: str) -> ForeignLoop:
    with _lock:
        if owner not in _loops:
            if len(_lost) > MAX_LOST_LOOPS:
                raise ToolError(
                    f"the code of {owner} cannot run: {len(_lost)} event loops of users' code are held up"
                )
            _loops[owner] = ForeignLoop(owner)
        return _loops[owner]
