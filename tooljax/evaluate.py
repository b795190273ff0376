"""Measures a policy on held-out problems with the full tool loop: `python -m tooljax.evaluate --config configs/x.gin`.

Seeds derive from the run's seed and the problem only, so that two policies, or one policy with and without its tools,
are measured on the same draws.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from rollout_sidecar.client import SidecarError
from rollout_sidecar.protocol import Limits, RewardWeights, SamplingParams, Task, Trajectory
from tooljax.config import Config, parse_args
from tooljax.config.schema import LimitsConfig, RewardConfig, SamplingConfig
from tooljax.data.records import read_tasks
from tooljax.intervals import wilson
from tooljax.launch import check_files
from tooljax.metrics import rollout_metrics
from tooljax.rollouts import InterruptedRollout, Sidecars, open_sidecars

_EVALUATION = 2**32
"""Takes the place of the step in seeds: no training step draws what an evaluation draws."""


@dataclass(frozen=True)
class Evaluation:
    """What a policy did on held-out problems."""

    trajectories: list[Trajectory]
    correct: int
    """Trajectories whose reward function reported acc >= 0.5, or gave a reward >= 0.5 where it reports no acc."""
    metrics: dict[str, float]
    """Under eval/."""

    @property
    def scored(self) -> int:
        """Trajectories that have a reward: one whose reward function failed is neither right nor wrong."""
        return sum(trajectory.scored for trajectory in self.trajectories)

    @property
    def accuracy(self) -> float:
        """Share of correct trajectories among the scored ones; NaN if there are none."""
        return self.correct / self.scored if self.scored else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy."""
        return wilson(self.correct, self.scored) if self.scored else (0.0, 1.0)


def evaluate(
    config: Config, sidecars: Sidecars, tasks: Sequence[Task], *, with_tools: bool = True
) -> Evaluation:
    """Rolls out every task with what the sidecars serve now; `with_tools=False` offers none.

    Raises ValueError without tasks, SidecarError, or InterruptedRollout.
    """
    if not tasks:
        raise ValueError(
            "there are no held-out tasks to evaluate on; name their files in data.eval"
        )
    if not with_tools:
        tasks = [replace_tools(task) for task in tasks]
    groups = sidecars.rollout(
        tasks,
        samples=config.evaluate.samples,
        seed=(config.run.seed, _EVALUATION),
        sampling=SamplingParams(temperature=config.evaluate.temperature),
        limits=limits(config.limits),
    )
    trajectories = [trajectory for group in groups for trajectory in group]
    correct = sum(is_correct(trajectory) for trajectory in trajectories)
    metrics = {f"eval/{name}": value for name, value in rollout_metrics(trajectories).items()}
    evaluation = Evaluation(trajectories, correct, metrics)
    if evaluation.scored:
        metrics["eval/accuracy"] = evaluation.accuracy
    return evaluation


def held_out_tasks(config: Config) -> list[Task]:
    """The tasks of data.eval, at most evaluate.max_tasks of each file."""
    data = config.data
    return read_tasks(
        data.eval,
        max_rows=config.evaluate.max_tasks,
        prompt_key=data.prompt_key,
        reward_key=data.reward_key,
    )


def is_correct(trajectory: Trajectory) -> bool:
    """Whether the reward function called the answer right."""
    return trajectory.scored and trajectory.metrics.get("acc", trajectory.reward) >= 0.5


def replace_tools(task: Task) -> Task:
    """The same task, with every tool withheld."""
    return Task(**{**{f: getattr(task, f) for f in task.__struct_fields__}, "tools": []})


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


def table(rows: Sequence[tuple[str, Evaluation]]) -> Table:
    """One row an evaluation: accuracy with its interval, tool use, turns."""
    out = Table(title=f"{len(rows[0][1].trajectories)} held-out trajectories")
    # Short, so that a row is one line in a terminal of 80 columns.
    for column in ("policy", "accuracy", "95 % interval", "tool use", "valid", "turns"):
        out.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for name, evaluation in rows:
        low, high = evaluation.interval
        shown = evaluation.metrics
        out.add_row(
            name,
            f"{evaluation.accuracy:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{shown.get('eval/tools/use_rate', 0):.2f}",
            f"{shown.get('eval/tools/valid_call_rate', 0):.2f}",
            f"{shown.get('eval/rollout/turns/mean', 0):.1f}",
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates model.path on data.eval, with its tools and with tools withheld."""
    needed = partial(check_files, training=False)
    config = parse_args(
        argv, prog="tooljax.evaluate", description=__doc__ or "", check_files=needed
    )
    try:
        needed(config)
        tasks = held_out_tasks(config)
        with open_sidecars(config) as sidecars:
            rows = [
                ("with tools", evaluate(config, sidecars, tasks)),
                ("tools withheld", evaluate(config, sidecars, tasks, with_tools=False)),
            ]
    except (ValueError, SidecarError, OSError) as error:
        print(f"tooljax.evaluate: {error}", file=sys.stderr)
        return 1
    except InterruptedRollout:
        print("interrupted", file=sys.stderr)
        return 130
    Console().print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
