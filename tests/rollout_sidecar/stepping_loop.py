"""An event loop whose clock moves only when everybody waits: seconds of sleeping cost nothing, and repeat exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never blocks for a timer; says how long it would have."""

    slept = 0.0

    def select(self, timeout=None):
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.slept += timeout
        return ready


class SteppingLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0."""

    def __init__(self):
        self._stepping = _Selector()
        super().__init__(self._stepping)

    def time(self) -> float:
        """Seconds that were slept so far."""
        return self._stepping.slept


def run_stepping(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on such a loop. Nothing in it may wait for a thread or a socket."""
    with asyncio.Runner(loop_factory=SteppingLoop) as runner:
        return runner.run(main)
