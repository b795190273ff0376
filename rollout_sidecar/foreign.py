"""Calling foreign code: tools, interactions, reward functions. It may raise, hang, block, ignore being cancelled, or
try to end the process; whoever waits for it waits no longer than a deadline, and sees exceptions only.

Plain functions run in threads (`foreign_threads`). What is `async def` runs in the server's event loop if it is this
package's, else in a loop of its owner's (`foreign_loops`), which it may hold up as it likes.
"""

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rollout_sidecar import foreign_loops, foreign_threads
from rollout_sidecar.eager import start_task
from rollout_sidecar.errors import DeadlineError, ToolError, describe
from rollout_sidecar.foreign_loops import call_on_own_loop, owner_of
from rollout_sidecar.foreign_threads import THREADS, name_of
from rollout_sidecar.relay import LATE, EndingError, Relay, ordinary, outcome

__all__ = [
    "EndingError",
    "begin",
    "bounded",
    "ends_within",
    "invoke",
    "leave",
    "takes_keyword",
    "takes_positional",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_left_behind: set[asyncio.Task] = set()
_STEPS_OF_AN_ANSWER = 3
"""Rounds of the event loop from a thread's word to the end of the task that waits for it."""


async def bounded(call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Awaits foreign code, at most timeout_s: raises DeadlineError then, even if it ignores being cancelled."""
    task = begin(call)
    try:
        in_time = await ends_within(task, timeout_s)
    except BaseException:
        leave(task)
        raise
    if not in_time:
        leave(task, late=True)
        raise DeadlineError(f"no result within {timeout_s:g} s")
    if task.cancelled():  # by itself: it must not look like the cancellation of the trajectory
        raise ToolError("it was cancelled")
    return task.result()


async def ends_within(task: asyncio.Future[Any], timeout_s: float) -> bool:
    """Waits for a task, without cancelling it, and says whether it ended in time.

    A loop that was busy hears of an answer from another thread together with the deadline: then the answer counts.
    """
    if not task.done():
        await asyncio.wait({task}, timeout=timeout_s)
    for _ in range(_STEPS_OF_AN_ANSWER):
        if task.done():
            break
        await asyncio.sleep(0)
    return task.done()


def begin(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts foreign code as a task of its own. What it raises may be looked at by nobody."""

    def end(task: asyncio.Task[T]) -> None:
        call.close()  # it may have been cancelled before it began
        if not task.cancelled():
            task.exception()  # else asyncio complains where the waiter was cancelled meanwhile

    task = start_task(_contained(call))
    task.add_done_callback(end)
    return task


async def invoke(method: Callable[..., Awaitable[T] | T], *args: Any, **kwargs: Any) -> T:
    """Calls a foreign method where it holds up nobody: a coroutine of the user's on its owner's loop, whatever is no
    coroutine in a thread."""
    owner = owner_of(method)
    if inspect.iscoroutinefunction(method):
        if not owner:
            return await method(*args, **kwargs)
        return await call_on_own_loop(owner, method, *args, **kwargs)
    result = await _in_thread(method, *args, **kwargs)
    if not inspect.isawaitable(result):
        return result
    return await (call_on_own_loop(owner, _itself, result) if owner else result)


def leave(task: asyncio.Task, *, late: bool = False) -> None:
    """Cancels a task, if it has not ended, and waits for it no longer.

    Args:
        late: it has passed its deadline. The thread or loop that it holds up is then replaced.
    """
    if task.done():
        return
    task.cancel(LATE if late else None)
    _left_behind.add(task)
    task.add_done_callback(_forget)


def lost_threads() -> int:
    """Threads that foreign code which was given up on still occupies, those of event loops included."""
    return THREADS.lost + foreign_loops.lost_loops()


def exhausted() -> str:
    """Why no more users' code can run; "" if it can."""
    threads, loops = THREADS.lost, foreign_loops.lost_loops()
    if threads <= foreign_threads.MAX_LOST_THREADS and loops <= foreign_loops.MAX_LOST_LOOPS:
        return ""
    return (
        f"tools, interactions or rewards hang: {threads} functions and {loops} event loops did not end in time and"
        " still run (the log names them); bound what they wait for, and start the sidecar again"
    )


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
    """As `contained`, in the server's own thread, where a KeyboardInterrupt is that of Ctrl-C."""
    try:
        return await call
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ordinary(error) from error


async def _in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a plain function returns."""

    def stop(late: bool) -> bool:
        if job.cancel():
            return True
        if late:
            THREADS.warn(job)
        return False

    relay = Relay(stop)
    run = contextvars.copy_context().run
    job = THREADS.submit(partial(run, function, *args, **kwargs), name_of(function))
    job.add_done_callback(lambda job: relay.settle(*outcome(job)))
    return await relay.answer()


async def _itself(result: Awaitable[T]) -> T:
    return await result


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return []


def _forget(task: asyncio.Task) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.info("something that was given up on ended with: %s", describe(task.exception()))  # type: ignore
