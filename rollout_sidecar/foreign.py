"""Calling foreign code: tools, interactions, reward functions. It may raise, hang, ignore being cancelled, or try to
end the process; whoever waits for it waits no longer than a deadline, and sees exceptions only.

Not covered: a coroutine that blocks the event loop (time.sleep in an `async def`). Plain functions run in threads.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rollout_sidecar.errors import DeadlineError, ToolError, describe

T = TypeVar("T")

_log = logging.getLogger(__name__)
_left_behind: set[asyncio.Task] = set()


class EndingError(ValueError):
    """Foreign code tried to end the process. A ValueError, since it is mostly what a policy told it to do: `exit()`."""


async def bounded(call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Awaits foreign code, at most timeout_s: raises DeadlineError then, even if it ignores being cancelled."""
    task = begin(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        late = not task.done()
        if late:
            leave(task)
    if late:
        raise DeadlineError(f"no result within {timeout_s:g} s")
    if task.cancelled():  # by itself: it must not look like the cancellation of the trajectory
        raise ToolError("it was cancelled")
    return task.result()


def begin(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts foreign code as a task of its own. What it raises may be looked at by nobody."""

    def end(task: asyncio.Task[T]) -> None:
        call.close()  # it may have been cancelled before it began
        if not task.cancelled():
            task.exception()  # else asyncio complains where the waiter was cancelled meanwhile

    task = asyncio.ensure_future(_contained(call))
    task.add_done_callback(end)
    return task


async def invoke(method: Callable[..., Awaitable[T] | T], *args: Any, **kwargs: Any) -> T:
    """Calls a foreign method; one that is not a coroutine runs in a thread, where it holds up nobody."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await asyncio.to_thread(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result  # type: ignore[return-value]


def leave(task: asyncio.Task) -> None:
    """Cancels a task and waits for it no longer."""
    task.cancel()
    _left_behind.add(task)
    task.add_done_callback(_forget)


def takes_keyword(method: Callable[..., Any], name: str) -> bool:
    """Whether a method can be given this keyword argument."""
    kinds = inspect.Parameter
    return any(
        parameter.kind is kinds.VAR_KEYWORD
        or (parameter.name == name and parameter.kind is not kinds.POSITIONAL_ONLY)
        for parameter in _parameters(method)
    )


def takes_positional(method: Callable[..., Any]) -> bool:
    """Whether a method can be given a positional argument."""
    kinds = inspect.Parameter
    return any(
        parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)
        for parameter in _parameters(method)
    )


async def _contained(call: Coroutine[Any, Any, T]) -> T:
    """What would end the event loop, such as the SystemExit of a call of `exit()`, becomes an ordinary failure."""
    try:
        return await call
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EndingError(f"it raised {error!r}") from error


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return []


def _forget(task: asyncio.Task) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.info("something that was given up on ended with: %s", describe(task.exception()))  # type: ignore
