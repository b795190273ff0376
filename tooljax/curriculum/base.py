"""What a curriculum is asked, and what it is told."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rollout_sidecar.protocol import Trajectory
from tooljax.evaluation.result import is_correct
from tooljax.rollouts import Groups
from tooljax.training_batch import why_untrainable
from tooljax.update import Metrics


class Seen(NamedTuple):
    """What a step made of its tasks."""

    step: int
    """The same number that its tasks were asked for with."""
    tasks: Sequence[int]
    """Of each group: which row of the data it is."""
    pass_rates: Sequence[float | None]
    """Of each group; None where nothing of it says anything about the policy."""
    groups: Groups
    advantages: np.ndarray
    """By group, then by sample."""


@runtime_checkable
class Curriculum(Protocol):
    """Chooses the tasks of each step. Draws follow from the run's seed, the step, and what was observed before."""

    def next(self, step: int, batch: int) -> Sequence[int]:
        """The rows for one batch of prompts. `step`: how many steps were made before; it never falls. `batch`: above 0
        where the step samples more than one."""
        ...

    def observe(self, seen: Seen) -> Metrics:
        """Takes note of what came out of a step's tasks."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `next` depends on beside its arguments and the settings, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, in this process or another. ValueError if the state does not fit the settings."""
        ...


def pass_rate(group: Sequence[Trajectory]) -> float | None:
    """Share of a group's trajectories that are correct as in evaluations: acc, or else the reward, is 0.5 or more.
    Those that cannot be trained on do not count; None if there are no others."""
    passed = [is_correct(t) for t in group if not why_untrainable(t)]
    return sum(passed) / len(passed) if passed else None
