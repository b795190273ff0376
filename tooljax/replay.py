"""Recomputes stored steps: `python -m tooljax.replay RUN --step 12`. Exit code 1 if anything differs by more than 1e-6.

From the trajectories as they are stored: the reward from texts and ground truth, the loss mask from the turns, the
advantages from the rewards of each group, less the KL where that is in the reward, and the loss with its metrics from
the log-probs that the update saw and the KL's weight in that step. Of several updates on a batch, the last. Rewards are
recomputed where the function is here and answers the same twice; else the table says why not.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from rollout_sidecar.protocol import Trajectory
from tooljax.batch import TrainBatch, laid_out, unpack
from tooljax.config import Config, ConfigError, load_config
from tooljax.objective import make_objective
from tooljax.replay_rewards import NotRepeatable, RewardReplay
from tooljax.sampled import Sampled
from tooljax.store import Record, StoredStep, StoreError, read_step, stored_steps
from tooljax.store.records import PREPARED
from tooljax.store.store import FOLDER
from tooljax.training_batch import make_batch, with_kl_in_reward

TOLERANCE = 1e-6
"""Of numbers up to 1; larger ones may differ by that share of themselves."""

QUANTITIES = ("reward", "loss mask", "advantage", "loss")


@dataclass(frozen=True)
class Mismatch:
    """Something that came out otherwise than it is stored."""

    step: int
    quantity: str
    where: str
    """Which trajectory, or which metric of the step."""
    stored: str
    again: str

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.quantity} of {self.where} is {self.again}, stored is "
            f"{self.stored}"
        )


@dataclass
class Report:
    """What a replay of one step found."""

    step: int
    compared: Counter[str] = field(default_factory=Counter)
    """How many values of each quantity were recomputed."""
    skipped: dict[str, Counter[str]] = field(default_factory=dict)
    """Why values of a quantity were not, and how often."""
    largest: dict[str, float] = field(default_factory=dict)
    """Largest difference of each quantity."""
    mismatches: list[Mismatch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the store has lost of this step."""

    def compare(self, quantity: str, where: str, stored: float, again: float) -> None:
        """Counts a value, and keeps it if it differs."""
        self.compared[quantity] += 1
        size = max(1.0, abs(stored))
        same = stored == again or (np.isnan(stored) and np.isnan(again))
        difference = 0.0 if same else abs(stored - again) / size
        self.largest[quantity] = max(self.largest.get(quantity, 0.0), difference)
        if not difference <= TOLERANCE:
            self.mismatches.append(
                Mismatch(self.step, quantity, where, f"{stored:.9g}", f"{again:.9g}")
            )

    def skip(self, quantity: str, why: str) -> None:
        """Counts a value that cannot be recomputed."""
        self.skipped.setdefault(quantity, Counter())[why] += 1


def replay_step(run_dir: str | Path, step: int) -> Report:
    """Recomputes one step. StoreError if it cannot be read, ConfigError if its settings cannot."""
    stored = read_step(run_dir, step)
    report = Report(step, notes=list(stored.notes))
    config = load_config([], _bindings(stored.header.config))
    # How tokens were packed does not matter to their loss: rows of one length will do.
    config = replace(config, batch=replace(config.batch, mixed_lengths=False))
    trajectories = [record.whole() for record in stored.records]
    rewards = RewardReplay(config, Path(run_dir) / FOLDER / "tokenizer")
    for record, trajectory in zip(stored.records, trajectories, strict=True):
        _replay_reward(report, rewards, stored, trajectory)
        _replay_mask(report, trajectory)
        _replay_token_advantages(report, record, trajectory)
    if len(stored.records) < stored.header.trajectories:
        for quantity in ("advantage", "loss"):
            report.skip(quantity, "trajectories of the step are lost")
        return report
    groups = [[trajectories[i] for i in group] for group in stored.groups]
    batch, _, credit = make_batch(config, groups)
    assert isinstance(batch, TrainBatch), "mixed_lengths is off"
    for i, group in enumerate(stored.groups):
        for j, place in enumerate(group):
            record = stored.records[place]
            name = _name(record.trajectory)
            again = float(credit.advantages[i, j])
            report.compare("advantage", name, record.advantage, again)
            if record.dropped != credit.dropped[i][j]:
                mismatch = Mismatch(
                    step, "reason left out", name, repr(record.dropped), repr(credit.dropped[i][j])
                )
                report.mismatches.append(mismatch)
    if not any(mismatch.quantity == "reason left out" for mismatch in report.mismatches):
        _replay_loss(report, config, stored, groups, batch)
    else:
        report.skip("loss", "the batch is another one, see the mismatches")
    return report


def _replay_reward(
    report: Report, rewards: RewardReplay, stored: StoredStep, trajectory: Trajectory
) -> None:
    name = _name(trajectory)
    if trajectory.scored:
        total = sum(trajectory.reward_terms.values())
        report.compare("reward", f"{name} (sum of its terms)", trajectory.reward, total)
    task = stored.header.tasks.get(trajectory.task_id)
    try:
        again = rewards.reward(trajectory, task, stored.header.reward_weights)
    except NotRepeatable as why:
        report.skip("reward", str(why))
    else:
        report.compare("reward", name, trajectory.reward, again)


def _replay_mask(report: Report, trajectory: Trajectory) -> None:
    """The loss mask is True exactly on the completions of the turns, and in each of them."""
    for index, stream in enumerate(trajectory.streams):
        again = np.zeros(len(stream.token_ids), bool)
        for turn in trajectory.turns:
            if turn.stream == index:
                again[turn.start : turn.end] = True
        different = np.flatnonzero(again != np.asarray(stream.loss_mask, bool))
        report.compared["loss mask"] += 1
        report.largest.setdefault("loss mask", 0.0)
        if different.size:
            first = int(different[0])
            where = f"{_name(trajectory)}, token {first} of stream {index}"
            mismatch = Mismatch(
                report.step, "loss mask", where, str(stream.loss_mask[first]), str(again[first])
            )
            report.mismatches.append(mismatch)
            report.largest["loss mask"] = 1.0


def _replay_token_advantages(report: Report, record: Record, trajectory: Trajectory) -> None:
    """Sampled tokens of what was trained on have the advantages that were packed, all others 0."""
    for index, (stored, stream) in enumerate(zip(record.streams, trajectory.streams, strict=True)):
        values = stored.array("advantages")
        if values is None:
            continue
        outside = values[~np.asarray(stream.loss_mask, bool)]
        worst = float(np.abs(outside).max(initial=0.0))
        where = f"{_name(trajectory)}, tokens of stream {index} that were not sampled"
        report.compare("advantage", where, worst, 0.0)


def _replay_loss(
    report: Report,
    config: Config,
    stored: StoredStep,
    groups: list[list[Trajectory]],
    batch: TrainBatch,
) -> None:
    """Advantages of tokens, loss and metrics, from the rewards of this replay and the log-probs of the run."""
    if not batch.loss_tokens:
        report.skip("loss", "no token was trained on")
        return
    packed = [
        (_name(record.trajectory), stream)
        for record in stored.records
        if not record.dropped
        for stream in record.streams
        if stream.loss_mask.unpack().any()
    ]
    arrays = {
        name: _in_rows([stream.array(name) for _, stream in packed], batch)
        for name in ("log_probs", "entropy", "old_log_probs", "ref_log_probs", PREPARED)
    }
    batch = batch.with_log_probs(old=arrays["old_log_probs"], ref=arrays["ref_log_probs"])
    told = stored.header.metrics
    kl_coef = told.get("policy/kl_coef", config.grpo.kl_coef)
    if config.grpo.kl_in == "reward" and batch.old_log_probs is not None and batch.has_ref:
        charged, kl = with_kl_in_reward(config, groups, batch, kl_coef)
        assert isinstance(charged, TrainBatch), "as it was given"
        batch = charged
        report.compare("loss", "policy/kl_reward", told.get("policy/kl_reward", math.nan), kl)
    for (name, stream), again in zip(packed, unpack(batch.advantages, batch), strict=True):
        _replay_packed_advantages(report, name, stream.array("advantages"), again)
    log_probs, entropy = arrays["log_probs"], arrays["entropy"]
    if log_probs is None or entropy is None:
        report.skip("loss", "no update was made, so there are no log-probs (guard/skipped)")
        return
    objective = make_objective(config)
    prepared = log_probs if arrays[PREPARED] is None else arrays[PREPARED]
    batch, found = objective.prepare(batch, lambda _: prepared, kl_coef=kl_coef)
    means = objective(
        Sampled(jnp.asarray(log_probs), jnp.asarray(entropy)),
        jax.device_put(batch),
        jnp.float32(batch.loss_tokens),
        temperature=config.sampling.temperature,
        remat="none",
    )[1]
    for name, value in (found | means).items():
        if name in told:
            report.compare("loss", name, told[name], float(value))


def _replay_packed_advantages(
    report: Report, name: str, stored: np.ndarray | None, again: np.ndarray
) -> None:
    """Of the tokens of a stream, the one that is furthest off."""
    if stored is None:
        report.skip("advantage", "it is not stored of each token")
        return
    worst = int(np.argmax(np.abs(stored - again)))
    report.compare("advantage", f"{name}, token {worst}", float(stored[worst]), float(again[worst]))


def _in_rows(values: Sequence[np.ndarray | None], batch: TrainBatch) -> np.ndarray | None:
    """Values of each packed item, where the batch has its tokens; None if an item has none."""
    known = [value for value in values if value is not None]
    return laid_out(known, batch) if len(known) == len(values) else None


def _name(trajectory: Trajectory) -> str:
    return f"{trajectory.task_id} sample {trajectory.sample_index}"


def _bindings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def table(reports: Sequence[Report]) -> Table:
    """One row a step: how many values of each quantity were recomputed, and the largest difference."""
    out = Table(title="replayed: values compared, largest difference")
    for column in ("step", *QUANTITIES, "not compared", "result"):
        out.add_column(column, justify="left" if column in ("not compared", "result") else "right")
    for report in reports:
        cells = [
            f"{report.compared[q]}, {report.largest.get(q, 0.0):.1e}" if report.compared[q] else "-"
            for q in QUANTITIES
        ]
        skipped = [
            f"{count} {quantity}: {why}"
            for quantity, reasons in report.skipped.items()
            for why, count in reasons.items()
        ]
        wrong = len(report.mismatches)
        result = f"[red]{wrong} differ[/]" if wrong else "[green]same[/]"
        out.add_row(str(report.step), *cells, "\n".join(skipped), result)
    return out


def _reports(run_dir: Path, steps: Sequence[int]) -> Iterator[Report]:
    for step in steps:
        yield replay_step(run_dir, step)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: all that can be recomputed is the same; 1: something differs, or cannot be read."""
    parser = argparse.ArgumentParser(prog="tooljax.replay", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--step", type=int, action="append", help="a step; default: all")
    args = parser.parse_args(argv)
    steps: list[Any] = args.step or stored_steps(args.run)
    if not steps:
        print(
            f"tooljax.replay: {args.run} has no stored steps (store.enabled, run.dir)",
            file=sys.stderr,
        )
        return 1
    try:
        reports = list(_reports(args.run, steps))
    except (StoreError, ConfigError) as error:
        print(f"tooljax.replay: {error}", file=sys.stderr)
        return 1
    Console().print(table(reports))
    for report in reports:
        for line in (*report.notes, *report.mismatches):
            print(line, file=sys.stderr)
    return 1 if any(report.mismatches for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
