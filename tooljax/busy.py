"""When each part of a training step works: trainer, engine, weight sync and tools.

Phases of the step tell of trainer and sync. Trajectories tell of engine and tools, by the lengths of what they did one
after the other: they are taken to start in their order, each as soon as a sidecar has a place for it. Those of
evaluations are not counted.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollout_sidecar.protocol import Trajectory

PARTS = ("trainer", "engine", "sync", "tools")


class Span(NamedTuple):
    """From when to when something worked, in seconds since the first trajectory began."""

    start: float
    end: float
    tokens: int = 0
    """Sampled in it."""


def busy_times(step: Mapping[str, float], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """perf/<part>_busy_s and perf/<part>_idle_s of a step, in seconds of its wall time.

    Trainer: batch and update. Sync: pushes. Engine: at least one trajectory is being sampled. Tools: at least one waits
    for a call. With rollouts of coming steps under way, engine and tools are those of the step's own trajectories,
    whenever they worked: in the mean over steps that is the same.

    Args:
        step: its time/<phase>_s, time/step_s among them; fleet/capacity, or else all started together.
        trajectories: of the step; aborted ones count for nothing.
    """
    generated, waited = timeline(trajectories, int(step.get("fleet/capacity", 0)))
    busy = {
        "trainer": step.get("time/batch_s", 0.0) + step.get("time/update_s", 0.0),
        "engine": covered(generated),
        "sync": step.get("time/push_s", 0.0),
        "tools": covered(waited),
    }
    told: dict[str, float] = {}
    for part in PARTS:
        told[f"perf/{part}_busy_s"] = busy[part]
        told[f"perf/{part}_idle_s"] = max(step["time/step_s"] - busy[part], 0.0)
    if busy["engine"] > 0:
        tokens = sum(span.tokens for span in generated)
        told["perf/engine_tokens_per_s"] = tokens / busy["engine"]
    return told


def timeline(
    trajectories: Sequence[Trajectory], capacity: int = 0
) -> tuple[list[Span], list[Span]]:
    """When trajectories were being sampled, and when they waited for tools; `capacity` at once, 0: all.

    A turn's calls are made side by side; what all turns waited for them is Trajectory.tool_s.
    """
    generated: list[Span] = []
    waited: list[Span] = []
    kept = [each for each in trajectories if each.status != "aborted"]
    free = [0.0] * min(capacity or len(kept), len(kept))
    for trajectory in kept:
        started = heapq.heappop(free)
        _play(trajectory, started, generated, waited)
        heapq.heappush(free, started + trajectory.total_s)
    return generated, waited


def _play(trajectory: Trajectory, now: float, generated: list[Span], waited: list[Span]) -> None:
    """Adds what a trajectory that started at `now` did."""
    waits = [
        max((call.queue_s + call.latency_s for call in turn.calls), default=0.0)
        for turn in trajectory.turns
    ]
    scale = trajectory.tool_s / sum(waits) if sum(waits) > 0 else 0.0
    for turn, wait in zip(trajectory.turns, waits, strict=True):
        generated.append(Span(now, now + turn.generate_s, turn.end - turn.start))
        now += turn.generate_s
        if wait * scale > 0:
            waited.append(Span(now, now + wait * scale))
        now += wait * scale + (turn.reply.latency_s if turn.reply else 0.0)


def covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of them is."""
    total, until = 0.0, 0.0
    for start, end, _ in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def rates(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Tokens per second of all spans together, each evenly over its length, and for how many seconds it was so."""
    changes = sorted(
        change
        for start, end, tokens in spans
        if end > start
        for change in ((start, tokens / (end - start), 1), (end, -tokens / (end - start), -1))
    )
    found, rate, under_way = [], 0.0, 0
    for i, (at, change, more) in enumerate(changes[:-1]):
        under_way += more
        rate = rate + change if under_way else 0.0  # exactly: sums of floats leave a rest
        seconds = changes[i + 1][0] - at
        if seconds > 0 and under_way:
            found.append((rate, seconds))
    return found
