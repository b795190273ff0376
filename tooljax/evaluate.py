"""Measures policies on held-out problems with the full tool loop: `python -m tooljax.evaluate --config configs/x.gin`.

Compares the base model, the trained weights, and those with their tools withheld or in a single turn: on the same
prompts, and with seeds that derive from the run's seed, the problem and the sample only. Writes a report.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from rollout_sidecar.client import SidecarError
from rollout_sidecar.protocol import Limits, RewardWeights, SamplingParams, Task
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.checkpoint import CheckpointError
from tooljax.config import Config, parse_args
from tooljax.config.schema import LimitsConfig, RewardConfig, SamplingConfig
from tooljax.data.records import read_tasks
from tooljax.evaluation import weights
from tooljax.evaluation.comparison import Comparison, Measured
from tooljax.evaluation.conditions import AS_SERVED, Condition, chosen
from tooljax.evaluation.report import write_report
from tooljax.evaluation.result import Evaluation
from tooljax.launch import check_files
from tooljax.rollouts import InterruptedRollout, Sidecars, open_sidecars
from tooljax.store.evaluations import write_evaluation

_EVALUATION = 2**32
"""Takes the place of the step in seeds: no training step draws what an evaluation draws."""


def evaluate(
    config: Config,
    sidecars: Sidecars,
    tasks: Sequence[Task],
    condition: Condition = AS_SERVED,
) -> Evaluation:
    """Rolls out every task with what the sidecars serve now.

    Raises ValueError without tasks, SidecarError, or InterruptedRollout.
    """
    if not tasks:
        raise ValueError(
            "there are no held-out tasks to evaluate on; name their files in data.eval"
        )
    groups = sidecars.rollout(
        condition.tasks(tasks),
        samples=config.evaluate.samples,
        seed=(config.run.seed, _EVALUATION),
        sampling=SamplingParams(temperature=config.evaluate.temperature),
        limits=condition.limits(limits(config.limits)),
    )
    return Evaluation(groups, config.run.seed)


def compare(
    config: Config,
    sidecars: Sidecars,
    tasks: Sequence[Task],
    *,
    on_start: Callable[[Condition], None] = lambda condition: None,
) -> Comparison:
    """Every condition of evaluate.conditions, on the same tasks and seeds; each policy's weights are pushed once.

    Raises ValueError, SidecarError, CheckpointError or InterruptedRollout.
    """
    model = bool(config.model.path)
    trained = weights.Trained(config) if model else None
    found = trained is not None and trained.found
    conditions = chosen(config.evaluate.conditions, model=model, trained=found)
    if model:
        sidecars.check_fit(
            vocab_hash=ChatTokenizer.from_folder(config.model.path).vocab_hash,
            max_trajectory_tokens=config.limits.max_trajectory_tokens,
        )
    measured: list[Measured] = []
    for condition in conditions:
        on_start(condition)
        if condition.who not in [one.condition.who for one in measured]:
            if condition.who == "base":
                _push(config, sidecars, weights.base(config))
            elif trained is not None and condition.who == "trained":
                _push(config, sidecars, trained.tensors())
        seen = evaluate(config, sidecars, tasks, condition)
        step = trained.step if trained is not None and condition.who == "trained" else None
        keep(config, tasks, seen, name=condition.name, step=step or 0)
        measured.append(Measured(condition, seen))
    return Comparison(measured, str(trained) if found else "", _note(config, found))


def keep(
    config: Config, tasks: Sequence[Task], evaluation: Evaluation, *, name: str, step: int
) -> None:
    """Writes its trajectories beside the report: `tooljax.view` shows them."""
    folder, metrics = report_folder(config), evaluation.metrics
    write_evaluation(
        config, folder, tasks, evaluation.problems, name=name, step=step, metrics=metrics
    )


def held_out_tasks(config: Config) -> list[Task]:
    """The tasks of data.eval, at most evaluate.max_tasks of each file."""
    data = config.data
    return read_tasks(
        data.eval,
        max_rows=config.evaluate.max_tasks,
        prompt_key=data.prompt_key,
        reward_key=data.reward_key,
    )


def limits(config: LimitsConfig) -> Limits:
    """The wire form of the limits section."""
    return Limits(**asdict(config))


def sampling(config: SamplingConfig) -> SamplingParams:
    """The wire form of the sampling section."""
    return SamplingParams(**asdict(config))


def reward_weights(config: RewardConfig, step: int) -> RewardWeights:
    """The wire form of the reward section for the rollouts after `step` steps, its shaping annealed."""
    left = max(0.0, 1 - step / config.anneal_steps) if config.anneal_steps else 1.0
    return RewardWeights(
        tool=left * config.tool,
        turn=left * config.turn,
        turn_merge=config.turn_merge,
        valid_call=left * config.valid_call,
        invalid_call=left * config.invalid_call,
        overlong=config.overlong,
        overlong_buffer_tokens=config.overlong_buffer_tokens,
    )


def show(comparison: Comparison, console: Console) -> None:
    """Prints one row a condition, then what the reference gains over each of the others."""
    console.print(_table(comparison))
    for difference in comparison.differences():
        low, high = difference.interval
        console.print(
            f"{comparison.reference.condition.label} less {difference.other.label}: "
            f"{difference.measure} {difference.value:+.3f} ({low:+.3f} to {high:+.3f})",
            soft_wrap=True,
            markup=False,
        )
    if comparison.note:
        console.print(comparison.note, soft_wrap=True, markup=False)


def report_folder(config: Config) -> Path:
    """Where the report goes."""
    return Path(config.evaluate.output or Path(config.run.dir) / "evaluation")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: the report was written; 1: an error, told in a sentence; 130: interrupted."""
    needed = partial(check_files, training=False)
    config = parse_args(
        argv, prog="tooljax.evaluate", description=__doc__ or "", check_files=needed
    )
    console = Console()
    try:
        needed(config)
        tasks = held_out_tasks(config)
        with open_sidecars(config) as sidecars:
            comparison = compare(
                config, sidecars, tasks, on_start=lambda c: console.print(f"measuring: {c.label}")
            )
        page = write_report(config, comparison, tasks, report_folder(config))
    except (ValueError, SidecarError, CheckpointError, OSError) as error:
        print(f"tooljax.evaluate: {error}", file=sys.stderr)
        return 1
    except InterruptedRollout:
        print("interrupted", file=sys.stderr)
        return 130
    show(comparison, console)
    console.print(f"report: {page}", soft_wrap=True, markup=False)
    return 0


def _push(config: Config, sidecars: Sidecars, tensors: Iterable[tuple[str, jax.Array]]) -> None:
    """As the next version: it follows what a training run in this process has pushed, if there was one."""
    pushed = sidecars.fleet.version
    step = 0 if pushed is None else pushed + 1 - sidecars.version_of(0)
    sidecars.push(tensors, step=step, weights=config.weights)


def _note(config: Config, found: bool) -> str:
    """Why trained weights are not among what was measured, though they were asked for."""
    if found or not any(one.startswith("trained") for one in config.evaluate.conditions):
        return ""
    if not config.model.path:
        return "model.path is empty: what the sidecars serve was measured as it is."
    return (
        f"{config.run.dir} holds no checkpoint: only the base was measured. Name the run's folder in run.dir, or "
        "weights in evaluate.trained."
    )


def _table(comparison: Comparison) -> Table:
    """One row a condition: accuracy with its interval, tool use, turns."""
    out = Table(title=f"{len(comparison.reference.evaluation.trajectories)} held-out trajectories")
    # Short, so that a row is one line in a terminal of 80 columns.
    for column in ("policy", "accuracy", "95 % interval", "tool use", "valid", "turns"):
        out.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for condition, evaluation in comparison.measured:
        low, high = evaluation.interval
        shown = evaluation.metrics
        out.add_row(
            condition.label,
            f"{evaluation.accuracy:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{shown.get('eval/tools/use_rate', 0):.2f}",
            f"{shown.get('eval/tools/valid_call_rate', 0):.2f}",
            f"{shown.get('eval/rollout/turns/mean', 0):.1f}",
        )
    return out


if __name__ == "__main__":
    sys.exit(main())
