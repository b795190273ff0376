"""Counters, histograms and gauges of the sidecar, written as Prometheus text. No registry, no dependency."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

COUNTERS = {
    "rollouts_total": "Trajectories that ended, by status.",
    "turns_total": "Policy generations.",
    "prompt_tokens_total": "Tokens of rendered prompts.",
    "completion_tokens_total": "Tokens sampled by the policy.",
    "observation_tokens_total": "Tokens written by tools and interactions.",
    "tool_calls_total": "Tool calls, by tool and status. A tool that does not exist is counted as unknown.",
    "tool_retries_total": "Attempts after the first, by tool.",
    "tool_result_tokens_total": "Tokens of what tools answered, as the policy saw it, by tool.",
    "tool_truncated_total": "Tool results that were shortened, by tool.",
    "tool_trajectories_total": "Trajectories that called the tool.",
    "tool_failures_total": "Failures of create, calc_reward and release, by tool and method.",
    "interaction_failures_total": "Failures of an interaction's methods, by interaction and method.",
    "reward_errors_total": "Reward functions that raised or returned no number.",
    "resumes_refused_total": "Trajectories begun elsewhere that had to start from their prompt again.",
    "weight_commits_total": "Commits of new weights, by result.",
    "http_requests_total": "HTTP requests, by method, route and status.",
}
"""Every counter and what it counts. Names are prefixed with tooljax_sidecar_ on the way out."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

HISTOGRAMS = {
    "tool_call_seconds": ("Time in executed tool calls, waiting not included, by tool.", _SECONDS),
    "tool_queue_seconds": ("Time that tool calls waited for their turn, by tool.", _SECONDS),
    "interaction_seconds": ("Time that interactions took to reply, by interaction.", _SECONDS),
}
"""Every histogram: what it observes, and the upper bounds of its buckets."""

PREFIX = "tooljax_sidecar_"

Labels = tuple[tuple[str, str], ...]


class Family(NamedTuple):
    """A gauge with several series, made anew each time the text is rendered."""

    name: str
    meaning: str
    samples: list[tuple[Labels, float]]


class Metrics:
    """Counts by name and labels; gauges are read when the text is rendered."""

    def __init__(self):
        self._counts: dict[str, dict[Labels, float]] = {name: {} for name in COUNTERS}
        self._observed: dict[str, dict[Labels, _Histogram]] = {name: {} for name in HISTOGRAMS}
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._collectors: list[Callable[[], Iterable[Family]]] = []

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter of COUNTERS."""
        series = self._counts[name]
        key = tuple(sorted(labels.items()))
        series[key] = series.get(key, 0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds an observation to a histogram of HISTOGRAMS."""
        series = self._observed[name]
        key = tuple(sorted(labels.items()))
        if key not in series:
            series[key] = _Histogram(HISTOGRAMS[name][1])
        series[key].add(value)

    def value(self, name: str, **labels: str) -> float:
        """What a counter stands at, 0 before its first count."""
        return self._counts[name].get(tuple(sorted(labels.items())), 0)

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """Declares a value that is read each time the text is rendered."""
        self._gauges[name] = (meaning, read)

    def collect(self, read: Callable[[], Iterable[Family]]) -> None:
        """Declares gauges with labels, read each time the text is rendered."""
        self._collectors.append(read)

    def render(self) -> str:
        """The Prometheus exposition format, version 0.0.4."""
        lines = []
        for name, meaning in COUNTERS.items():
            lines += _head(name, meaning, "counter")
            lines += [
                _sample(name, key, value) for key, value in sorted(self._counts[name].items())
            ]
        for name, (meaning, _) in HISTOGRAMS.items():
            lines += _head(name, meaning, "histogram")
            for key, histogram in sorted(self._observed[name].items()):
                lines += histogram.lines(name, key)
        for name, (meaning, read) in self._gauges.items():
            lines += _head(name, meaning, "gauge")
            lines.append(_sample(name, (), read()))
        for family in (family for read in self._collectors for family in read()):
            lines += _head(family.name, family.meaning, "gauge")
            lines += [_sample(family.name, key, value) for key, value in family.samples]
        return "\n".join(lines) + "\n"


class _Histogram:
    """Counts of observations by bucket, and their sum."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: Labels) -> list[str]:
        """The series as Prometheus wants them: cumulative counts up to each bound, then sum and count."""
        lines, total = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(_sample(f"{name}_bucket", (*labels, ("le", str(bound))), total))
        lines.append(_sample(f"{name}_sum", labels, self._sum))
        lines.append(_sample(f"{name}_count", labels, total))
        return lines


def _head(name: str, meaning: str, kind: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} {kind}"]


def _sample(name: str, labels: Labels, value: float) -> str:
    text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels)
    return f"{PREFIX}{name}{{{text}}} {value:.15g}" if text else f"{PREFIX}{name} {value:.15g}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
