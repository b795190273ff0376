"""The answer of something that runs in another thread, as a future of the loop that waits for it.

Awaiting one is like awaiting the other side itself: cancelling is passed on, and the future ends when the other side
has, with whatever it made of it. A second cancellation waits no longer, so that nothing hangs on a thread that does.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LATE = "the deadline has passed"
"""Message of a cancellation: the caller does not change its mind, the other side had its time."""


class EndingError(ValueError):
    """Foreign code tried to end the process. A ValueError, since it is mostly what a policy told it to do: `exit()`."""


class Relay(asyncio.Future):
    """Made in the loop that waits. The other side calls `settle`, from any thread."""

    def __init__(self, stop: Callable[[bool], bool]):
        """Waits.

        Args:
            stop: asks the other side to stop; told whether its deadline has passed. True if it never began.
        """
        super().__init__()
        self._stop = stop

    def cancel(self, msg: Any | None = None) -> bool:
        """Passes it on; the second time the wait is over."""
        if self.done():
            return False
        stop, self._stop = self._stop, _again
        return super().cancel(msg) if stop(msg is LATE) else True

    async def answer(self) -> Any:
        """What the other side returned; raises what it raised. An answer that is there is not lost to a cancellation
        that comes too late: what it opened must be closed."""
        try:
            return await self
        except asyncio.CancelledError:
            if self.done() and not self.cancelled():
                return self.result()
            raise

    def settle(self, error: BaseException | None, result: Any = None) -> None:
        """The other side has ended."""
        try:
            self.get_loop().call_soon_threadsafe(self._settle, error, result)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    def _settle(self, error: BaseException | None, result: Any) -> None:
        if self.done():
            return
        self._stop = _again
        if isinstance(error, asyncio.CancelledError):
            super().cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)


def _again(late: bool) -> bool:
    return True


def outcome(ended: Any) -> tuple[BaseException | None, Any]:
    """Of a task, or of a future of another thread, that has ended: what it raised, and what it returned."""
    if ended.cancelled():
        return asyncio.CancelledError(), None
    error = ended.exception()
    return (None, ended.result()) if error is None else (ordinary(error), None)


def ordinary(error: BaseException) -> BaseException:
    """What would end an event loop, or cannot be handed from thread to thread, as an ordinary failure."""
    if isinstance(error, asyncio.CancelledError):
        return error
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    ending = EndingError(f"it raised {error!r}")
    ending.__cause__ = error
    return ending


async def contained(call: Coroutine[Any, Any, T]) -> T:
    """What would end the event loop, such as the SystemExit of a call of `exit()`, becomes an ordinary failure."""
    try:
        return await call
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise ordinary(error) from error
