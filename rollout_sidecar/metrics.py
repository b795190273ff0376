"""Counters and gauges of the sidecar, written as Prometheus text. No histograms, no registry, no dependency."""

from collections.abc import Callable

COUNTERS = {
    "rollouts_total": "Trajectories that ended, by status.",
    "turns_total": "Policy generations.",
    "prompt_tokens_total": "Tokens of rendered prompts.",
    "completion_tokens_total": "Tokens sampled by the policy.",
    "observation_tokens_total": "Tokens written by tools.",
    "tool_calls_total": "Tool calls, by tool and status. A tool that does not exist is counted as unknown.",
    "tool_seconds_total": "Seconds spent in tool calls, by tool.",
    "tool_failures_total": "Failures of create, calc_reward and release, by tool and method.",
    "reward_errors_total": "Reward functions that raised or returned no number.",
    "weight_commits_total": "Commits of new weights, by result.",
    "http_requests_total": "HTTP requests, by method, route and status.",
}
"""Every counter and what it counts. Names are prefixed with tooljax_sidecar_ on the way out."""

PREFIX = "tooljax_sidecar_"

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counts by name and labels; gauges are read when the text is rendered."""

    def __init__(self):
        self._counts: dict[str, dict[Labels, float]] = {name: {} for name in COUNTERS}
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter of COUNTERS."""
        series = self._counts[name]
        key = tuple(sorted(labels.items()))
        series[key] = series.get(key, 0) + amount

    def value(self, name: str, **labels: str) -> float:
        """What a counter stands at, 0 before its first count."""
        return self._counts[name].get(tuple(sorted(labels.items())), 0)

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """Declares a value that is read each time the text is rendered."""
        self._gauges[name] = (meaning, read)

    def render(self) -> str:
        """The Prometheus exposition format, version 0.0.4."""
        lines = []
        for name, meaning in COUNTERS.items():
            lines += _head(name, meaning, "counter")
            lines += [
                _sample(name, key, value) for key, value in sorted(self._counts[name].items())
            ]
        for name, (meaning, read) in self._gauges.items():
            lines += _head(name, meaning, "gauge")
            lines.append(_sample(name, (), read()))
        return "\n".join(lines) + "\n"


def _head(name: str, meaning: str, kind: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} {kind}"]


def _sample(name: str, labels: Labels, value: float) -> str:
    text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels)
    return f"{PREFIX}{name}{{{text}}} {value:.15g}" if text else f"{PREFIX}{name} {value:.15g}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
