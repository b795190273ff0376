"""Waiting for SGLang, which may end instead of answering."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout_sidecar.eager import start_task

T = TypeVar("T")


class EngineEnded(RuntimeError):
    """SGLang will not answer any more."""


class Answers:
    """What SGLang has been asked."""

    def __init__(self):
        """Nothing yet."""
        self._ended = False
        self._waiting: set[asyncio.Future[None]] = set()
        """One for each question that is not answered yet."""

    def end(self) -> None:
        """No question will be answered any more."""
        self._ended = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def to(self, call: Coroutine[Any, Any, T], fault: Callable[[], str]) -> T:
        """What SGLang answers to a call of its methods. EngineEnded, with what `fault` says then, if it ended first."""
        answer = start_task(call)
        try:
            if not (answer.done() or self._ended):
                await self._first(answer)
            if answer.done():
                return answer.result()
            raise EngineEnded(f"SGLang does not answer: {fault()}")
        finally:
            answer.cancel()

    async def _first(self, answer: asyncio.Task[Any]) -> None:
        """Until the answer is there, or none will be. No task of its own: this is once a turn."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: asyncio.Task[Any]) -> None:
            if not waiting.done():
                waiting.set_result(None)

        answer.add_done_callback(wake)
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)
