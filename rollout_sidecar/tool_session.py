"""The tools of one trajectory, from create to release.

Tools are foreign code, so each method runs as a task of its own with a deadline, behind one boundary. A tool that
ignores its cancellation is left behind rather than waited for. `release` runs exactly once for every instance whose
`create` succeeded, even if the trajectory was cancelled while that create was still under way.
"""

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from rollout_sidecar.errors import DeadlineError, ToolError, boundary, describe, safe_text
from rollout_sidecar.formats.base import ParsedCall
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import CallStatus, ToolCallRecord
from rollout_sidecar.tools.arguments import check_arguments
from rollout_sidecar.tools.base import BaseTool

T = TypeVar("T")

RELEASE_TIMEOUT_S = 10.0
"""How long `release`, and a `create` that is being abandoned, may take."""

MAX_ARGUMENT_DEPTH = 64

_log = logging.getLogger(__name__)
_left_behind: set[asyncio.Task] = set()


class ToolSession:
    """`open`, then any number of `call`s at once, then `rewards`, then `close`. Only `open` raises."""

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        instance_id: str,
        kwargs: Mapping[str, Mapping[str, Any] | None],
        *,
        timeout_s: float,
        metrics: Metrics,
    ):
        """Nothing is called yet.

        Args:
            tools: those offered to the policy.
            instance_id: the same for all of them, and for nobody else.
            kwargs: by tool: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs. None means absent,
                at every level: tables of records fill absent fields with None.
            timeout_s: deadline of one create, execute or calc_reward.
            metrics: where calls and failures are counted.
        """
        self._tools = tools
        self._instance_id = instance_id
        self._kwargs = kwargs
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._creating: dict[str, asyncio.Task] = {}
        self._instances: dict[str, str] = {}

    async def open(self) -> list[str]:
        """Creates an instance of each tool; returns what they have to say before the first turn."""
        self._creating = {
            name: asyncio.ensure_future(
                _invoke(tool.create, self._instance_id, **self._arguments(name, "create_kwargs"))
            )
            for name, tool in self._tools.items()
        }
        if self._creating:
            await asyncio.wait(self._creating.values(), timeout=self._timeout_s)
        greetings = []
        for name, task in self._creating.items():
            with boundary(ToolError, f"create of tool {name!r}"):
                if not task.done():
                    raise DeadlineError(
                        f"create of tool {name!r} gave no answer within {self._timeout_s:g} s"
                    )
                self._instances[name], response = _created(task.result())
                greetings.append(response)
        return [text for text in greetings if text]

    async def call(self, call: ParsedCall) -> ToolCallRecord:
        """Runs one call, or says to the policy why it was not run."""
        name = safe_text(call.name)
        arguments = None if call.arguments is None else wire_safe(call.arguments)
        started = time.monotonic()
        status, text, reward = await self._answer(call, name, arguments)
        latency_s = time.monotonic() - started
        known = name if name in self._tools else "unknown"
        self._metrics.count("tool_seconds_total", latency_s, tool=known)
        return self.record(call, status, text, latency_s=latency_s, reward=reward)

    def record(
        self,
        call: ParsedCall,
        status: CallStatus,
        text: str,
        *,
        latency_s: float = 0.0,
        reward: float = 0.0,
    ) -> ToolCallRecord:
        """The record of a call, counted."""
        name = safe_text(call.name)
        known = name if name in self._tools else "unknown"
        self._metrics.count("tool_calls_total", tool=known, status=status)
        return ToolCallRecord(
            name=name,
            arguments=None if call.arguments is None else wire_safe(call.arguments),
            raw=safe_text(call.raw),
            status=status,
            result=safe_text(text),
            latency_s=latency_s,
            reward=reward,
        )

    async def rewards(self) -> dict[str, float]:
        """Each tool's reward for the trajectory; 0, logged and counted, where calc_reward fails."""
        names = list(self._instances)
        values = await asyncio.gather(*map(self._reward, names))
        return dict(zip(names, values, strict=True))

    async def close(self) -> None:
        """Releases every instance. Creates that are still under way are waited for, within a bound."""
        if self._creating:
            _, pending = await asyncio.wait(self._creating.values(), timeout=RELEASE_TIMEOUT_S)
            for task in pending:
                _leave(task)
        creating, self._creating, self._instances = self._creating, {}, {}
        await asyncio.gather(*(self._release(name, task) for name, task in creating.items()))

    async def _answer(
        self, call: ParsedCall, name: str, arguments: dict[str, Any] | None
    ) -> tuple[CallStatus, str, float]:
        if call.error or arguments is None:
            return "parse_error", _parse_problem(call.error), 0.0
        tool = self._tools.get(name)
        if tool is None:
            known = list(self._tools)
            return "unknown_tool", f"Unknown function {name[:80]!r}. Available tools: {known}", 0.0
        problem = check_arguments(tool.tool_schema, arguments)
        if problem is not None:
            return "bad_arguments", f"Invalid arguments for {name!r}: {problem}", 0.0
        try:
            text, reward = await self._execute(name, tool, arguments)
        except DeadlineError as error:
            return "timeout", f"Error executing tool {name!r}: {error}", 0.0
        except ToolError as error:
            return "error", f"Error executing tool {name!r}: {error}", 0.0
        return "ok", text, reward

    async def _execute(
        self, name: str, tool: BaseTool, arguments: dict[str, Any]
    ) -> tuple[str, float]:
        kwargs = self._arguments(name, "execute_kwargs")
        with boundary(ToolError):
            instance_id = self._instances[name]
            answer = await bounded(
                _invoke(tool.execute, instance_id, arguments, **kwargs), self._timeout_s
            )
            answer = answer if isinstance(answer, tuple) else (answer,)
            return _text(answer[0]), _finite(answer[1] if len(answer) > 1 else 0.0, "reward")

    async def _reward(self, name: str) -> float:
        kwargs = self._arguments(name, "calc_reward_kwargs")
        try:
            with boundary(ToolError):
                method = self._tools[name].calc_reward
                call = _invoke(method, self._instances[name], **kwargs)
                return _finite(await bounded(call, self._timeout_s), "reward")
        except (ToolError, DeadlineError) as error:
            self._failed(name, "calc_reward", error)
            return 0.0

    async def _release(self, name: str, creating: asyncio.Task) -> None:
        if not creating.done() or creating.cancelled() or creating.exception() is not None:
            return
        kwargs = self._arguments(name, "release_kwargs")
        try:
            with boundary(ToolError):
                instance_id, _ = _created(creating.result())
                await bounded(
                    _invoke(self._tools[name].release, instance_id, **kwargs), RELEASE_TIMEOUT_S
                )
        except (ToolError, DeadlineError) as error:
            self._failed(name, "release", error)

    def _failed(self, name: str, method: str, error: Exception) -> None:
        self._metrics.count("tool_failures_total", tool=name, method=method)
        _log.warning("%s of tool %r failed: %s", method, name, error)

    def _arguments(self, name: str, kind: str) -> dict[str, Any]:
        kwargs = (self._kwargs.get(name) or {}).get(kind) or {}
        return {key: value for key, value in kwargs.items() if value is not None}


async def bounded(call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Awaits foreign code, at most timeout_s: raises DeadlineError then, even if it ignores being cancelled."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        late = not task.done()
        if late:
            _leave(task)
    if late:
        raise DeadlineError(f"no result within {timeout_s:g} s")
    if task.cancelled():  # by itself: it must not look like the cancellation of the trajectory
        raise ToolError("it was cancelled")
    return task.result()


def wire_safe(value: Any, depth: int = 0) -> Any:
    """JSON-like data as it can be sent: text that UTF-8 can hold, at most MAX_ARGUMENT_DEPTH levels."""
    if isinstance(value, str):
        return safe_text(value)
    if isinstance(value, dict | list) and depth >= MAX_ARGUMENT_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {safe_text(key): wire_safe(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [wire_safe(item, depth + 1) for item in value]
    return value


async def _invoke(method: Callable[..., Awaitable[T] | T], *args: Any, **kwargs: Any) -> T:
    """Calls a tool's method; one that is not a coroutine runs in a thread, where it holds up nobody."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await asyncio.to_thread(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result  # type: ignore[return-value]


def _leave(task: asyncio.Task) -> None:
    task.cancel()
    _left_behind.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.info("a tool that was given up on ended with: %s", describe(task.exception()))  # type: ignore


def _created(answer: Any) -> tuple[str, str]:
    """Instance id and greeting; verl's oldest tools return the id alone."""
    if isinstance(answer, str):
        return answer, ""
    instance_id, response = answer
    return instance_id, _text(response)


def _text(response: Any) -> str:
    """What a tool answered: verl's ToolResponse, text, or something to be shown as text."""
    if response is None or isinstance(response, str):
        return safe_text(response or "")
    if not hasattr(response, "text"):
        return safe_text(str(response))
    if response.text or not (getattr(response, "image", None) or getattr(response, "video", None)):
        return safe_text(response.text or "")
    return "The tool answered with an image or a video, which cannot be shown."


def _finite(value: Any, what: str) -> float:
    number = 0.0 if value is None else float(value)
    if not math.isfinite(number):
        raise ToolError(f"the tool returned {what} = {number}, expected a finite number")
    return number


def _parse_problem(error: str) -> str:
    prefix = "invalid JSON: "
    if error.startswith(prefix):
        return f"Invalid JSON in tool call: {error.removeprefix(prefix)}"
    return f"Invalid tool call: {error}"
