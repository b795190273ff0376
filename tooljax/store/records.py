"""What the store says of a step: one header, then one record a trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from rollout_sidecar.protocol import RewardWeights, Task, Trajectory
from tooljax.batch import PackedBatch, TrainBatch, unpack
from tooljax.sampled import Sampled
from tooljax.store.arrays import Packed

FORMAT = 1
"""Raised when an older reader could not read what is written."""

PREPARED = "prepared_log_probs"
"""What the last update was prepared with, where that took log-probs of its own: those of tokens that it rejected are
nowhere else."""


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that is stored: unknown fields are damage, or of a later release."""


class Header(_Stored, frozen=True, kw_only=True, tag="step"):
    """The first frame of a step."""

    format: int = FORMAT
    step: int
    """Optimizer steps made, this one included."""
    config: str
    """All settings of the step, as config.gin has them."""
    reward_weights: RewardWeights
    """What the trajectories' rewards were put together with."""
    metrics: dict[str, float]
    """What the update reported: policy/loss and its like. Of several updates, the last one's."""
    tasks: dict[str, Task]
    """By task_id."""
    trajectories: int
    """How many records follow."""


class StoredStream(_Stored, frozen=True, kw_only=True):
    """One token stream of a trajectory: what was sampled, and what the trainer made of it."""

    token_ids: Packed
    loss_mask: Packed
    rollout_log_probs: Packed
    values: dict[str, Packed] = {}
    """What the loss was given for each token, under its name in the batch (advantages, old_log_probs, ref_log_probs),
    log_probs and entropy, the policy's own in the last update, and PREPARED. Empty if the stream was left out of the
    batch."""

    def array(self, name: str) -> np.ndarray | None:
        """One of the values; None if it was not part of the loss."""
        packed = self.values.get(name)
        return None if packed is None else packed.unpack()


class Record(_Stored, frozen=True, kw_only=True, tag="trajectory"):
    """One trajectory."""

    trajectory: Trajectory
    """Without its per-token lists, which are in `streams`."""
    group: int
    """Which of the step's groups it belongs to: advantages are relative within one."""
    advantage: float
    """Mean over its sampled tokens, before a KL in the reward is taken off."""
    dropped: str = ""
    """Why it was left out of the loss; "" if it was trained on."""
    streams: list[StoredStream]

    def whole(self) -> Trajectory:
        """The trajectory with its tokens, as the sidecar sent it."""
        *earlier, last = self.streams
        described = self.trajectory.earlier_streams
        return msgspec.structs.replace(
            self.trajectory,
            **_lists(last),
            earlier_streams=[
                msgspec.structs.replace(stream, **_lists(stored))
                for stream, stored in zip(described, earlier, strict=True)
            ],
        )


def make_record(
    trajectory: Trajectory,
    *,
    group: int,
    advantage: float,
    dropped: str,
    values: Sequence[Mapping[str, np.ndarray]],
) -> Record:
    """Packs a trajectory. `values` has an entry a stream, empty for those that were not in the batch."""
    none: dict[str, Any] = {"token_ids": [], "loss_mask": [], "rollout_log_probs": []}
    return Record(
        trajectory=msgspec.structs.replace(
            trajectory,
            **none,
            earlier_streams=[
                msgspec.structs.replace(stream, **none) for stream in trajectory.earlier_streams
            ],
        ),
        group=group,
        advantage=advantage,
        dropped=dropped,
        streams=[
            StoredStream(
                token_ids=Packed.of(np.asarray(stream.token_ids, np.int64)),
                loss_mask=Packed.of(np.asarray(stream.loss_mask, bool)),
                rollout_log_probs=Packed.of(np.asarray(stream.rollout_log_probs, np.float64)),
                values={name: Packed.of(value) for name, value in of_stream.items()},
            )
            for stream, of_stream in zip(trajectory.streams, values, strict=True)
        ],
    )


def values_of_items(
    batch: TrainBatch | PackedBatch, seen: Sequence[Sampled | None], prepared: Any = None
) -> list[dict[str, np.ndarray]]:
    """For each packed item, in order, what its tokens' loss was made from.

    Args:
        batch: every float of it counts but rollout_log_probs, which the trajectory holds itself.
        seen: Updater.seen of its last update: log-probs and entropies of each microbatch.
        prepared: Updater.prepared of it: what the objective asked for, [rows time] or a list of them; None if nothing.
    """
    values = _values_of_groups(batch, seen)
    if prepared is None:
        return values
    own = unpack(prepared, batch)
    return [value | {PREPARED: each} for value, each in zip(values, own, strict=True)]


def _values_of_groups(
    batch: TrainBatch | PackedBatch, seen: Sequence[Sampled | None]
) -> list[dict[str, np.ndarray]]:
    if isinstance(batch, TrainBatch):
        return _values_of_group(batch, seen)
    found: dict[int, dict[str, np.ndarray]] = {}
    rows = sum(group.tokens.shape[0] for group in batch.groups) // max(len(seen), 1)
    for group, items in zip(batch.groups, batch.order, strict=True):
        count = group.tokens.shape[0] // rows if seen else 0
        found |= dict(zip(items, _values_of_group(group, seen[:count]), strict=True))
        seen = seen[count:]
    return [found[i] for i in sorted(found)]


def _values_of_group(
    batch: TrainBatch, seen: Sequence[Sampled | None]
) -> list[dict[str, np.ndarray]]:
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if seen:
        none = np.zeros((batch.tokens.shape[0] // len(seen), batch.tokens.shape[1]), np.float32)
        for name in Sampled._fields:
            parts = [none if part is None else np.asarray(getattr(part, name)) for part in seen]
            arrays[name] = np.concatenate(parts)
    cut = {
        name: unpack(array, batch)
        for name, array in arrays.items()
        if name != "rollout_log_probs" and _is_per_token(array, batch)
    }
    return [{name: rows[i] for name, rows in cut.items()} for i in range(len(batch.placements))]


def _is_per_token(array: Any, batch: TrainBatch) -> bool:
    shape = getattr(array, "shape", None)
    return shape == batch.tokens.shape and np.issubdtype(np.asarray(array).dtype, np.floating)


def _lists(stream: StoredStream) -> dict[str, Any]:
    names = ("token_ids", "loss_mask", "rollout_log_probs")
    return {name: getattr(stream, name).unpack().tolist() for name in names}
