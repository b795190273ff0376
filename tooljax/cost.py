"""What a run's steps spend their time on, and what they would take with other settings: `python -m tooljax.cost RUN`.

The model, made from the steps of one run that compiled nothing:

- A step's rollouts need tokens / (peak rate x sidecars) seconds of the engines. The peak is what one engine sampled in
  all, in its best tenth of the time; where it had less to do than it could, the model takes it for slower than it is.
- They are not done before the longest trajectory: its tokens, each as fast as in the fastest tenth of turns, and its
  tools. A rollout takes the longer of the two, and longer still by the factor that was measured.
- Batch and update take time in proportion to group_size, as do tokens. All else takes what it took.
- Rollouts start max_policy_lag steps before their turn, and engines serve batches in turn. A step takes the sum of
  rollout, update and the rest without lag, about the longer of both where they overlap.

So a bigger group's longest trajectory is no longer than before, and sidecars that share a machine with others are not
slowed down by them: both are more favourable than life.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout_sidecar.protocol import Trajectory
from tooljax.busy import PARTS, Span, busy_times, rates, timeline
from tooljax.config import ConfigError, load_config
from tooljax.store import StoreError, read_step, stored_steps
from tooljax.trackers import read_metrics

Row = Mapping[str, float]

PEAK = 0.9
"""Quantile, over time, of what an engine samples a second."""
FASTEST = 0.1
"""Quantile, over turns, of a token's seconds."""


@dataclass(frozen=True)
class Setting:
    """What can be chosen."""

    sidecars: int
    lag: int
    group_size: int


@dataclass(frozen=True)
class Step:
    """What the model takes from a measured step; all in seconds but the first two."""

    trajectories: float
    tokens: float
    rollout_s: float
    """From the start of its rollouts until the last has ended."""
    longest_s: float
    """Of its trajectories, had each been alone."""
    update_s: float
    """Batch and update."""
    rest_s: float
    """Push, gate, store, evaluation and whatever else is neither."""
    step_s: float


@dataclass(frozen=True)
class Measured:
    """A run."""

    setting: Setting
    steps: list[Step]
    peak_tokens_per_s: float
    """Of one engine."""


@dataclass(frozen=True)
class Prediction:
    """What a setting would come to."""

    setting: Setting
    step_s: float
    rollout_s: float
    trajectories: float
    """Of a step."""
    bound: str
    """What would have to be faster, for a step to be: "update", "engine" or "longest trajectory"."""

    def cost(self, gpu_hour_price: float, trainer_hour_price: float) -> float:
        """Of a trajectory, in the prices' currency: all sidecars and the trainer are paid for all the time."""
        an_hour = self.setting.sidecars * gpu_hour_price + trainer_hour_price
        return an_hour * self.step_s / 3600 / self.trajectories


def predict(measured: Measured, setting: Setting) -> Prediction:
    """Plays the run's steps one after the other, with another setting: twice, the first time to get going."""
    now = measured.setting
    grown, spread = setting.group_size / now.group_size, setting.sidecars
    begun: list[float] = []
    clock, engines_free, going = 0.0, 0.0, 0.0
    count = len(measured.steps)
    rollouts, engines, updates, longest = [], [], [], []
    for i, step in enumerate(measured.steps * 2):
        going = clock if i == count else going
        begun.append(clock)
        engine = step.tokens / measured.peak_tokens_per_s
        engine_then, engine_now = engine * grown / spread, engine / now.sidecars
        # How much longer rollouts took than the model says: waits between turns, engines that were not full.
        factor = step.rollout_s / max(engine_now, step.longest_s)
        engine_then *= min(factor, 1.0)  # engines cannot have worked longer than the rollout took
        rollout = max(max(factor, 1.0) * engine_then, factor * step.longest_s)
        started = begun[max(i - setting.lag, 0)]
        engines_free = max(engines_free, started) + engine_then
        other = step.update_s * grown + step.rest_s
        clock = max(clock, started + rollout, engines_free) + other
        rollouts.append(rollout)
        engines.append(engine_then)
        updates.append(other)
        longest.append(factor * step.longest_s)
    return Prediction(
        setting,
        step_s=(clock - going) / count,
        rollout_s=float(np.mean(rollouts)),
        trajectories=float(np.mean([step.trajectories for step in measured.steps])) * grown,
        bound=_bound(setting.lag, sum(engines), sum(longest), sum(updates)),
    )


def _bound(lag: int, engine: float, longest: float, other: float) -> str:
    """The greatest of what a step's time is made of, or of what overlaps."""
    waits = {"longest trajectory": longest / max(lag, 1), "engine": engine, "update": other}
    return max(waits, key=lambda name: waits[name])


def measure(run_dir: str | Path, *, last: int = 50) -> tuple[Measured, list[Row]]:
    """Reads what a run has logged and stored of its `last` steps; beside it, the rows of those steps.

    Steps that compiled are left out, and a run's first; if none is left, none is. ValueError if nothing can be read.
    """
    run_dir = Path(run_dir)
    config = load_config([str(run_dir / "config.gin")])
    stored = set(stored_steps(run_dir))
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/rollout_s" in row]
    usable = [row for row in rows if row["step"] in stored]
    if not usable:
        raise ValueError(
            f"{run_dir} has no step that was both logged and stored; it takes metrics.jsonl and trajectories/ "
            "(store.enabled)"
        )
    warm = [row for row in usable if row["step"] > 1 and not row.get("perf/compilations")]
    rows = (warm or usable)[-last:]
    groups = [_kept(run_dir, row["step"]) for row in rows]
    setting = Setting(
        sidecars=_sidecars(rows, len(config.sidecar.urls)),
        lag=config.async_.max_policy_lag,
        group_size=config.grpo.group_size,
    )
    spans = [
        timeline(each, int(row.get("fleet/capacity", 0)))[0]
        for row, each in zip(rows, groups, strict=True)
    ]
    turns = [span for each in spans for span in each if span.tokens]
    if not turns:
        raise ValueError(f"{run_dir} has no sampled token in the steps that are stored")
    seconds_a_token = float(np.quantile([(s.end - s.start) / s.tokens for s in turns], FASTEST))
    steps = [
        _step(row, each, setting.lag, seconds_a_token)
        for row, each in zip(rows, groups, strict=True)
    ]
    told: list[Row] = [
        {**row, **busy_times(row, each)} for row, each in zip(rows, groups, strict=True)
    ]
    return Measured(setting, steps, _peak(spans) / setting.sidecars), told


def _kept(run_dir: Path, step: int) -> list[Trajectory]:
    return [
        record.trajectory
        for record in read_step(run_dir, step).records
        if record.trajectory.status != "aborted"
    ]


def _sidecars(rows: Sequence[Row], configured: int) -> int:
    """How many there were: the commonest number of those that could be used."""
    live = [int(row["fleet/live"]) for row in rows if row.get("fleet/live")]
    return max(set(live), key=live.count) if live else max(configured, 1)


def _peak(spans: Sequence[Sequence[Span]]) -> float:
    """PEAK of the tokens that were sampled in a second, over the time in which any were."""
    found = sorted(rate for each in spans for rate in rates(each))
    seconds = np.cumsum([length for _, length in found])
    return found[int(np.searchsorted(seconds, PEAK * seconds[-1]))][0]


def _step(row: Row, trajectories: Sequence[Trajectory], lag: int, seconds_a_token: float) -> Step:
    tokens = [sum(turn.end - turn.start for turn in t.turns) for t in trajectories]
    alone = [
        sampled * seconds_a_token
        + t.tool_s
        + sum(turn.reply.latency_s for turn in t.turns if turn.reply)
        for sampled, t in zip(tokens, trajectories, strict=True)
    ]
    waited = row["time/rollout_s"]
    update = row.get("time/batch_s", 0.0) + row.get("time/update_s", 0.0)
    return Step(
        trajectories=len(trajectories),
        tokens=sum(tokens),
        # With lag, the trainer waits for a part of it only.
        rollout_s=max((t.total_s for t in trajectories), default=0.0) if lag else waited,
        longest_s=max(alone, default=0.0),
        update_s=update,
        rest_s=max(row["time/step_s"] - waited - update, 0.0),
        step_s=row["time/step_s"],
    )


def measured_table(rows: Sequence[Row]) -> Table:
    """Means over steps of what each part did."""
    mean = {
        name: float(np.mean([row[name] for row in rows]))
        for name in [f"perf/{p}_{what}_s" for p in PARTS for what in ("busy", "idle")]
    }
    step = float(np.mean([row["time/step_s"] for row in rows]))
    table = Table(title=f"measured: {len(rows)} steps of {step:.2f} s", title_justify="left")
    for name in ("part", "busy s", "idle s", "busy"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part in PARTS:
        busy, idle = mean[f"perf/{part}_busy_s"], mean[f"perf/{part}_idle_s"]
        table.add_row(part, f"{busy:.2f}", f"{idle:.2f}", f"{busy / max(step, 1e-9):.0%}")
    return table


def predicted_table(
    predictions: Sequence[Prediction], measured_s: float, prices: tuple[float, float] | None
) -> Table:
    """One row a setting. `prices` are those of an hour of a sidecar and of the trainer."""
    table = Table(title="predicted", title_justify="left")
    names = ["sidecars", "lag", "group_size", "step s", "of measured", "rollout s"]
    names += [] if prices is None else ["cost of 1000 trajectories"]
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for each in predictions:
        cells: list[Any] = [each.setting.sidecars, each.setting.lag, each.setting.group_size]
        cells += [f"{each.step_s:.2f}", f"{each.step_s / measured_s:.0%}", f"{each.rollout_s:.2f}"]
        cells += [] if prices is None else [f"{1000 * each.cost(*prices):.4g}"]
        table.add_row(*map(str, cells), each.bound)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0, or 1 if there is nothing to measure."""
    args = parser().parse_args(argv)
    try:
        measured, rows = measure(args.run, last=args.steps)
    except (ValueError, StoreError, ConfigError, OSError) as error:
        print(f"tooljax.cost: {error}", file=sys.stderr)
        return 1
    now = measured.setting
    asked = [
        Setting(sidecars, lag, group_size)
        for sidecars in args.sidecars or [now.sidecars]
        for lag in args.lag or [now.lag]
        for group_size in args.group_size or [now.group_size]
    ]
    settings = [now, *(each for each in asked if each != now)]
    prices = None
    if args.gpu_hour_price or args.trainer_hour_price:
        prices = args.gpu_hour_price, args.trainer_hour_price
    console = Console()
    console.print(measured_table(rows))
    measured_s = float(np.mean([step.step_s for step in measured.steps]))
    predictions = [predict(measured, setting) for setting in settings]
    console.print(predicted_table(predictions, measured_s, prices))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's."""
    made = argparse.ArgumentParser(
        prog="tooljax.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, help="folder of a run")
    for name, least, what in (
        ("sidecars", 1, "numbers of sidecars"),
        ("lag", 0, "values of async.max_policy_lag"),
        ("group_size", 1, "values of grpo.group_size"),
    ):
        made.add_argument(
            f"--{name}", type=_at_least(least), nargs="+", help=f"{what} to predict for"
        )
    made.add_argument("--gpu_hour_price", type=float, default=0.0, help="of a sidecar")
    made.add_argument("--trainer_hour_price", type=float, default=0.0, help="of the trainer")
    made.add_argument(
        "--steps", type=_at_least(1), default=50, help="take the last so many; default 50"
    )
    return made


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
