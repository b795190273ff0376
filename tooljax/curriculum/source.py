"""The tasks of each training step, through the curriculum that the config asks for, at a position that can be saved."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from rollout_sidecar.protocol import Task
from tooljax.config import Config
from tooljax.config.asynchronous import groups_started
from tooljax.curriculum.base import Curriculum, Seen, pass_rate
from tooljax.curriculum.pools import Pools
from tooljax.curriculum.sampler import UserSampler
from tooljax.curriculum.stages import Staged, StagePlan
from tooljax.data.source import TaskSource
from tooljax.rollouts import Groups
from tooljax.update import Metrics


def open_source(config: Config, tasks: Sequence[Task]) -> "Source":
    """The source of a run's tasks. ValueError if there are too few, or the curriculum does not fit them."""
    data, chosen, per_step = config.data, config.curriculum, groups_started(config)
    if len(tasks) < per_step and per_step > data.prompts_per_step:
        raise ValueError(
            f"async.oversampling={config.async_.oversampling:g} times data.prompts_per_step={data.prompts_per_step} "
            f"are {per_step} tasks a step, and data.train has {len(tasks)}; lower one of them, or add tasks"
        )
    shared: dict[str, Any] = {
        "prompts_per_step": per_step,
        "seed": config.run.seed,
        "shuffle": data.shuffle,
    }
    if chosen.kind == "uniform" and not chosen.stages and not chosen.class_path:
        return Source(tasks, **shared)
    return ChosenSource(tasks, config, **shared)


class Source(TaskSource):
    """All tasks in turn, whatever comes of them."""

    kind = "uniform"

    def next(self, step: int = 0, batch: int = 0) -> list[Task]:
        """The tasks of one batch of prompts; `step` and `batch` as in Curriculum.next."""
        return super().next()

    def observe(self, step: int, groups: Groups, advantages: np.ndarray) -> Metrics:
        """Tells what came out of the tasks that `step` was asked for."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on at a saved position. ValueError if data, settings or the kind of curriculum have changed."""
        kind = state.get("curriculum", {}).get("kind", "uniform")
        if kind != self.kind:
            raise ValueError(
                f"the checkpoint was saved with curriculum {kind!r}, and the config asks for {self.kind!r}; put the "
                "curriculum section back, or start a new run in another run.dir"
            )
        super().restore(state)


class ChosenSource(Source):
    """The tasks that a curriculum chooses."""

    def __init__(
        self,
        tasks: Sequence[Task],
        config: Config,
        *,
        prompts_per_step: int,
        seed: int,
        shuffle: bool,
    ):
        super().__init__(tasks, prompts_per_step=prompts_per_step, seed=seed, shuffle=shuffle)
        self.kind, self.curriculum = _choose(tasks, config)
        self._samples = config.grpo.group_size
        self._files = _files(tasks)
        self._places = {task.task_id: i for i, task in enumerate(tasks)}

    def next(self, step: int = 0, batch: int = 0) -> list[Task]:
        """See Source."""
        chosen = self.curriculum.next(step, batch)
        self._step += 1
        return [self._rows[i] for i in chosen]

    def observe(self, step: int, groups: Groups, advantages: np.ndarray) -> Metrics:
        """See Source."""
        places = [self._places[group[0].task_id] for group in groups]
        groups = [group[: self._samples] for group in groups]  # less what they are compared with
        rates = [pass_rate(group) for group in groups]
        return self.curriculum.observe(Seen(step, places, rates, groups, advantages))

    def state(self) -> dict[str, Any]:
        """The position, and what the curriculum knows, as JSON values."""
        own = {"kind": self.kind, "files": self._files, "state": self.curriculum.state()}
        return super().state() | {"curriculum": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Source."""
        self._check_files(state.get("curriculum", {}).get("files", self._files))
        super().restore(state)
        self.curriculum.restore(state["curriculum"]["state"])

    def _check_files(self, then: Mapping[str, Sequence[Any]]) -> None:
        changes = []
        for name in sorted(then.keys() | self._files.keys()):
            old, new = then.get(name), self._files.get(name)
            if old is None or new is None:
                changes.append(f"{name} {'is new' if old is None else 'is gone'}")
            elif old[0] != new[0]:
                changes.append(f"{name} had {old[0]} tasks and has {new[0]}")
            elif list(old) != list(new):
                changes.append(f"{name} has other contents, or another order")
        if changes:
            raise ValueError(
                f"data.train has changed since the curriculum was saved: {'; '.join(changes)}. What is known of a task "
                "would be taken for another's: put the files back, or start a new run in another run.dir"
            )


def _choose(tasks: Sequence[Task], config: Config) -> tuple[str, Curriculum]:
    """The kind that checkpoints name, and the curriculum."""
    data, settings, seed = config.data, config.curriculum, config.run.seed
    if settings.class_path:
        return "sampler", UserSampler(tasks, config)
    per_step = groups_started(config)
    plan = StagePlan(tasks, settings.stages, per_step=per_step)
    if settings.kind == "pools":
        pools = Pools(plan, tasks=len(tasks), per_step=per_step, seed=seed, settings=settings)
        return "pools", pools
    return "stages", Staged(plan, per_step=per_step, seed=seed, shuffle=data.shuffle)


def _files(tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """Of each file how many tasks it has, and xxh3-64 over them."""
    digests: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for task in tasks:
        name = task.task_id.rpartition(":")[0]
        digests.setdefault(name, xxhash.xxh3_64()).update(
            msgspec.json.encode(task, order="deterministic")
        )
        counts[name] = counts.get(name, 0) + 1
    return {name: [count, digests[name].hexdigest()] for name, count in counts.items()}
