"""Why a trajectory got what it got, in one line; and which of a step's trajectories is the worst."""

from collections.abc import Iterator
from typing import Any

import msgspec

from rollout_sidecar.protocol import CallStatus, Message, Status, Task

MEANINGS: dict[Status, str] = {
    "completed": "the policy had no more to say",
    "max_turns": "it still called a tool in the last turn allowed",
    "max_tokens": "it met a token limit",
    "invalid_calls": "too many turns in a row held only calls that could not be executed",
    "timeout": "its time was up",
    "tool_error": "the tools could not be set up for this task",
    "interaction_error": "the interaction failed",
    "engine_error": "generation failed",
    "context_rewritten": "the chat template rewrote earlier turns",
    "prompt_too_long": "the prompt is too long",
    "aborted": "the trainer asked for that",
}
"""What each status says, as the end of a sentence."""

SETTINGS: dict[Status, str] = {
    "max_turns": "limits.max_turns",
    "max_tokens": "limits.max_tokens_per_turn, limits.max_trajectory_tokens",
    "invalid_calls": "limits.max_invalid_turns",
    "timeout": "limits.trajectory_timeout_s",
    "prompt_too_long": "limits.max_prompt_tokens",
}
"""The settings that decide on it."""

FAULTS = frozenset({"tool_error", "interaction_error", "engine_error"})
"""Ends that are not the policy's fault."""

LONGEST = 120
"""Characters of a quotation."""


class CallFacts(msgspec.Struct, frozen=True):
    """What a list says of a tool call: some fields of ToolCallRecord."""

    name: str
    status: CallStatus
    result: str


class TurnFacts(msgspec.Struct, frozen=True):
    """Some fields of Turn."""

    start: int
    end: int
    calls: list[CallFacts] = []


class Facts(msgspec.Struct, frozen=True):
    """What a list says of a trajectory: the fields of Trajectory that it takes, read without the others."""

    task_id: str
    sample_index: int
    status: Status
    error: str = ""
    turns: list[TurnFacts] = []
    scored: bool = True
    reward: float = 0.0
    reward_terms: dict[str, float] = {}
    metrics: dict[str, float] = {}
    messages: list[Message] = []
    total_s: float = 0.0

    @property
    def correct(self) -> bool:
        """As evaluations count it: acc >= 0.5, or the reward where the reward function reports no acc."""
        return self.scored and self.metrics.get("acc", self.reward) >= 0.5


def why(facts: Facts, task: Task | None) -> str:
    """One line: how it ended, what it answered and what was expected, its last failed call, and its reward's parts."""
    return " ".join(_sentences(facts, task))


def badness(facts: Facts) -> tuple[int, float, bool, int]:
    """Sorts the worst first: faults and missing rewards, then low rewards (of equal ones: what did not complete, then
    more failed calls); what was aborted comes last."""
    failed = sum(call.status != "ok" for turn in facts.turns for call in turn.calls)
    if facts.status == "aborted":
        kind = 2
    else:
        kind = 0 if facts.status in FAULTS or not facts.scored else 1
    return kind, facts.reward, facts.status == "completed", -failed


def _sentences(facts: Facts, task: Task | None) -> Iterator[str]:
    if facts.status != "completed":
        told = f": {quoted(facts.error)}" if facts.error else ""
        yield f"Ended by {facts.status}: {MEANINGS[facts.status]}{told}."
    answer = _last_line(facts.messages)
    if facts.status == "completed" and answer:
        expected = _expected(task)
        verdict = "" if not facts.scored else "Correct: " if facts.correct else "Wrong: "
        wanted = f", expected {quoted(expected)}" if expected and not facts.correct else ""
        yield f"{verdict}it answered {quoted(answer)}{wanted}."
    calls = [(i, call) for i, turn in enumerate(facts.turns, 1) for call in turn.calls]
    failed = [(i, call) for i, call in calls if call.status != "ok"]
    if failed:
        turn, call = failed[-1]
        name = call.name or "a call that could not be read"
        yield f"Last tool error: {name} in turn {turn}, {call.status}: {quoted(call.result)}."
    elif facts.turns and not calls and not facts.correct:
        yield "It called no tool."
    elif calls and facts.status == "completed" and facts.scored and not facts.correct:
        yield f"The last tool result was {quoted(calls[-1][1].result)}."
    if not facts.scored:
        yield "It has no reward: the reward function failed or could not run."
    elif facts.status != "aborted":
        terms = " + ".join(f"{name} {value:.4g}" for name, value in facts.reward_terms.items())
        yield f"Reward {facts.reward:.4g}{terms and ' = ' + terms}."


def quoted(text: str) -> str:
    """The first lines of a text as a short quotation on one line."""
    line = " ".join(text.split())
    return f"“{line[: LONGEST - 1]}…”" if len(line) > LONGEST else f"“{line}”"


def _last_line(messages: list[Message]) -> str:
    """The last line that the policy wrote; "" if it wrote nothing."""
    said = [m for m in messages if m.get("role") == "assistant"]
    lines = content_text(said[-1].get("content")).strip().splitlines() if said else []
    return lines[-1] if lines else ""


def content_text(content: Any) -> str:
    """A message's content as text: itself, or as JSON if it is made of parts."""
    if content is None:
        return ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def _expected(task: Task | None) -> str:
    return "" if task is None or task.ground_truth is None else content_text(task.ground_truth)
