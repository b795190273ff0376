"""An event loop in a thread of its own: what is begun there goes on while the caller does something else."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class Call(Generic[Answer]):
    """A coroutine under way in a LoopThread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, Answer]):
        self._loop = loop
        self._task: asyncio.Task[Answer] | None = None
        self._ended: Future[Answer] = Future()
        loop.call_soon_threadsafe(self._begin, call)

    def cancel(self) -> None:
        """Asks it to end. Returns at once, and may be called by a signal handler."""
        with suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def result(self) -> Answer:
        """What it gives or raises, once it has ended and cleaned up: CancelledError where it was cancelled."""
        return self._ended.result()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    def _begin(self, call: Coroutine[Any, Any, Answer]) -> None:
        self._task = self._loop.create_task(call)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Answer]) -> None:
        if task.cancelled():
            self._ended.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            self._ended.set_exception(error)
        else:
            self._ended.set_result(task.result())


class LoopThread:
    """The loop. It runs from the beginning until `close`."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Coroutine[Any, Any, Answer]) -> Call[Answer]:
        """Runs it there, and returns at once."""
        return Call(self._loop, call)

    def run(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs it there, and waits for what it gives. What the caller is interrupted by, ends it."""
        begun = self.begin(call)
        try:
            return begun.result()
        except BaseException:
            begun.cancel()
            raise

    def close(self) -> None:
        """Ends the loop. Everything that was begun must have ended, but what it left in the background is cancelled."""
        if self._loop.is_closed():
            return
        self.run(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all() -> None:
    """Cancels every other task of this loop, and waits for them and for the executor's threads."""
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
