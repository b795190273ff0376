"""Items to pack, and the arrays that hold them once a plan says where each goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tooljax.packing import Group, Placement
from tooljax.packing_shared import Bundle, families


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
    prompt_tokens: int = 0
    """First tokens, without loss, that may be laid out once for all items that begin with the same. 0: they are not."""
    sequence: int | None = None
    """Which trajectory it belongs to, for what is computed of a whole one. None, for all items: each is one."""


def checked_length(item: PackItem, index: int) -> int:
    """Of the item with this index among those to pack. ValueError for one that cannot be trained on."""
    length = len(item.token_ids)
    parts = {"loss_mask": item.loss_mask, "rollout_log_probs": item.rollout_log_probs}
    if not isinstance(item.advantage, int | float):
        parts["advantage"] = item.advantage
    for name, part in parts.items():
        if part is not None and len(part) != length:
            raise ValueError(f"item {index} has {length} token_ids but {len(part)} {name}")
    if length == 0:
        raise ValueError(f"item {index} has no tokens; leave it out of the batch")
    if not 0 <= item.prompt_tokens <= length or any(item.loss_mask[: item.prompt_tokens]):
        raise ValueError(
            f"item {index} has prompt_tokens={item.prompt_tokens}, but a prompt is the first of its {length} tokens, "
            "and none of them is in loss_mask"
        )
    if item.loss_mask[0]:
        raise ValueError(
            f"item {index} has loss_mask[0] True, but nothing predicts the first token; "
            "a trajectory begins with a prompt"
        )
    return length


def alike(items: Sequence[PackItem]) -> list[Bundle]:
    """Items that begin with the same prompt, and how many tokens of it a trunk has: all but the last, which branches
    begin with."""
    prompts = [
        np.asarray(item.token_ids[:n], np.int32).tobytes()
        if (n := item.prompt_tokens) > 1
        else None
        for item in items
    ]
    return [Bundle(members, items[members[0]].prompt_tokens - 1) for members in families(prompts)]


def rows_of(items: Sequence[PackItem], group: Group) -> dict[str, np.ndarray | None]:
    """The arrays [rows time] of a TrainBatch, by name, of a group that holds these items."""
    shape = (group.rows, group.row_length)
    tokens, positions, segment_ids, trunk_ids = (np.zeros(shape, np.int32) for _ in range(4))
    advantages, rollout_log_probs = (np.zeros(shape, np.float32) for _ in range(2))
    loss_mask = np.zeros(shape, bool)
    sequence_ids = np.full(shape, -1, np.int32)
    trunks = group.trunks or tuple(Placement(p.row, p.start, 0) for p in group.placements)
    segments = [0] * group.rows

    def segment(row: int, start: int, item: PackItem, own: slice) -> slice:
        """Lays out a part of an item as the row's next segment."""
        span = slice(start, start + own.stop - own.start)
        segments[row] += 1
        tokens[row, span] = item.token_ids[own]
        positions[row, span] = np.arange(own.start, own.stop)
        segment_ids[row, span] = trunk_ids[row, span] = segments[row]
        return span

    # From left to right, so that segments count up along a row.
    for index, item, (row, start, length), trunk in sorted(
        zip(group.items, items, group.placements, trunks, strict=True), key=lambda entry: entry[2]
    ):
        shared = trunk.length
        if shared and not segment_ids[row, trunk.start]:
            segment(row, trunk.start, item, slice(0, shared))
        own = slice(shared, shared + length)
        span = segment(row, start, item, own)
        if shared:
            trunk_ids[row, span] = segment_ids[row, trunk.start]
        mask = (np.asarray(item.loss_mask, bool) & item.trained)[own]
        loss_mask[row, span] = mask
        sequence_ids[row, span] = index if item.sequence is None else item.sequence
        advantages[row, span] = np.where(mask, _own(item.advantage, own), 0.0)
        if item.rollout_log_probs is not None:
            rollout_log_probs[row, span] = np.where(mask, item.rollout_log_probs[own], 0.0)
    return {
        "tokens": tokens,
        "positions": positions,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "advantages": advantages,
        "rollout_log_probs": rollout_log_probs,
        "sequence_ids": sequence_ids,
        "trunk_ids": None if group.trunks is None else trunk_ids,
    }


def _own(values: float | Sequence[float], own: slice) -> Any:
    return values if isinstance(values, int | float) else values[own]
