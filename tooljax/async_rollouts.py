"""The rollouts of a run's steps, in turn, with those of coming steps under way while the trainer updates.

A step's rollouts are started async.max_policy_lag steps before its turn, with the weights of then or newer ones: pushes
happen while they run. So none of its tokens can be older than that when it is trained on; what a sidecar reports to be
is left out. Which tasks a step takes, and their seeds, depend on the step alone, and a checkpoint has the position of
the first step that was not trained on: a resumed run asks for the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout_sidecar.protocol import SamplingParams, Task, Trajectory
from tooljax.config import Config
from tooljax.curriculum.source import Source
from tooljax.evaluate import limits, reward_weights, sampling
from tooljax.rollouts import Groups, InterruptedRollout, Progress, Rollout, Sidecars
from tooljax.training_batch import refilled, with_greedy


@dataclass(frozen=True)
class Asked:
    """What was started for one step."""

    position: dict[str, Any]
    """Of the source, before."""
    rollouts: list[Rollout]
    """Of the tasks; then, for remax, the greedy ones."""

    def take(self) -> Groups:
        """Waits for all of it."""
        groups, *greedy = [rollout.take() for rollout in self.rollouts]
        return with_greedy(groups, greedy[0]) if greedy else groups

    def give_up(self) -> None:
        """Aborts what is under way."""
        for rollout in self.rollouts:
            rollout.give_up()


class AsyncRollouts:
    """The rollouts of a run. Its state is the source's, of the first step that was not trained on."""

    def __init__(self, config: Config, sidecars: Sidecars, source: Source):
        self._config = config
        self._sidecars = sidecars
        self._source = source
        self._asked: dict[int, Asked] = {}
        self._shown: tuple[int, Progress] | None = None
        """The step that is waited for, and whom to tell how far it is."""

    def take(self, step: int, on_progress: Progress) -> Groups:
        """The trajectories that the policy after `step` steps is trained on. Those of coming steps are started first.

        Raises SidecarError, also of what went wrong in the background; interrupted, all tasks are still to come.
        """
        self._shown = step, on_progress
        lag, last = self._config.async_.max_policy_lag, self._config.run.steps - 1
        try:
            for coming in range(step, max(step, min(step + lag, last)) + 1):
                if coming not in self._asked:
                    self._asked[coming] = self._ask(coming, 0, step)
            groups = refilled(
                self._config,
                lambda batch: (self._ask(step, batch, step) if batch else self._asked[step]).take(),
            )
        except InterruptedRollout:
            self.give_up()
            raise
        del self._asked[step]
        return [[self._in_time(each, step) for each in group] for group in groups]

    def give_up(self) -> None:
        """Aborts everything that was started; its tasks are still to come."""
        if self._asked:
            self._source.restore(self.state())
        for asked in self._asked.values():
            asked.give_up()
        self._asked = {}

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return self._asked[min(self._asked)].position if self._asked else self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on there. ValueError if data or settings have changed."""
        self._source.restore(state)

    def _ask(self, step: int, batch: int, now: int) -> Asked:
        """Starts a batch of prompts of `step`, with the policy after `now` steps or newer ones."""
        position, first = self._source.state(), (self._config.run.seed, step)
        tasks, seed = self._source.next(step, batch), (*first, batch) if batch else first
        sample = self._config.grpo.group_size, sampling(self._config.sampling)
        plays = [sample, (1, SamplingParams(temperature=0.0))]
        if self._config.grpo.adv_estimator != "remax":
            plays = plays[:1]
        rollouts = [self._start(tasks, samples, seed, how, step, now) for samples, how in plays]
        return Asked(position, rollouts)

    def _start(
        self,
        tasks: list[Task],
        samples: int,
        seed: tuple[int, ...],
        how: SamplingParams,
        step: int,
        now: int,
    ) -> Rollout:
        config = self._config

        def tell(done: int, wanted: int) -> None:
            if self._shown is not None and self._shown[0] == step:
                self._shown[1](done, wanted)

        return self._sidecars.start(
            tasks,
            samples=samples,
            seed=seed,
            sampling=how,
            limits=limits(config.limits),
            reward_weights=reward_weights(config.reward, step),
            wanted=min(len(tasks), config.data.prompts_per_step),
            quorum=config.sidecar.quorum,
            straggler_timeout_s=config.sidecar.straggler_timeout_s,
            step=now,
            on_progress=tell,
        )

    def _in_time(self, trajectory: Trajectory, step: int) -> Trajectory:
        """The trajectory, as one that nothing is learnt from if a token of it is too old."""
        lag, bound = self._sidecars.policy_lag(trajectory, step), self._config.async_.max_policy_lag
        if lag <= bound:
            return trajectory
        why = f"a token of it is {lag} steps old, more than async.max_policy_lag={bound}"
        return msgspec.structs.replace(trajectory, status="aborted", error=why)
