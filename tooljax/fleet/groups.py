"""What a batch of rollouts asks for, what has come of it, and from where the rest can go on."""

from collections.abc import Sequence

import msgspec

from rollout_sidecar.protocol import (
    PartialTrajectory,
    ProgressFrame,
    RolloutRequest,
    RolloutSpec,
    Task,
    Trajectory,
)
from tooljax.fleet.replica import Replica


class Group:
    """All samples of one task."""

    def __init__(self, index: int, task: Task, seeds: Sequence[int]):
        self.index = index
        """Number of the task in its batch."""
        self.task = task
        self.seeds = seeds
        """By sample."""
        self.made: dict[int, Trajectory] = {}
        self.given_up: set[int] = set()
        """Samples that are waited for no longer."""
        self.partials: dict[int, PartialTrajectory] = {}
        """How far the others are known to be, where they could be resumed."""
        self.asked: set[int] = set()
        """Samples that some sidecar was asked for."""
        self.home: Replica | None = None
        """The replica that has read the prompt."""
        self.piece: Piece | None = None
        """The request that it is in; None while it waits for one."""
        self.fruitless = 0
        """Requests, one after the other, that were lost and had brought nothing new."""

    @property
    def missing(self) -> list[int]:
        """Samples that are still to come."""
        samples = range(len(self.seeds))
        return [s for s in samples if s not in self.made and s not in self.given_up]

    def give_up(self) -> list[int]:
        """Waits no longer for the samples that are missing, and says which."""
        missing = self.missing
        self.given_up.update(missing)
        return missing

    def all(self) -> list[Trajectory]:
        """Every sample, with an empty trajectory in place of those that were given up."""
        late = "still under way when its group had a quorum and the time of stragglers was over"
        return [
            self.made.get(s) or self.without_tokens(s, "aborted", late)
            for s in range(len(self.seeds))
        ]

    def lost(self, sample: int, why: str) -> Trajectory:
        """What takes the place of a sample that cannot be had."""
        return self.without_tokens(sample, "engine_error", why)

    def without_tokens(self, sample: int, status: str, error: str) -> Trajectory:
        """A trajectory that says why there is none."""
        return Trajectory(
            task_index=self.index,
            sample_index=sample,
            task_id=self.task.task_id,
            data_source=self.task.data_source,
            seed=self.seeds[sample],
            status=status,  # type: ignore[arg-type]
            error=error,
            messages=self.task.messages,
        )


class Piece:
    """Groups that one replica is asked for in one request."""

    def __init__(self, request_id: str, groups: Sequence[Group], replica: Replica):
        self.request_id = request_id
        self.groups = groups
        self.replica = replica
        self.news = False
        """Something has come: a trajectory, or a finished turn."""
        self._rollouts = [(group, sample) for group in groups for sample in group.missing]
        self._open = {(group.index, sample) for group, sample in self._rollouts}
        replica.outstanding += len(self._open)
        for group in groups:
            group.piece, group.home = self, replica

    @property
    def samples(self) -> list[tuple[Group, int]]:
        """What is asked for, in the order of the request."""
        return self._rollouts

    def request(self, template: RolloutRequest) -> RolloutRequest:
        """The request, with what `template` says of sampling and limits."""
        index = {group.index: j for j, group in enumerate(self.groups)}
        return msgspec.structs.replace(
            template,
            request_id=self.request_id,
            tasks=[group.task for group in self.groups],
            rollouts=[
                RolloutSpec(
                    task_index=index[group.index],
                    sample_index=sample,
                    seed=group.seeds[sample],
                    resume=group.partials.get(sample),
                )
                for group, sample in self._rollouts
            ],
        )

    def note(self, frame: ProgressFrame) -> None:
        """Takes progress of a trajectory under way."""
        group = self.groups[frame.task_index]
        partial = frame.extend(group.partials.get(frame.sample_index))
        if partial is not None:
            self.news = True
            group.partials[frame.sample_index] = partial

    def take(self, trajectory: Trajectory) -> Group | None:
        """Puts a trajectory where it belongs; None if it is not waited for, any more or at all."""
        group, sample = self.groups[trajectory.task_index], trajectory.sample_index
        self.settle(group, sample)
        if sample in group.made or sample in group.given_up:
            return None
        # Its number in the request depends on who else was asked for; its number in the batch does not.
        group.made[sample] = msgspec.structs.replace(trajectory, task_index=group.index)
        group.partials.pop(sample, None)
        self.news = True
        return group

    def settle(self, group: Group, sample: int) -> None:
        """The replica has no more to do for a sample."""
        if (group.index, sample) in self._open:
            self._open.remove((group.index, sample))
            self.replica.outstanding -= 1

    @property
    def settled(self) -> bool:
        """Nothing of it is waited for."""
        return not self._open

    def positions(self, group: Group, samples: Sequence[int]) -> list[int]:
        """Where samples are in the request."""
        wanted = {(group.index, sample) for sample in samples}
        return [k for k, (g, s) in enumerate(self._rollouts) if (g.index, s) in wanted]

    def end(self) -> None:
        """The request is over, whatever has come of it."""
        for group, sample in self._rollouts:
            self.settle(group, sample)
        for group in self.groups:
            if group.piece is self:
                group.piece = None
