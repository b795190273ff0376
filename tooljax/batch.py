"""Trajectories in, arrays of static shape out.

`pack_mixed` makes a batch of rows of a few lengths (`tooljax.packing`), `pack` one of rows of one length.
Several trajectories share a row; `segment_ids` keeps them apart (0 is padding) and `positions` count from 0 in each.
There are no prompt and response regions, and nothing is ever cut: a trajectory that fits no row is an error, because
its limits were checked when it was sampled.

Entry t of a row is about token t given the earlier tokens of its segment: loss_mask[t] says that the policy sampled
token t, rollout_log_probs[t] is its log-probability. The first token of a segment has no prediction.

Trajectories with the same prompt may share it (`tooljax.packing_shared`): a trunk, the prompt but for its last token,
is one segment, and each trajectory's branch, that token and all after it, another. `trunk_ids` say which trunk a branch
sees, and its positions go on from the trunk's. What belongs to a trajectory's first tokens is then in no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from rollout_sidecar.protocol import Trajectory
from tooljax.packing import Group, Placement, plan, plan_of_one_length
from tooljax.packing_rows import PackItem, alike, checked_length, rows_of
from tooljax.packing_shared import cheapest
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
            prompt_tokens=min(stream.prompt_tokens, stream.loss_mask.index(True)),
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
    trunk_ids: Int[Array, "rows time"] | None = None
    """The segment that a token's segment goes on from, or else its own. None: no prompt is shared."""
    sequence_ids: Int[Array, "rows time"] | None = None
    """Which trajectory of the whole batch a token belongs to, from 0; -1 is padding. On the host only."""
    token_values: dict[str, Float[Array, "rows time"]] = field(default_factory=dict)
    """What the objective has prepared for each token, by its own names."""
    placements: tuple[Placement, ...] = static_field(default=())
    """In the order of the items that were packed: their own tokens, without those of a trunk."""
    trunks: tuple[Placement, ...] = static_field(default=())
    """Of these items, if prompts are shared: where their first tokens are. Of length 0 for those that share nothing."""

    @property
    def groups(self) -> "tuple[TrainBatch, ...]":
        """As of a PackedBatch: this one."""
        return (self,)

    @property
    def padding_fraction(self) -> float:
        """Share of all entries that hold no token."""
        return float(np.mean(np.asarray(self.segment_ids) == 0))

    @property
    def saved_tokens(self) -> int:
        """Tokens of the items that are in no row, because others have the same prompt."""
        return sum(t.length for t in self.trunks) - sum(t.length for t in set(self.trunks))

    @property
    def tokens_of_items(self) -> int:
        """Tokens of all items, each with its whole prompt."""
        return sum(p.length for p in (*self.placements, *self.trunks))

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
        whole = replace(self, placements=(), trunks=(), sequence_ids=None)
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
    def saved_tokens(self) -> int:
        """Tokens of the items that are in no row, because others have the same prompt."""
        return sum(group.saved_tokens for group in self.groups)

    @property
    def tokens_of_items(self) -> int:
        """Tokens of all items, each with its whole prompt."""
        return sum(group.tokens_of_items for group in self.groups)

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
    shared_prompts: bool = False,
) -> Batch:
    """Rows of several lengths, as pack_mixed makes them, or else of one, as pack does. `shards` is the number of
    devices that each microbatch's rows are spread over. With `shared_prompts` equal prompts are laid out once, where
    the whole batch then costs less."""
    lengths = [checked_length(item, index) for index, item in enumerate(items)]

    def arrange(lengths: Sequence[int], ladder: Sequence[int]) -> tuple[Group, ...]:
        if mixed_lengths:
            return plan(lengths, row_lengths=ladder, rows=rows_per_microbatch, shards=shards)
        return (plan_of_one_length(lengths, row_lengths=ladder, rows=rows_per_microbatch),)

    groups = arrange(lengths, row_lengths)
    if shared_prompts and (families := alike(items)):
        groups = cheapest(
            lengths,
            families,
            arrange,
            ladders=[row_lengths] if mixed_lengths else [(n,) for n in row_lengths],
            plain=groups,
            rows=rows_per_microbatch,
        )
    parts = tuple(_batch_of(items, group) for group in groups)
    if not mixed_lengths:
        return parts[0]
    return PackedBatch(parts, tuple(group.items for group in groups))


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
    batch = packed(
        items,
        row_lengths=row_lengths,
        rows_per_microbatch=rows_per_microbatch,
        mixed_lengths=True,
        shards=shards,
    )
    assert isinstance(batch, PackedBatch), "it was asked for"
    return batch


def pack(
    items: Sequence[PackItem], *, row_lengths: Sequence[int], rows_multiple: int
) -> TrainBatch:
    """Packs items into rows of one length, first-fit decreasing.

    Rows have the smallest of `row_lengths` that holds the longest item. Their number is rounded up to a multiple of
    `rows_multiple` with empty rows, and is never 0. The same items give the same batch.
    """
    batch = packed(
        items, row_lengths=row_lengths, rows_per_microbatch=rows_multiple, mixed_lengths=False
    )
    assert isinstance(batch, TrainBatch), "it was asked for"
    return batch


def _batch_of(items: Sequence[PackItem], group: Group) -> TrainBatch:
    arrays: Any = rows_of([items[i] for i in group.items], group)
    return TrainBatch(**arrays, placements=group.placements, trunks=group.trunks or ())


def unpack(values: Any, batch: Batch) -> list[np.ndarray]:
    """The entries of each packed item, in the order in which the items were given, from [rows time], or from a list of
    them for a batch of several row lengths."""
    if isinstance(batch, PackedBatch):
        return batch.unpack(values)
    host = np.asarray(values)
    own = [host[row, start : start + length] for row, start, length in batch.placements]
    if not batch.trunks:
        return own
    first = [host[row, start : start + length] for row, start, length in batch.trunks]
    return [np.concatenate(parts) for parts in zip(first, own, strict=True)]


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
    """float32 [rows time] that `unpack` gives back: of each packed item, the values of its tokens or one for all. What
    is of a shared prompt is left out, and comes back as 0."""
    out = np.zeros(batch.tokens.shape, np.float32)
    for value, (row, start, length) in zip(values, batch.placements, strict=True):
        own = value if np.ndim(value) == 0 else value[len(value) - length :]
        out[row, start : start + length] = own
    return out
