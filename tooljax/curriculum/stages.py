"""Staged schedules: which tasks may come in which steps, and all of those in turn."""

import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout_sidecar.protocol import Task, derive_seed
from tooljax.config.curriculum import Clause, Stage, parse_stage
from tooljax.curriculum.base import Seen
from tooljax.data.source import batches
from tooljax.update import Metrics

FIELDS = ("extra_info", "data_source", "ground_truth", "interaction", "file")
"""What conditions may ask for. A file goes by its name without suffix, as in task ids."""

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
    "in": lambda value, values: value in values,
}


class StagePlan:
    """The tasks of each stage."""

    def __init__(self, tasks: Sequence[Task], texts: Sequence[str], *, per_step: int):
        """Asks each task for each stage. ValueError names the stage and the task that has no such field, or says that a
        stage has too few tasks for a step."""
        self.stages = [parse_stage(text) for text in texts] or [Stage(0, (), "0: all")]
        self._first_steps = [stage.first_step for stage in self.stages]
        self.members = [
            np.array([i for i, task in enumerate(tasks) if _meets(task, stage)], np.int64)
            for stage in self.stages
        ]
        """Rows of each stage, in the data's order."""
        for stage, members in zip(self.stages, self.members, strict=True):
            if len(members) < per_step:
                raise ValueError(
                    f"curriculum.stages: {len(members)} of {len(tasks)} tasks meet {stage.text!r}, fewer than "
                    f"data.prompts_per_step={per_step}; widen the condition, or take fewer prompts a step"
                )

    def at(self, step: int) -> int:
        """Number of the stage that a step is in, from 0."""
        return bisect_right(self._first_steps, step) - 1

    def metrics(self, step: int) -> Metrics:
        """The stage, where there are several."""
        return {"curriculum/stage": float(self.at(step))} if len(self.stages) > 1 else {}


class Staged:
    """All tasks of a stage in turn, as the uniform order takes those of a run. A Curriculum."""

    def __init__(self, plan: StagePlan, *, per_step: int, seed: int, shuffle: bool):
        self._plan = plan
        # The first is the uniform order itself, so a single stage of all tasks changes nothing.
        seeds = [derive_seed(seed, i) % 2**32 if i else seed for i in range(len(plan.stages))]
        self._orders = [
            batches(len(members), per_step=per_step, seed=own, shuffle=shuffle)
            for members, own in zip(plan.members, seeds, strict=True)
        ]
        self._stage = 0
        self._batches = 0
        """Taken from the stage."""

    def next(self, step: int, batch: int) -> list[int]:
        """See Curriculum."""
        stage = self._plan.at(step)
        if stage != self._stage:
            self._stage, self._batches = stage, 0
        places = self._orders[stage][self._batches]
        assert places is not None, "only a filtered dataset of Grain has gaps"
        self._batches += 1
        return self._plan.members[stage][np.array(places)].tolist()

    def observe(self, seen: Seen) -> Metrics:
        """See Curriculum. What comes next does not depend on it."""
        return self._plan.metrics(seen.step)

    def state(self) -> dict[str, Any]:
        """See Curriculum."""
        texts = [stage.text for stage in self._plan.stages]
        return {"stages": texts, "stage": self._stage, "batches": self._batches}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Curriculum. Other stages than before would skip or repeat tasks, except ones that are yet to come."""
        now, stage = [stage.text for stage in self._plan.stages], state["stage"]
        if now[: stage + 1] != state["stages"][: stage + 1]:
            raise ValueError(
                f"curriculum.stages were {tuple(state['stages'])} when the checkpoint was saved in stage {stage}, and "
                f"are {tuple(now)} now; put back those up to that one, or start a new run in another run.dir"
            )
        self._stage, self._batches = stage, state["batches"]


def _meets(task: Task, stage: Stage) -> bool:
    return all(_holds(task, clause, stage.text) for clause in stage.clauses)


def _holds(task: Task, clause: Clause, text: str) -> bool:
    value = _value(task, clause.field, text)
    try:
        return bool(_COMPARE[clause.operator](value, clause.value))
    except TypeError:
        raise ValueError(
            f"curriculum.stages: {text!r} compares {clause.field} with {clause.value!r}, but task {task.task_id} has "
            f"{value!r:.60} there; compare with a value of its type"
        ) from None


def _value(task: Task, field: str, text: str) -> Any:
    first, *rest = field.split(".")
    if first not in FIELDS:
        raise ValueError(
            f"curriculum.stages: {text!r} asks for {field}; a condition can ask for {', '.join(FIELDS)} and what is "
            "in them, such as extra_info.level"
        )
    value: Any = task.task_id.rpartition(":")[0] if first == "file" else getattr(task, first)
    for name in rest:
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(
                f"curriculum.stages: {text!r} asks for {field}, which task {task.task_id} has not; add the field to "
                "every record, or name one that all have"
            )
        value = value[name]
    return value
