"""The tools of one trajectory, from create to release.

How long an instance lives is the profile's: by default as long as the trajectory (create, any number of executes,
calc_reward, release), in verl's profiles B and C for one call (create, execute, release). `release` runs exactly once
for every instance whose `create` succeeded, even if the trajectory was cancelled while that create was still under way.

Tools are foreign code, so each method runs as a task of its own with a deadline, behind one boundary. A tool that
ignores its cancellation is left behind rather than waited for.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout_sidecar.errors import DeadlineError, ToolError, boundary, safe_text
from rollout_sidecar.foreign import bounded, invoke, takes_keyword
from rollout_sidecar.foreign_values import numbers
from rollout_sidecar.formats.base import ParsedCall
from rollout_sidecar.leases import Lease, Leases
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.profiles import PROFILES, Profile
from rollout_sidecar.protocol import CallStatus, Message, ToolCallRecord
from rollout_sidecar.tools.arguments import check_arguments
from rollout_sidecar.tools.base import BaseTool, ToolFailure
from rollout_sidecar.tools.faults import RaisedError, is_timeout
from rollout_sidecar.tools.gate import Passage, ToolGate, UnavailableError

MAX_ARGUMENT_DEPTH = 64

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AgentData:
    """What verl from 0.5 on hands to `execute` as agent_data; profiles B and C do so too. A tool may keep things for
    the trajectory in extra_fields; changes of the other fields change nothing."""

    request_id: str
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0
    """Rounds of tools, and replies of an interaction."""
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Answer(NamedTuple):
    """What an execute returned, as far as it can be used."""

    text: str
    reward: float
    metrics: dict[str, float]


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
        profile: Profile = PROFILES["default"],
        gates: Mapping[str, ToolGate] | None = None,
        leases: Leases | None = None,
    ):
        """Nothing is called yet.

        Args:
            tools: those offered to the policy.
            instance_id: the same for all of them, and for nobody else.
            kwargs: by tool: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs. None means absent,
                at every level: tables of records fill absent fields with None.
            timeout_s: deadline of one create, execute or calc_reward.
            metrics: where calls and failures are counted.
            profile: decides how long instances live, and how create gets its kwargs.
            gates: by tool; shared by all trajectories.
            leases: the book of what is open; shared too.
        """
        self.agent_data = AgentData(request_id=instance_id, tools_kwargs=kwargs)
        """What tools are shown of the trajectory; its owner keeps it up to date."""
        self._tools = tools
        self._instance_id = instance_id
        self._kwargs = kwargs
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._profile = profile
        self._gates = {name: (gates or {}).get(name) or ToolGate(name) for name in tools}
        self._book = leases or Leases()
        self._leases: list[Lease[tuple[str, str]]] = []
        self._instances: dict[str, str] = {}

    async def open(self) -> list[str]:
        """Creates an instance of each tool, if they live so long; returns what they say before the first turn."""
        if self._profile.tool_lifetime == "call":
            return []
        leases = {name: self._create(name) for name in self._tools}
        if leases:
            await asyncio.wait(
                [lease.opening for lease in leases.values()], timeout=self._timeout_s
            )
        greetings = []
        for name, lease in leases.items():
            self._instances[name], greeting = await self._created(name, lease, 0.0)
            greetings.append(greeting)
        return [text for text in greetings if text]

    async def call(self, call: ParsedCall) -> ToolCallRecord:
        """Runs one call, or says to the policy why it was not run."""
        name = safe_text(call.name)
        arguments = None if call.arguments is None else wire_safe(call.arguments)
        problem = self._problem(call, name, arguments)
        if problem is not None or arguments is None:
            return self.record(call, *(problem or ("parse_error", "")))
        passage = await self._gates[name].run(
            lambda left_s: self._execute(name, arguments, left_s), self._timeout_s
        )
        self._metrics.observe("tool_call_seconds", passage.latency_s, tool=name)
        self._metrics.observe("tool_queue_seconds", passage.queue_s, tool=name)
        self._metrics.count("tool_retries_total", max(0, passage.attempts - 1), tool=name)
        return self.record(call, *_told(name, passage), passage=passage)

    def record(
        self,
        call: ParsedCall,
        status: CallStatus,
        text: str,
        *,
        passage: Passage[Answer] | None = None,
    ) -> ToolCallRecord:
        """The record of a call, counted."""
        name = safe_text(call.name)
        known = name if name in self._tools else "unknown"
        self._metrics.count("tool_calls_total", tool=known, status=status)
        passage = passage or Passage(attempts=1)
        return ToolCallRecord(
            name=name,
            arguments=None if call.arguments is None else wire_safe(call.arguments),
            raw=safe_text(call.raw),
            status=status,
            result=safe_text(text),
            latency_s=passage.latency_s,
            queue_s=passage.queue_s,
            attempts=max(1, passage.attempts),
            reward=passage.answer.reward if passage.answer else 0.0,
            metrics=passage.answer.metrics if passage.answer else {},
        )

    async def rewards(self) -> dict[str, float]:
        """Each tool's reward for the trajectory as a whole; 0 where instances live for one call only, and, logged and
        counted, where calc_reward fails."""
        names = list(self._tools)
        values = await asyncio.gather(*map(self._reward, names))
        return dict(zip(names, values, strict=True))

    async def close(self) -> None:
        """Releases every instance. Creates that are still under way are waited for, within a bound."""
        leases, self._leases, self._instances = self._leases, [], {}
        await asyncio.gather(*(lease.end(self._timeout_s) for lease in leases))

    # --- one call ---

    def _problem(
        self, call: ParsedCall, name: str, arguments: dict[str, Any] | None
    ) -> tuple[CallStatus, str] | None:
        """Why a call cannot be executed, in words for the policy."""
        if call.error or arguments is None:
            return "parse_error", _parse_problem(call.error)
        tool = self._tools.get(name)
        if tool is None:
            known = list(self._tools)
            return "unknown_tool", f"Unknown function {name[:80]!r}. Available tools: {known}"
        problem = check_arguments(tool.tool_schema, arguments)
        if problem is not None:
            return "bad_arguments", f"Invalid arguments for {name!r}: {problem}"
        return None

    async def _execute(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Answer:
        """One attempt, within timeout_s. Raises RolloutErrors only."""
        if self._profile.tool_lifetime == "trajectory":
            kwargs = self._arguments(name, "execute_kwargs")
            with boundary(ToolError):
                instance_id = self._instances[name]
            return await self._answer(name, instance_id, arguments, kwargs, timeout_s)
        until = asyncio.get_running_loop().time() + timeout_s
        lease = self._create(name)
        try:
            instance_id, _ = await self._created(name, lease, timeout_s)
            execute = self._tools[name].execute
            kwargs = {"agent_data": self.agent_data} if takes_keyword(execute, "agent_data") else {}
            left_s = max(0.0, until - asyncio.get_running_loop().time())
            return await self._answer(name, instance_id, arguments, kwargs, left_s)
        finally:
            # Cancelled or not: it goes on by itself, and `close` waits for it if this does not.
            await lease.end(timeout_s)
            self._leases.remove(lease)

    async def _answer(
        self,
        name: str,
        instance_id: str,
        arguments: dict[str, Any],
        kwargs: dict[str, Any],
        timeout_s: float,
    ) -> Answer:
        with boundary(RaisedError):
            call = invoke(self._tools[name].execute, instance_id, arguments, **kwargs)
            answer = await bounded(call, timeout_s)
            parts = (*answer, None, None) if isinstance(answer, tuple) else (answer, None, None)
            return Answer(_text(parts[0]), _finite(parts[1], "reward"), numbers(parts[2]))

    # --- the life of an instance ---

    def _create(self, name: str) -> Lease[tuple[str, str]]:
        kwargs = self._arguments(name, "create_kwargs")
        if self._profile.create_kwargs == "nested":
            creating = invoke(self._tools[name].create, create_kwargs=kwargs)
        else:
            creating = invoke(self._tools[name].create, self._instance_id, **kwargs)
        kwargs = self._arguments(name, "release_kwargs")
        tool, metrics = self._tools[name], self._metrics
        if self._profile.tool_lifetime == "call":
            kwargs = {}

        async def release(created: tuple[str, str]) -> None:
            await invoke(tool.release, created[0], **kwargs)

        lease = self._book.open(
            _instance(creating),
            release,
            failed=lambda error: _failed(metrics, name, "release", error),
            owner=self,
        )
        self._leases.append(lease)
        return lease

    async def _created(
        self, name: str, lease: Lease[tuple[str, str]], timeout_s: float
    ) -> tuple[str, str]:
        what = f"create of tool {name!r}"
        try:
            with boundary(RaisedError, what):
                return await lease.opened(timeout_s)
        except DeadlineError:
            raise DeadlineError(f"{what} gave no answer within {self._timeout_s:g} s") from None

    async def _reward(self, name: str) -> float:
        if name not in self._instances:
            return 0.0
        kwargs = self._arguments(name, "calc_reward_kwargs")
        try:
            with boundary(ToolError):
                method = self._tools[name].calc_reward
                call = invoke(method, self._instances[name], **kwargs)
                return _finite(await bounded(call, self._timeout_s), "reward")
        except (ToolError, DeadlineError) as error:
            _failed(self._metrics, name, "calc_reward", error)
            return 0.0

    def _arguments(self, name: str, kind: str) -> dict[str, Any]:
        kwargs = (self._kwargs.get(name) or {}).get(kind) or {}
        return {key: value for key, value in kwargs.items() if value is not None}


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


async def _instance(creating: Coroutine[Any, Any, Any]) -> tuple[str, str]:
    """Instance id and greeting; verl's oldest tools return the id alone."""
    answer = await creating
    if isinstance(answer, str):
        return answer, ""
    instance_id, response = answer
    return instance_id, _text(response)


def _failed(metrics: Metrics, name: str, method: str, error: Exception) -> None:
    metrics.count("tool_failures_total", tool=name, method=method)
    _log.warning("%s of tool %r failed: %s", method, name, error)


def _told(name: str, passage: Passage[Answer]) -> tuple[CallStatus, str]:
    """Status of a call, and the text that the policy is told."""
    error = passage.error
    if error is None:
        return "ok", passage.answer.text if passage.answer else ""
    if isinstance(error, UnavailableError):
        return "unavailable", str(error)
    status = "timeout" if is_timeout(error) else "error"
    for origin in (error, error.__cause__):
        if isinstance(origin, ToolFailure):  # it has found the words itself
            return status, safe_text(str(origin))
    return status, f"Error executing tool {name!r}: {error}"


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
