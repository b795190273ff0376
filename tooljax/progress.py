"""What a run shows on the terminal: a live table, one line a step, or nothing. It also times the phases of a step.

with Progress("live", steps=200, title="gsm8k") as progress:
    with progress.phase("rollout"):
        ...
    progress.step(1, metrics)       # {"reward/mean": ...}; whatever is missing is left out
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

Mode = Literal["live", "plain", "off"]

SHOWN: dict[str, tuple[str, str]] = {
    "reward": ("reward/mean", ".2f"),
    "accuracy": ("rollout/accuracy", ".3f"),
    "held-out": ("eval/accuracy", ".3f"),
    "kl_ref": ("policy/kl_ref", ".3f"),
    "kl_mismatch": ("policy/kl_mismatch", ".1e"),
    "turns": ("rollout/turns/mean", ".1f"),
    "calls": ("tools/calls_per_trajectory", ".1f"),
    "valid": ("tools/valid_call_rate", ".0%"),
    "entropy": ("policy/entropy", ".2f"),
    "loss": ("policy/loss", ".3g"),
    "grad_norm": ("optim/grad_norm", ".2g"),
}
"""Label, metric and format of everything the live table can show, in order."""

PLAIN = ("reward", "accuracy", "held-out", "kl_ref", "turns", "calls", "valid")
"""What a plain line shows of it; the loss if it would show nothing, as in a cold start."""

SHORT = {"update": "train", "push": "sync"}
"""Phases whose console name is not their own."""

RECENT = 10
"""Steps that the estimate of the time left averages over."""


class Progress:
    """Shows a run of `steps` steps, and times the phases of each. A context manager."""

    def __init__(self, mode: Mode, steps: int, title: str = "", start: int = 0):
        """`start` steps are done already. Output goes to standard output."""
        self._console = Console()
        self.mode: Mode = "plain" if mode == "live" and not self._console.is_terminal else mode
        """What is in effect: live falls back to plain where there is no terminal."""
        self._steps = steps
        self._title = title
        self._step = start
        self._metrics: dict[str, float] = {}
        self._timings: dict[str, float] = {}
        self._phase = ""
        self._rollout = (0, 0)
        self._step_started = time.monotonic()
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        self._step_started = time.monotonic()
        if self.mode == "live":
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=4
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exc_info) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a part of the step as time/<name>_s; parts of the same name add up."""
        self._phase, self._rollout = name, (0, 0)
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"time/{name}_s"
            self._timings[key] = self._timings.get(key, 0.0) + time.monotonic() - started
            self._phase = ""

    def rollout(self, done: int, total: int) -> None:
        """Tells how many trajectories have ended, of how many."""
        self._rollout = (done, total)

    def timings(self) -> dict[str, float]:
        """time/<phase>_s of the step under way, and time/step_s since it began."""
        return {**self._timings, "time/step_s": time.monotonic() - self._step_started}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step is done: shows its metrics and begins the next."""
        self._metrics |= metrics  # the live table keeps the last evaluation in view
        self._step = step
        timings = self.timings()
        if self.mode == "plain":
            print(self._line(metrics, timings), flush=True)
        now = time.monotonic()
        self._durations.append(now - self._step_started)
        self._step_started = now
        self._timings = {}

    def _line(self, metrics: Mapping[str, float], timings: Mapping[str, float]) -> str:
        """Such as "step 12/200 | reward 0.41 | kl_ref 0.002 | turns 2.3 | rollout 4.1s train 1.9s sync 0.4s"."""
        shown = _shown(metrics, PLAIN) or _shown(metrics, ("loss",))
        parts = [f"step {self._step}/{self._steps}"]
        parts += [f"{label} {value}" for label, value in shown.items()]
        phases = _phases(timings)
        if phases:
            parts.append(" ".join(f"{name} {seconds:.1f}s" for name, seconds in phases.items()))
        return " | ".join(parts)

    def _render(self) -> Group:
        bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        bars.add_task(
            f"[bold]{self._title or 'step'}",
            total=self._steps,
            completed=self._step,
            note=self._time_left(),
        )
        done, total = self._rollout
        if total:
            bars.add_task("trajectories", total=total, completed=done, note="")
        table = Table.grid(padding=(0, 3))
        items = [
            f"[dim]{label}[/] {value}" for label, value in _shown(self._metrics, SHOWN).items()
        ]
        for i in range(0, len(items), 4):
            table.add_row(*items[i : i + 4])
        phases = "  ".join(f"{k} {v:.1f}s" for k, v in _phases(self._timings).items())
        now = f"{self._phase} {time.monotonic() - self._step_started:.0f}s into the step"
        return Group(bars, table, Text(f"{phases}  {now if self._phase else ''}".strip()))

    def _time_left(self) -> str:
        left = self._steps - self._step
        if not self._durations or left <= 0:
            return ""
        seconds = left * sum(self._durations) / len(self._durations)
        minutes = round(seconds / 60)
        if minutes >= 60:
            return f"{minutes // 60} h {minutes % 60:02d} min left"
        return f"{minutes} min left" if minutes else f"{seconds:.0f} s left"


def _shown(metrics: Mapping[str, float], labels: Iterable[str]) -> dict[str, str]:
    """Formatted values of those labels that have one."""
    found = {}
    for label in labels:
        name, spec = SHOWN[label]
        value = metrics.get(name)
        if value is not None:
            found[label] = format(float(value), spec)
    return found


def _phases(timings: Mapping[str, float]) -> dict[str, float]:
    """Seconds by console name; the batch's few milliseconds are not worth a column."""
    names = {key.removeprefix("time/").removesuffix("_s"): s for key, s in timings.items()}
    return {
        SHORT.get(name, name): seconds
        for name, seconds in names.items()
        if name != "step" and seconds >= 0.05
    }
