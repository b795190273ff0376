"""Trajectories in, arrays of static shape out.

`pack_mixed` makes a batch of rows of a few lengths (`tooljax.packing`), `pack` one of rows of one length.
Several trajectories share a row; `segment_ids` keeps them apart (0 is padding) and `positions` count from 0 in each.
There are no prompt and response regions, and nothing is ever cut: a trajectory that fits no row is an error, because
its limits were checked when it was sampled.

Entry t of a row is about token t given the earlier tokens of its segment: loss_mask[t] says that the policy sampled
token t, rollout_log_probs[t] is its log-probability. The first token of a segment has no prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from rollout_sidecar.protocol import Trajectory
from tooljax.packing import Group, Placement, first_fit_decreasing, in_rows, plan, shortest_row
from tooljax.pytree import pytree_dataclass, static_field

__all__ = [
    "Batch",
    "PackItem",
    "PackedBatch",
    "Placement",
    "TrainBatch",
    "laid_out",
    "pack",
    "pack_mixed",
    "packed",
    "trajectory_items",
    "unpack",
    "unpack_field",
    "with_advantages",
]

Array = Any
"""NumPy on the host, JAX inside the update."""


@dataclass(frozen=True)
class PackItem:
    """One token stream to train on."""

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """True where the policy sampled the token."""
    advantage: float | Sequence[float]
    """Of the whole trajectory: its sampled tokens all get it, in every stream. Or one for each entry of token_ids. Not
    used by the supervised loss."""
    rollout_log_probs: Sequence[float] | None = None
    """None, for demonstrations: zeros."""
    trained: bool = True
    """False leaves every token out of the loss, out of its denominator and out of the metrics."""
    sequence: int | None = None
    """Which trajectory it belongs to, for what is computed of a whole one. None, for all items: each is one."""


def trajectory_items(trajectory: Trajectory, advantage: float) -> list[PackItem]:
    """The trainable parts of a trajectory: each token stream in which something was sampled.

    All have the trajectory's advantage, and every sampled token is in one of them: the loss is the same sum over the
    same tokens, each in the context in which it was sampled.
    """
    return [
        PackItem(
            token_ids=stream.token_ids,
            loss_mask=stream.loss_mask,
            advantage=advantage,
            rollout_log_probs=stream.rollout_log_probs,
        )
        for stream in trajectory.streams
        if any(stream.loss_mask)
    ]


@pytree_dataclass
class TrainBatch:
    """Packed trajectories. Arrays are on the host until the update takes them, a microbatch at a time."""

    tokens: Int[Array, "rows time"]
    positions: Int[Array, "rows time"]
    segment_ids: Int[Array, "rows time"]
    """1, 2, ... in each row; 0 is padding."""
    loss_mask: Bool[Array, "rows time"]
    advantages: Float[Array, "rows time"]
    rollout_log_probs: Float[Array, "rows time"]
    """What the engine reported when sampling; 0 where loss_mask is False, as all log-probs here."""
    old_log_probs: Float[Array, "rows time"] | None = None
    """The trainer's own, before this batch's first update. None: the current ones, held constant."""
    ref_log_probs: Float[Array, "rows time"] | None = None
    """The frozen reference policy's. None: no KL term."""
    sequence_ids: Int[Array, "rows time"] | None = None
    """Which trajectory of the whole batch a token belongs to, from 0; -1 is padding. On the host only."""
    token_values: dict[str, Float[Array, "rows time"]] = field(default_factory=dict)
    """What the objective has prepared for each token, by its own names."""
    placements: tuple[Placement, ...] = static_field(default=())
    """In the order of the items that were packed."""

    @property
    def groups(self) -> "tuple[TrainBatch, ...]":
        """As of a PackedBatch: this one."""
        return (self,)

    @property
    def padding_fraction(self) -> float:
        """Share of all entries that hold no token."""
        return float(np.mean(np.asarray(self.segment_ids) == 0))

    @property
    def has_ref(self) -> bool:
        """Whether the reference policy's log-probs are filled in."""
        return self.ref_log_probs is not None

    @property
    def loss_tokens(self) -> int:
        """Number of tokens in the loss: its denominator."""
        return int(np.sum(np.asarray(self.loss_mask)))

    def with_log_probs(
        self,
        *,
        old: Float[Array, "rows time"] | None = None,
        ref: Float[Array, "rows time"] | None = None,
    ) -> "TrainBatch":
        """The same batch with the log-probs that are given filled in."""
        return replace(
            self,
            old_log_probs=self.old_log_probs if old is None else old,
            ref_log_probs=self.ref_log_probs if ref is None else ref,
        )

    def without_loss(self) -> "TrainBatch":
        """The same batch with no token to learn from."""
        return replace(self, loss_mask=np.zeros(self.loss_mask.shape, bool))

    def microbatches(self, rows: int) -> "list[TrainBatch]":
        """The batch cut into pieces of `rows` rows, without placements: all pieces have one tree structure."""
        total = self.tokens.shape[0]
        if total % rows:
            raise ValueError(
                f"a batch of {total} rows cannot be cut into microbatches of {rows}; "
                f"pack with rows_multiple={rows} (batch.rows_per_microbatch)"
            )
        whole = replace(self, placements=(), sequence_ids=None)
        cuts = range(0, total, rows)
        return [jax.tree.map(lambda x, i=i: x[i : i + rows], whole) for i in cuts]


@dataclass(frozen=True)
class PackedBatch:
    """A batch of rows of several lengths: one TrainBatch of each."""

    groups: tuple[TrainBatch, ...]
    """The longest rows first."""
    order: tuple[tuple[int, ...], ...]
    """Of each group: which of the items that were packed are in it."""

    @property
    def padding_fraction(self) -> float:
        """Share of all entries that hold no token."""
        sizes = [group.tokens.size for group in self.groups]
        return float(np.average([g.padding_fraction for g in self.groups], weights=sizes))

    @property
    def loss_tokens(self) -> int:
        """Number of tokens in the loss: its denominator."""
        return sum(group.loss_tokens for group in self.groups)

    @property
    def has_ref(self) -> bool:
        """Whether the reference policy's log-probs are filled in."""
        return self.groups[0].has_ref

    def with_log_probs(
        self, *, old: Sequence[Array] | None = None, ref: Sequence[Array] | None = None
    ) -> "PackedBatch":
        """The same batch with the log-probs that are given, [rows time] of each group, filled in."""
        none = [None] * len(self.groups)
        filled = [
            group.with_log_probs(old=o, ref=r)
            for group, o, r in zip(self.groups, old or none, ref or none, strict=True)
        ]
        return replace(self, groups=tuple(filled))

    def microbatches(self, rows: int) -> list[TrainBatch]:
        """All groups cut into pieces of `rows` rows."""
        return [piece for group in self.groups for piece in group.microbatches(rows)]

    def without_loss(self) -> "PackedBatch":
        """The same batch with no token to learn from."""
        return replace(self, groups=tuple(group.without_loss() for group in self.groups))

    def unpack(self, values: Sequence[Array]) -> list[np.ndarray]:
        """The entries of each packed item, in the order in which they were given, from [rows time] of each group."""
        found: dict[int, np.ndarray] = {}
        for group, items, value in zip(self.groups, self.order, values, strict=True):
            found |= dict(zip(items, unpack(value, group), strict=True))
        return [found[i] for i in sorted(found)]


Batch = TrainBatch | PackedBatch
"""What an update takes."""


def packed(
    items: Sequence[PackItem],
    *,
    row_lengths: Sequence[int],
    rows_per_microbatch: int,
    mixed_lengths: bool,
    shards: int = 1,
) -> Batch:
    """By pack_mixed, or else by pack. `shards` is the number of devices that each microbatch's rows are spread over."""
    if not mixed_lengths:
        return pack(items, row_lengths=row_lengths, rows_multiple=rows_per_microbatch)
    return pack_mixed(
        items, row_lengths=row_lengths, rows_per_microbatch=rows_per_microbatch, shards=shards
    )


def pack_mixed(
    items: Sequence[PackItem],
    *,
    row_lengths: Sequence[int],
    rows_per_microbatch: int,
    shards: int = 1,
) -> PackedBatch:
    """Packs items into rows of the lengths given, in microbatches of one length each; see `tooljax.packing`.

    `shards` is the number of parts that each microbatch's rows are spread over. The same items give the same batch.
    """
    groups = plan(
        [_checked_length(item, index) for index, item in enumerate(items)],
        row_lengths=row_lengths,
        rows=rows_per_microbatch,
        shards=shards,
    )
    return PackedBatch(
        tuple(_laid_out([items[i] for i in group.items], group) for group in groups),
        tuple(group.items for group in groups),
    )


def pack(
    items: Sequence[PackItem], *, row_lengths: Sequence[int], rows_multiple: int
) -> TrainBatch:
    """Packs items into rows of one length, first-fit decreasing.

    Rows have the smallest of `row_lengths` that holds the longest item. Their number is rounded up to a multiple of
    `rows_multiple` with empty rows, and is never 0. The same items give the same batch.
    """
    lengths = [_checked_length(item, index) for index, item in enumerate(items)]
    row_length = shortest_row(max(lengths, default=0), row_lengths)
    where = first_fit_decreasing(lengths, [row_length] * len(items))
    assert where is not None, "each has a row of its own"
    used = max(where, default=-1) + 1
    rows = max(1, -(-used // rows_multiple)) * rows_multiple
    placements = in_rows(list(zip(where, lengths, strict=True)), rows)
    return _laid_out(items, Group(row_length, rows, tuple(range(len(items))), tuple(placements)))


def _laid_out(items: Sequence[PackItem], group: Group) -> TrainBatch:
    shape = (group.rows, group.row_length)
    tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
    advantages, rollout_log_probs = (np.zeros(shape, np.float32) for _ in range(2))
    loss_mask = np.zeros(shape, bool)
    sequence_ids = np.full(shape, -1, np.int32)
    segments = [0] * group.rows
    # From left to right, so that segments count up along a row.
    for index, item, (row, start, length) in sorted(
        zip(group.items, items, group.placements, strict=True), key=lambda entry: entry[2]
    ):
        span = slice(start, start + length)
        segments[row] += 1
        mask = np.asarray(item.loss_mask, bool) & item.trained
        tokens[row, span] = item.token_ids
        positions[row, span] = np.arange(length)
        segment_ids[row, span] = segments[row]
        loss_mask[row, span] = mask
        sequence_ids[row, span] = index if item.sequence is None else item.sequence
        advantages[row, span] = np.where(mask, item.advantage, 0.0)
        if item.rollout_log_probs is not None:
            rollout_log_probs[row, span] = np.where(mask, item.rollout_log_probs, 0.0)
    return TrainBatch(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        loss_mask=loss_mask,
        advantages=advantages,
        rollout_log_probs=rollout_log_probs,
        placements=group.placements,
        sequence_ids=sequence_ids,
    )


def unpack(values: Any, batch: Batch) -> list[np.ndarray]:
    """The entries of each packed item, in the order in which the items were given, from [rows time], or from a list of
    them for a batch of several row lengths."""
    if isinstance(batch, PackedBatch):
        return batch.unpack(values)
    host = np.asarray(values)
    return [host[row, start : start + length] for row, start, length in batch.placements]


def unpack_field(name: str, batch: Batch) -> list[np.ndarray]:
    """The same of a field of the batch."""
    values = [getattr(group, name) for group in batch.groups]
    return unpack(values if isinstance(batch, PackedBatch) else values[0], batch)


def with_advantages(batch: Batch, advantages: Sequence[Any]) -> Batch:
    """The same batch with other advantages: of each packed item, those of its tokens or one for all."""
    if isinstance(batch, PackedBatch):
        own = [[advantages[item] for item in items] for items in batch.order]
        groups = [with_advantages(g, a) for g, a in zip(batch.groups, own, strict=True)]
        return replace(batch, groups=tuple(groups))
    return replace(batch, advantages=laid_out(advantages, batch))


def laid_out(values: Sequence[Any], batch: TrainBatch) -> np.ndarray:
    """float32 [rows time] that `unpack` gives back: of each packed item, the values of its tokens or one for all."""
    out = np.zeros(batch.tokens.shape, np.float32)
    for value, (row, start, length) in zip(values, batch.placements, strict=True):
        out[row, start : start + length] = value
    return out


def _checked_length(item: PackItem, index: int) -> int:
    length = len(item.token_ids)
    parts = {"loss_mask": item.loss_mask, "rollout_log_probs": item.rollout_log_probs}
    if not isinstance(item.advantage, int | float):
        parts["advantage"] = item.advantage
    for name, part in parts.items():
        if part is not None and len(part) != length:
            raise ValueError(f"item {index} has {length} token_ids but {len(part)} {name}")
    if length == 0:
        raise ValueError(f"item {index} has no tokens; leave it out of the batch")
    if item.loss_mask[0]:
        raise ValueError(
            f"item {index} has loss_mask[0] True, but nothing predicts the first token; "
            "a trajectory begins with a prompt"
        )
    return length
