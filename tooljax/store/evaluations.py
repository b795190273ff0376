"""Trajectories of evaluations, for people to look at: <folder>/<name>/trajectories/step_12.log, files of the store that
say of every trajectory that nothing was learnt from it. The name is DURING for those that a training run makes every so
many steps, else the condition's."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rollout_sidecar.protocol import RewardWeights, Task, Trajectory
from tooljax.config import Config
from tooljax.store.store import FOLDER, Credit, TrajectoryStore

DURING = "training"
"""Name of the evaluations of a training run."""
UNTRAINED = "it is of an evaluation"


def write_evaluation(
    config: Config,
    folder: Path,
    tasks: Sequence[Task],
    problems: Sequence[Sequence[Trajectory]],
    *,
    name: str,
    step: int,
    metrics: Mapping[str, float],
) -> Path | None:
    """Writes one evaluation, in place of what was there of this step or later ones; its path, None if the store is off.

    Args:
        folder: where evaluations of the run are.
        tasks: what was evaluated on.
        problems: its trajectories by task, then by sample.
        name: of the condition.
        step: optimizer steps that the policy had made.
        metrics: what it came to.
    """
    store = TrajectoryStore(config, tasks, folder / name.replace("/", "_") / FOLDER)
    store.forget_after(step - 1)
    samples = max(map(len, problems), default=0)
    return store.write(
        step,
        problems,
        credit=Credit(
            np.zeros((len(problems), samples), np.float32), [[UNTRAINED] * len(p) for p in problems]
        ),
        values=[],
        metrics=metrics,
        reward_weights=RewardWeights(),
    )
