"""Tasks with levels in two files, and what a made-up policy does on them."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_sidecar.protocol import Task, Trajectory
from tooljax.config import Config
from tooljax.config.schema import CurriculumConfig, DataConfig, GrpoConfig, RunConfig
from tooljax.curriculum.source import Source, open_source
from tooljax.rollouts import Groups


def make_tasks(count: int = 12, *, files: tuple[str, ...] = ("low", "high")) -> list[Task]:
    """`count` in each file; level 1 in the first one, 2 in the second, and so on."""
    return [
        Task(
            task_id=f"{name}:{i}",
            messages=[{"role": "user", "content": f"{name} {i}"}],
            data_source=name,
            ground_truth=str(i),
            extra_info={"level": level, "index": i},
        )
        for level, name in enumerate(files, start=1)
        for i in range(count)
    ]


def make_config(*, per_step: int = 5, seed: int = 0, shuffle: bool = True, **own: Any) -> Config:
    return replace(
        Config(),
        run=RunConfig(seed=seed),
        data=DataConfig(prompts_per_step=per_step, shuffle=shuffle),
        grpo=GrpoConfig(group_size=4),
        curriculum=CurriculumConfig(**own),
    )


def group(task: Task, passed: int, *, samples: int = 4, **changes: Any) -> list[Trajectory]:
    """`passed` of the samples solve it."""
    return [
        Trajectory(
            task_index=0,
            sample_index=i,
            task_id=task.task_id,
            seed=0,
            token_ids=[1, 2, 3],
            prompt_tokens=1,
            loss_mask=[False, True, True],
            rollout_log_probs=[0.0, -1.0, -1.0],
            reward=float(i < passed),
            metrics={"acc": float(i < passed)},
            **{"status": "completed", **changes},
        )
        for i in range(samples)
    ]


def play(tasks: list[Task], step: int) -> Groups:
    """What the policy makes of them: a number from 0 to 4 of passes that depends on the task, and on time."""
    return [group(task, (7 * int(task.ground_truth) + step // 3) % 5) for task in tasks]


def advance(source: Source, step: int, *, batches: int = 1) -> list[str]:
    """One step: its tasks, which are then observed."""
    tasks = [task for batch in range(batches) for task in source.next(step, batch)]
    source.observe(step, play(tasks, step), np.zeros((len(tasks), 4)))
    return [task.task_id for task in tasks]


def saved(source: Source) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    return json.loads(json.dumps(source.state()))


def assert_resumes_exactly(
    config: Config, tasks: list[Task], *, steps: int = 12, batches: int = 1
) -> None:
    """After each step another source goes on from the state just like the first one."""
    source, states, seen = open_source(config, tasks), [], []
    for step in range(steps):
        states.append(saved(source))
        seen.append(advance(source, step, batches=batches))
    last = saved(source)
    for first, state in enumerate(states):
        again = open_source(config, tasks)
        again.restore(state)
        assert [advance(again, step, batches=batches) for step in range(first, steps)] == seen[
            first:
        ]
        assert saved(again) == last


def assert_interruption_takes_nothing(config: Config, tasks: list[Task]) -> None:
    """Batches that were asked for, but not observed, come again: here and in another process."""
    source = open_source(config, tasks)
    for step in range(4):
        advance(source, step)
    before = source.state()
    batches = [[t.task_id for t in source.next(4, batch)] for batch in range(3)]
    assert source.state() != before
    source.restore(before)
    state = saved(source)
    other = open_source(config, tasks)
    other.restore(state)
    for one in (source, other):
        assert [[t.task_id for t in one.next(4, batch)] for batch in range(3)] == batches
