"""Batches of rows in an endless, reproducible order, with a position that can be saved: Grain does the ordering.

Shuffled (anew each epoch, from the seed): an epoch is as many whole batches as the rows fill. The rows left over are
skipped in that epoch, other ones in the next, so that no batch spans two epochs and holds a row twice.
In file order: the batch after the last row goes on at the first, so nothing is skipped; a batch never holds a row twice
either, since it has no more places than there are rows.

Grain computes any batch of the order from its number alone (`MapDataset`), so the position is that number.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import grain
import msgspec
import xxhash

from rollout_sidecar.protocol import Task

T = TypeVar("T")


class RowSource(Generic[T]):
    """The batches of some rows. Subclasses only name the settings that errors speak of."""

    rows_name: ClassVar[str] = "rows"
    files_setting: ClassVar[str] = "files"
    per_step_setting: ClassVar[str] = "per_step"

    def __init__(self, rows: Sequence[T], *, per_step: int, seed: int, shuffle: bool):
        count = len(rows)
        if not count:
            raise ValueError(
                f"there are no {self.rows_name}; name their files in {self.files_setting}"
            )
        if not 1 <= per_step <= count:
            raise ValueError(
                f"{self.per_step_setting}={per_step} does not fit {count} {self.rows_name}: a step holds each at most "
                f"once; set it to between 1 and {count}, or add to {self.files_setting}"
            )
        self._rows = rows
        self._settings = {self.per_step_setting: per_step, "seed": seed, "shuffle": shuffle}
        self._per_step = per_step
        self._shuffle = shuffle
        self._step = 0
        self._batches = batches(count, per_step=per_step, seed=seed, shuffle=shuffle)
        self.fingerprint = self._fingerprint()
        """xxh3-128 over all rows and what decides their order. A position is only valid with the same one."""

    def next(self) -> list[T]:
        """The next batch; it never ends."""
        indices = self._batches[self._step]
        assert indices is not None, "only a filtered dataset of Grain has gaps"
        self._step += 1
        return [self._rows[i] for i in indices]

    def epoch(self) -> int:
        """How many times all rows have been gone through (but for those left over)."""
        if self._shuffle:
            return self._step // (len(self._rows) // self._per_step)
        return self._step * self._per_step // len(self._rows)

    def state(self) -> dict[str, Any]:
        """The position, as JSON values: restored, the next batch is the one that would have come next."""
        return {
            "step": self._step,
            "fingerprint": self.fingerprint,
            "rows": len(self._rows),
            "settings": dict(self._settings),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on at a saved position. ValueError if rows or settings have changed: it would skip or repeat rows."""
        step = state.get("step")
        if not isinstance(step, int) or step < 0 or "fingerprint" not in state:
            raise ValueError(f"{dict(state)!r} is not a saved position of {self.rows_name}")
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the {self.rows_name} have changed since the position was saved after {step} steps: fingerprint "
                f"{state['fingerprint']} of {state.get('rows')} {self.rows_name} then, {self.fingerprint} of "
                f"{len(self._rows)} now ({self._changes(state.get('settings', {}))}). Going on would skip or repeat "
                f"{self.rows_name}: put {self.files_setting} and the settings back, or start a new run in another "
                "run.dir"
            )
        self._step = step

    def _changes(self, then: Mapping[str, Any]) -> str:
        changes = [
            f"{name} {then.get(name)} then, {value} now"
            for name, value in self._settings.items()
            if then.get(name) != value
        ]
        return "; ".join(changes) or "same settings, other contents or order of rows"

    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for row in self._rows:
            digest.update(msgspec.json.encode(row, order="deterministic"))
            digest.update(b"\n")
        digest.update(msgspec.json.encode(self._settings, order="deterministic"))
        # The first batch too: another version of Grain may shuffle differently.
        digest.update(msgspec.json.encode(self._batches[0]))
        return digest.hexdigest()


class TaskSource(RowSource[Task]):
    """The tasks of each training step."""

    rows_name = "tasks"
    files_setting = "data.train"
    per_step_setting = "data.prompts_per_step"

    def __init__(self, tasks: Sequence[Task], *, prompts_per_step: int, seed: int, shuffle: bool):
        super().__init__(tasks, per_step=prompts_per_step, seed=seed, shuffle=shuffle)


def batches(count: int, *, per_step: int, seed: int, shuffle: bool) -> grain.MapDataset[list[int]]:
    """The endless sequence of batches, as row numbers."""
    numbers = grain.MapDataset.range(count)
    if shuffle:
        # Repeated last, so that batches end with the epoch.
        batches = numbers.seed(seed).shuffle().batch(per_step, drop_remainder=True, batch_fn=list)
        return batches.repeat(None)
    return numbers.repeat(None).batch(per_step, batch_fn=list)
