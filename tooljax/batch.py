"""Trajectories in, arrays of static shape out.

Several trajectories share a row; `segment_ids` keeps them apart (0 is padding) and `positions` count from 0 in each.
There are no prompt and response regions, and nothing is ever cut: a trajectory that fits no row is an error, because
its limits were checked when it was sampled.

Entry t of a row is about token t given the earlier tokens of its segment: loss_mask[t] says that the policy sampled
token t, rollout_log_probs[t] is its log-probability. The first token of a segment has no prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from rollout_sidecar.protocol import Trajectory
from tooljax.pytree import pytree_dataclass, static_field

Array = Any
"""NumPy on the host, JAX inside the update."""


@dataclass(frozen=True)
class PackItem:
    """One token stream to train on."""

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """True where the policy sampled the token."""
    advantage: float
    """Of the whole trajectory; its sampled tokens all get it, in every stream. Not used by the supervised loss."""
    rollout_log_probs: Sequence[float] | None = None
    """None, for demonstrations: zeros."""
    trained: bool = True
    """False leaves every token out of the loss, out of its denominator and out of the metrics."""


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


class Placement(NamedTuple):
    """Where an item went: row `row`, entries start to start + length."""

    row: int
    start: int
    length: int


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
    placements: tuple[Placement, ...] = static_field(default=())
    """In the order of the items that were packed."""

    @property
    def padding_fraction(self) -> float:
        """Share of all entries that hold no token."""
        return float(np.mean(np.asarray(self.segment_ids) == 0))

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

    def microbatches(self, rows: int) -> "list[TrainBatch]":
        """The batch cut into pieces of `rows` rows, without placements: all pieces have one tree structure."""
        total = self.tokens.shape[0]
        if total % rows:
            raise ValueError(
                f"a batch of {total} rows cannot be cut into microbatches of {rows}; "
                f"pack with rows_multiple={rows} (batch.rows_per_microbatch)"
            )
        whole = replace(self, placements=())
        cuts = range(0, total, rows)
        return [jax.tree.map(lambda x, i=i: x[i : i + rows], whole) for i in cuts]


def pack(
    items: Sequence[PackItem], *, row_lengths: Sequence[int], rows_multiple: int
) -> TrainBatch:
    """Packs items into rows, first-fit decreasing: longest first, each into the first row with room.

    Rows have the smallest of `row_lengths` that holds the longest item. Their number is rounded up to a multiple of
    `rows_multiple` with empty rows, and is never 0. The same items give the same batch.
    """
    lengths = [_checked_length(item, index) for index, item in enumerate(items)]
    row_length = _row_length(max(lengths, default=0), row_lengths)
    placements, used = _first_fit_decreasing(lengths, row_length)
    rows = max(1, -(-used // rows_multiple)) * rows_multiple
    tokens, positions, segment_ids = (np.zeros((rows, row_length), np.int32) for _ in range(3))
    advantages, rollout_log_probs = (np.zeros((rows, row_length), np.float32) for _ in range(2))
    loss_mask = np.zeros((rows, row_length), bool)
    segments = [0] * rows
    # From left to right, so that segments count up along a row.
    for item, (row, start, length) in sorted(
        zip(items, placements, strict=True), key=lambda pair: pair[1]
    ):
        span = slice(start, start + length)
        segments[row] += 1
        mask = np.asarray(item.loss_mask, bool) & item.trained
        tokens[row, span] = item.token_ids
        positions[row, span] = np.arange(length)
        segment_ids[row, span] = segments[row]
        loss_mask[row, span] = mask
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
        placements=tuple(placements),
    )


def unpack(values: Array, batch: TrainBatch) -> list[np.ndarray]:
    """The entries of each packed item, in the order in which the items were given to `pack`."""
    host = np.asarray(values)
    return [host[row, start : start + length] for row, start, length in batch.placements]


def _checked_length(item: PackItem, index: int) -> int:
    length = len(item.token_ids)
    parts = {"loss_mask": item.loss_mask, "rollout_log_probs": item.rollout_log_probs}
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


def _row_length(longest: int, row_lengths: Sequence[int]) -> int:
    for length in sorted(row_lengths):
        if longest <= length:
            return length
    raise ValueError(
        f"a trajectory of {longest} tokens fits no row: the longest of batch.row_lengths="
        f"{tuple(row_lengths)} is {max(row_lengths, default=0)}. Add a longer row length, or lower "
        "limits.max_trajectory_tokens"
    )


def _first_fit_decreasing(lengths: list[int], row_length: int) -> tuple[list[Placement], int]:
    """Where each item goes, and how many rows that takes. Equal lengths go in the order given."""
    filled: list[int] = []
    placements = [Placement(0, 0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        row = next((r for r, n in enumerate(filled) if n + length <= row_length), len(filled))
        if row == len(filled):
            filled.append(0)
        placements[index] = Placement(row, filled[row], length)
        filled[row] += length
    return placements, len(filled)
