"""Difficulty pools: tasks are easy, medium or hard by their measured pass rate, and a step is filled by weights.

A group whose trajectories all pass, or all fail, teaches nothing (its advantages are 0), so tasks in between are worth
more of a step. The pass rate of a task is a running mean over the times that it was drawn; the first time it is what
was measured. A step is filled in this order:

1. tasks that were never drawn, for `explore` of the step;
2. tasks that were not drawn for `revisit_passes` passes, so that a pool cannot be left behind by the policy;
3. each place that is left: a pool by its weight, among those that have tasks left;
4. whatever there is, where the pools with a weight are too small.

Within each, the tasks come first that were not drawn for longest; ties are broken at random.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tooljax.config.curriculum import POOLS, CurriculumConfig
from tooljax.curriculum.base import Seen
from tooljax.curriculum.stages import StagePlan
from tooljax.update import Metrics

UNKNOWN = "unknown"
_HARD = POOLS.index("hard")


class Pools:
    """A Curriculum."""

    def __init__(
        self, plan: StagePlan, *, tasks: int, per_step: int, seed: int, settings: CurriculumConfig
    ):
        self._plan = plan
        self._per_step = per_step
        self._seed = seed
        self._settings = settings
        self._rates = np.full(tasks, np.nan)
        """Pass rates, NaN where none was measured."""
        self._last = np.full(tasks, -1)
        """Step in which a task was drawn last, -1 for never."""
        self._step = -1
        self._drawn: set[int] = set()
        """In that step: a later batch of it takes others."""

    def next(self, step: int, batch: int) -> list[int]:
        """See Curriculum."""
        if step != self._step:
            self._step, self._drawn = step, set()
        members = self._plan.members[self._plan.at(step)]
        free = np.array([i for i in members.tolist() if i not in self._drawn], np.int64)
        if len(free) < self._per_step:  # a step that samples more prompts than there are
            self._drawn, free = set(), members
        wait = math.ceil(self._settings.revisit_passes * len(members) / self._per_step)
        chosen = self._choose(free, np.random.default_rng([self._seed, step, batch]), wait)
        self._last[chosen] = step
        self._drawn.update(chosen)
        return chosen

    def _choose(
        self, free: Int[np.ndarray, " free"], rng: np.random.Generator, wait: int
    ) -> list[int]:
        """Tasks of one batch, out of those that are free; after `wait` steps a task is due again."""
        last = self._last[free]
        order = np.lexsort((rng.random(len(free)), last))
        free, last = free[order], last[order]
        most_new = math.ceil(self._settings.explore * self._per_step - 1e-9)
        chosen = free[last < 0][:most_new].tolist()
        if wait:
            due = free[(last >= 0) & (self._step - last >= wait)]
            chosen += due[: self._per_step - len(chosen)].tolist()
        chosen += self._weighted(free, rng, chosen)
        taken = set(chosen)
        rest = [i for i in free.tolist() if i not in taken]
        return chosen + rest[: self._per_step - len(chosen)]

    def _weighted(
        self, free: Int[np.ndarray, " free"], rng: np.random.Generator, taken: Sequence[int]
    ) -> list[int]:
        """For each place that is left a task of a pool drawn by weight, as long as such pools have any."""
        excluded = set(taken)
        queues: list[deque[int]] = [deque() for _ in POOLS]
        for i, pool, last in zip(
            free.tolist(), self._pool(self._rates[free]).tolist(), self._last[free], strict=True
        ):
            if last >= 0 and i not in excluded:
                # Nothing could be measured of it, so nothing of it passes.
                queues[_HARD if pool < 0 else pool].append(i)
        chosen = []
        for _ in range(self._per_step - len(taken)):
            weights = [
                w if queue else 0.0 for w, queue in zip(self._settings.weights, queues, strict=True)
            ]
            if not any(weights):
                break
            edges = np.cumsum(weights)
            pool = int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))
            chosen.append(queues[pool].popleft())
        return chosen

    def _pool(self, rates: Float[np.ndarray, " tasks"]) -> Int[np.ndarray, " tasks"]:
        """The place in POOLS of tasks with these pass rates, -1 where there is none."""
        pools = np.full(rates.shape, POOLS.index("medium"))
        pools[rates >= self._settings.easy_above] = POOLS.index("easy")
        pools[rates < self._settings.hard_below] = _HARD
        pools[np.isnan(rates)] = -1
        return pools

    def observe(self, seen: Seen) -> Metrics:
        """See Curriculum. Shares are of the pools that tasks were in before, sizes of those they are in now."""
        came_from = self._pool(self._rates[np.array(seen.tasks, np.int64)])
        for i, measured in zip(seen.tasks, seen.pass_rates, strict=True):
            if measured is not None:
                old, decay = self._rates[i], self._settings.decay
                self._rates[i] = measured if np.isnan(old) else decay * old + (1 - decay) * measured
        rates = self._rates[self._plan.members[self._plan.at(seen.step)]]
        pools = self._pool(rates)
        metrics = self._plan.metrics(seen.step)
        for pool, name in enumerate((*POOLS, UNKNOWN)):
            number = -1 if name == UNKNOWN else pool
            metrics[f"curriculum/pool/{name}/size"] = float((pools == number).sum())
            metrics[f"curriculum/pool/{name}/share"] = float((came_from == number).mean())
        if (pools >= 0).any():
            metrics["curriculum/pass_rate/mean"] = float(np.nanmean(rates))
        return metrics

    def state(self) -> dict[str, Any]:
        """See Curriculum."""
        known = np.flatnonzero(self._last >= 0)
        return {
            "tasks": known.tolist(),
            "last": self._last[known].tolist(),
            "pass_rates": [None if np.isnan(x) else x for x in self._rates[known].tolist()],
            "step": self._step,
            "drawn": sorted(self._drawn),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Curriculum. Bounds, weights and stages may have changed since: what was measured stays true."""
        known = np.array(state["tasks"], np.int64)
        self._rates[:], self._last[:] = np.nan, -1
        self._last[known] = state["last"]
        self._rates[known] = [math.nan if x is None else x for x in state["pass_rates"]]
        self._step, self._drawn = state["step"], set(state["drawn"])
