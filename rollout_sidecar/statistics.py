"""Statistics of tools, interactions and endings of a set of trajectories, for the trainer's trackers and for /metrics.

Both use these functions, so a name means the same in both. The trainer applies them to the trajectories of a step, the
sidecar to its last ones (`RecentTrajectories`), as gauges beside its counters and histograms. The names:

    trainer                         /metrics
    tools/use_rate                  tooljax_sidecar_tools_use_rate
    tools/<name>/latency_p50_s      tooljax_sidecar_tool_latency_p50_s{tool="<name>"}
    rollout/status/<status>_frac    tooljax_sidecar_rollout_status_frac{status="<status>"}
    rollout/accuracy_with_tools     tooljax_sidecar_rollout_accuracy_with_tools

A statistic that has no value (the latency of a tool that never ran) is left out, never written as 0 or NaN.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from rollout_sidecar.metrics import Family, Labels, Metrics
from rollout_sidecar.protocol import InteractionReply, Status, ToolCallRecord, Trajectory

UNKNOWN = "unknown"
"""Stands for every tool name that no tool answers to: the policy may invent any number of them."""

EXECUTED = ("ok", "timeout", "error")
_ANSWERED = (*EXECUTED, "bad_arguments", "unavailable")

PROGRAMS = {"failed": "program_failure_rate", "timed_out": "program_timeout_rate"}
"""What sandboxes report of the programs that they ran. A program that fails is an answer: its call is ok."""

KEPT = 1000
"""Trajectories that the sidecar's gauges look back on."""


class Statistic(NamedTuple):
    """One number under the trainer's name for it, such as "tools/{name}/error_rate" with the tool as label."""

    name: str
    value: float
    label: str = ""


class Facts(NamedTuple):
    """What statistics need of a trajectory."""

    status: Status
    calls: list[ToolCallRecord]
    replies: list[InteractionReply]
    accuracy: float | None
    rewards: dict[str, float]
    """By tool: those of its calls, and what calc_reward gave for the trajectory."""


def facts(trajectory: Trajectory) -> Facts:
    """Of one trajectory."""
    return Facts(
        status=trajectory.status,
        calls=[call for turn in trajectory.turns for call in turn.calls],
        replies=[turn.reply for turn in trajectory.turns if turn.reply is not None],
        accuracy=trajectory.metrics.get("acc"),
        rewards=_rewards(trajectory),
    )


def _rewards(trajectory: Trajectory) -> dict[str, float]:
    if trajectory.scored and trajectory.reward_terms:  # then scoring has added them up
        prefix = "tool_reward/"
        found = trajectory.metrics.items()
        return {k.removeprefix(prefix): v for k, v in found if k.startswith(prefix)}
    rewards: dict[str, float] = defaultdict(float)
    for turn in trajectory.turns:
        for call in turn.calls:
            if call.status in EXECUTED:
                rewards[call.name] += call.reward
    return dict(rewards)


def statistics(played: Sequence[Facts], tool_names: Collection[str] = ()) -> Iterator[Statistic]:
    """All statistics of trajectories; none of none.

    Args:
        tool_names: tools to report even if none of their calls was executed. Others are reported once a tool has
            answered to the name; calls of names that no tool has are counted under `unknown`.
    """
    if not played:
        return
    for status in get_args(Status):
        if status != "aborted":
            share = _mean([one.status == status for one in played])
            yield Statistic("rollout/status/{status}_frac", share, status)
    judged = [(bool(one.calls), one.accuracy) for one in played if one.accuracy is not None]
    for name, values in (
        ("rollout/accuracy", [value for _, value in judged]),
        ("rollout/accuracy_with_tools", [value for used, value in judged if used]),
        ("rollout/accuracy_without_tools", [value for used, value in judged if not used]),
    ):
        if values:
            yield Statistic(name, _mean(values))
    yield from _of_calls(played, tool_names)
    yield from _of_replies(played)


def _of_calls(played: Sequence[Facts], tool_names: Collection[str]) -> Iterator[Statistic]:
    calls = [call for one in played for call in one.calls]
    yield Statistic("tools/use_rate", _mean([bool(one.calls) for one in played]))
    yield Statistic("tools/calls_per_trajectory", len(calls) / len(played))
    if not calls:
        return
    for name, status in (
        ("valid_call_rate", "ok"),
        ("parse_error_rate", "parse_error"),
        ("unknown_rate", "unknown_tool"),
        ("not_executed_rate", "not_executed"),
    ):
        yield Statistic(f"tools/{name}", _mean([call.status == status for call in calls]))
    known = {call.name for call in calls if call.status in _ANSWERED} | set(tool_names)
    by_name: dict[str, list[ToolCallRecord]] = defaultdict(list)
    for call in calls:
        if call.status != "parse_error":  # its name, if it has one, is a guess
            by_name[call.name if call.name in known else UNKNOWN].append(call)
    for name in sorted(by_name):
        for key, value in _one_tool(by_name[name], name == UNKNOWN).items():
            yield Statistic(f"tools/{{name}}/{key}", value, name)
        per_trajectory = len(by_name[name]) / len(played)
        yield Statistic("tools/{name}/calls_per_trajectory", per_trajectory, name)
        if name != UNKNOWN:
            yield from _rewards_of(name, played)


def _rewards_of(name: str, played: Sequence[Facts]) -> Iterator[Statistic]:
    users = [
        one
        for one in played
        if any(call.name == name and call.status in EXECUTED for call in one.calls)
    ]
    if users:
        mean = _mean([one.rewards.get(name, 0.0) for one in users])
        yield Statistic("tools/{name}/reward_mean", mean, name)
        total = float(np.sum([one.rewards.get(name, 0.0) for one in played]))
        yield Statistic("tools/{name}/reward_sum", total, name)


def _one_tool(calls: Sequence[ToolCallRecord], unknown: bool) -> dict[str, float]:
    values = {"calls": float(len(calls))}
    executed = [call for call in calls if call.status in EXECUTED]
    if unknown and not executed:
        return values
    for status in ("bad_arguments", "error", "timeout", "unavailable"):
        values[f"{status}_rate"] = _mean([call.status == status for call in calls])
    values["truncated_rate"] = _mean([call.truncated for call in calls])
    values["result_tokens_mean"] = _mean([call.result_tokens for call in calls])
    if executed:
        p50, p95 = np.percentile([call.latency_s for call in executed], [50, 95])
        values |= {"latency_p50_s": float(p50), "latency_p95_s": float(p95)}
        values["attempts_mean"] = _mean([call.attempts for call in executed])
    for key, name in PROGRAMS.items():
        reported = [call.metrics[key] for call in executed if key in call.metrics]
        if reported:
            values[name] = _mean(reported)
    queued = [call.queue_s for call in calls if call.status in (*EXECUTED, "unavailable")]
    if queued:
        p50, p95 = np.percentile(queued, [50, 95])
        values |= {"queue_p50_s": float(p50), "queue_p95_s": float(p95)}
    return values


def _of_replies(played: Sequence[Facts]) -> Iterator[Statistic]:
    replies = [reply for one in played for reply in one.replies]
    if not replies:
        return
    answered = [one for one in played if one.replies]
    yield Statistic("interaction/replies_per_trajectory", len(replies) / len(answered))
    yield Statistic("interaction/turn_score_mean", _mean([reply.score for reply in replies]))
    yield Statistic("interaction/done_frac", _mean([one.replies[-1].done for one in answered]))
    p50, p95 = np.percentile([reply.latency_s for reply in replies], [50, 95])
    yield Statistic("interaction/latency_p50_s", float(p50))
    yield Statistic("interaction/latency_p95_s", float(p95))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values, np.float64)))


# --- in the sidecar ---------------------------------------------------------------------------------------------------


class RecentTrajectories:
    """The last trajectories of a sidecar, without their texts and tokens."""

    def __init__(self, kept: int = KEPT):
        """None yet."""
        self._played: deque[Facts] = deque(maxlen=kept)

    def add(self, trajectory: Trajectory) -> None:
        """One more; aborted ones are in no statistic."""
        if trajectory.status != "aborted":
            replace = msgspec.structs.replace
            whole = facts(trajectory)
            self._played.append(
                whole._replace(
                    calls=[
                        replace(
                            call,
                            arguments=None,
                            raw="",
                            result="",
                            metrics={k: v for k, v in call.metrics.items() if k in PROGRAMS},
                        )
                        for call in whole.calls
                    ],
                    replies=[replace(reply, text="") for reply in whole.replies],
                )
            )

    def families(self, tool_names: Iterable[str]) -> list[Family]:
        """The gauges."""
        samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for name, value, label in statistics(list(self._played), set(tool_names)):
            samples[name].append((((_label_name(name), label),) if label else (), value))
        return [
            Family(
                prometheus_name(name),
                f"{name} of the last {self._played.maxlen} trajectories.",
                series,
            )
            for name, series in samples.items()
        ]


def prometheus_name(name: str) -> str:
    """How a statistic is called in /metrics, without the prefix."""
    return name.replace("tools/{name}/", "tool_").replace("{status}_", "").replace("/", "_")


def _label_name(name: str) -> str:
    return "tool" if "{name}" in name else "status"


def count(trajectory: Trajectory, metrics: Metrics) -> None:
    """Adds a trajectory to the counters of the sidecar. Calls were counted when they were made."""
    metrics.count("rollouts_total", status=trajectory.status)
    metrics.count("turns_total", len(trajectory.turns))
    sampled = sum(trajectory.loss_mask)
    metrics.count("prompt_tokens_total", trajectory.prompt_tokens)
    metrics.count("completion_tokens_total", sampled)
    observed = len(trajectory.token_ids) - trajectory.prompt_tokens - sampled
    for stream in trajectory.earlier_streams:
        sampled = sum(stream.loss_mask)
        metrics.count("completion_tokens_total", sampled)
        observed += len(stream.token_ids) - stream.prompt_tokens - sampled
    metrics.count("observation_tokens_total", observed)
    called = set()
    for call in facts(trajectory).calls:
        if call.status in _ANSWERED:
            called.add(call.name)
            metrics.count("tool_result_tokens_total", call.result_tokens, tool=call.name)
            metrics.count("tool_truncated_total", call.truncated, tool=call.name)
    for name in called:
        metrics.count("tool_trajectories_total", tool=name)
