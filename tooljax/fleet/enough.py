"""What a batch of rollouts need not wait for: the last of a group, and groups beyond those that are wanted."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from tooljax.fleet.batch import Batch
from tooljax.fleet.groups import Group


class Enough:
    """Gives up, of a batch, what is still under way when enough has ended."""

    def __init__(self, groups: Sequence[Group], *, wanted: int, quorum: int, timeout_s: float):
        """
        Args:
            wanted: as soon as so many groups have ended, the others are given up.
            quorum: once so many of a group's trajectories have ended, the others of it have a limit.
            timeout_s: that limit; then they are given up.
        """
        self._groups = groups
        self._wanted = wanted
        self._quorum = quorum
        self._timeout_s = timeout_s
        self._late: set[int] = set()
        """Groups whose last trajectories have a limit now."""
        self._chosen: list[Group] = []
        self._dropping: set[asyncio.Task[None]] = set()

    @property
    def chosen(self) -> list[Group]:
        """Those that are wanted, in the order of the batch. To be asked for when the batch has ended."""
        if self._wanted >= len(self._groups):
            return list(self._groups)
        if self._chosen:
            return self._chosen
        # Too few are sound: as many of the others as are missing.
        order = sorted(self._groups, key=lambda group: (not _sound(group), group.index))
        return sorted(order[: self._wanted], key=lambda group: group.index)

    def watch(self, batch: Batch, group: Group) -> None:
        """To be called when a trajectory of a group has come."""
        enough = self._quorum <= len(group.made) < len(group.seeds)
        if enough and group.index not in self._late:
            self._late.add(group.index)
            self._do(self._drop_late(batch, group))
        self._choose(batch)

    async def end(self) -> None:
        """Nobody is waited for any longer."""
        for task in self._dropping:
            task.cancel()
        await asyncio.gather(*self._dropping, return_exceptions=True)

    def _choose(self, batch: Batch) -> None:
        """Takes the first groups, once enough have ended."""
        if self._chosen or self._wanted >= len(self._groups):
            return
        sound = [group for group in self._groups if _sound(group)]
        if len(sound) < self._wanted:
            return
        self._chosen = sound[: self._wanted]
        for group in self._groups:
            if group.missing:
                self._do(batch.drop(group))

    def _do(self, dropping: Coroutine[Any, Any, None]) -> None:
        self._dropping.add(asyncio.create_task(dropping))

    async def _drop_late(self, batch: Batch, group: Group) -> None:
        await asyncio.sleep(self._timeout_s)
        await batch.drop(group)
        self._choose(batch)


def _sound(group: Group) -> bool:
    """Whether a group has ended, and not only because its sidecar failed: that is quickest of all."""
    made = group.made.values()
    return not group.missing and any(each.status != "engine_error" for each in made)
