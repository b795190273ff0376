"""Which item goes into which row: first-fit decreasing over a small ladder of row lengths.

A microbatch is a fixed number of rows of one length, so a ladder of four lengths gives four compiled shapes whatever
is packed. Long rows pack well and hold what is long; microbatches of shorter rows take up the rest of a batch, where a
whole microbatch of long rows would be mostly padding, and are cheaper for attention. Plans with one or the other
longest row in common use are tried, and the cheapest whose padding is small is taken. The same lengths give the same
plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PADDING_GOAL = 0.03
"""Plans with at most this share of padding are compared by their cost, others by their padding."""

ATTENTION_TOKENS = 16_384
"""Row length at which attention costs as much as all else: 12 x embed, for a model of 1.5B parameters."""

MICROBATCH_TOKENS = 1024
"""What a microbatch costs beside its tokens, in tokens: gathered weights, added gradients."""


class Placement(NamedTuple):
    """Where an item went: row `row`, entries start to start + length."""

    row: int
    start: int
    length: int


@dataclass(frozen=True)
class Group:
    """The rows of one length in a plan, and what they hold."""

    row_length: int
    rows: int
    items: tuple[int, ...]
    """Indices of the items, in the order given."""
    placements: tuple[Placement, ...]
    """Of these items."""
    trunks: tuple[Placement, ...] | None = None
    """Where each item's first tokens are, if prompts are shared: those of `placements` come after them. Of length 0 for
    items that share nothing."""


def plan(
    lengths: Sequence[int], *, row_lengths: Sequence[int], rows: int, shards: int = 1
) -> tuple[Group, ...]:
    """Packs items of these lengths into microbatches of `rows` rows, the longest rows first; at least one microbatch.

    Rows of a microbatch are dealt to its `shards` equal parts so that these hold about as many tokens each.
    ValueError if an item is longer than every row.
    """
    ladder = sorted(set(row_lengths))
    total = sum(lengths)
    shortest_row(max(lengths, default=0), ladder)
    found = []
    for counts in _first_that_fit(lengths, ladder, rows):
        capacity = sum(n * rows * length for n, length in zip(counts, ladder, strict=True))
        padding = 1 - total / capacity
        over = padding if padding > PADDING_GOAL else 0.0
        found.append((over, _cost(counts, ladder, rows), counts))
    counts = min(found)[2]
    return _grouped(lengths, counts, ladder, rows, shards)


def plan_of_one_length(lengths: Sequence[int], *, row_lengths: Sequence[int], rows: int) -> Group:
    """Packs items of these lengths into rows of one length, the smallest that holds the longest item.

    Their number is rounded up to a multiple of `rows`, and is never 0. ValueError if an item is longer than every row.
    """
    row_length = shortest_row(max(lengths, default=0), row_lengths)
    where = first_fit_decreasing(lengths, [row_length] * len(lengths))
    assert where is not None, "each has a row of its own"
    used = max(where, default=-1) + 1
    count = max(1, -(-used // rows)) * rows
    placements = in_rows(list(zip(where, lengths, strict=True)), count)
    return Group(row_length, count, tuple(range(len(lengths))), tuple(placements))


def cost(groups: Sequence[Group], rows: int) -> float:
    """Time of a plan in microbatches of `rows` rows, in tokens without attention."""
    ladder = [group.row_length for group in groups]
    return _cost([group.rows // rows for group in groups], ladder, rows)


def shortest_row(longest: int, row_lengths: Sequence[int]) -> int:
    """The smallest of `row_lengths` that holds an item of `longest` tokens; ValueError if none does."""
    for length in sorted(row_lengths):
        if longest <= length:
            return length
    raise ValueError(
        f"a trajectory of {longest} tokens fits no row: the longest of batch.row_lengths="
        f"{tuple(row_lengths)} is {max(row_lengths, default=0)}. Add a longer row length, or lower "
        "limits.max_trajectory_tokens"
    )


def first_fit_decreasing(lengths: Sequence[int], room: Sequence[int]) -> list[int] | None:
    """The row of each item: longest first (equal ones in the order given), each into the first row with room for it.

    `room` has the rows' lengths. None if some item finds no room.
    """
    left = np.asarray(room, np.int64)
    where = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = left >= lengths[index]
        row = int(np.argmax(fits)) if len(left) else 0
        if not len(left) or not fits[row]:
            return None
        where[index] = row
        left[row] -= lengths[index]
    return where


def _first_that_fit(
    lengths: Sequence[int], ladder: list[int], rows: int
) -> Iterator[tuple[int, ...]]:
    """For each row length as the longest in common use, the smallest numbers of microbatches that hold the items."""
    total, smallest = sum(lengths), rows * ladder[0]
    for common in range(len(ladder)):
        above = _needed_above(lengths, ladder, rows, common)
        rest = total - sum(n * rows * length for n, length in zip(above, ladder, strict=True))
        target, step, tries = max(rest, 0), smallest, 0
        if not any(above):
            target = max(target, 1)
        while True:
            counts = _change(target, above, ladder, rows, common)
            if _fit(lengths, counts, ladder, rows) is not None:
                yield counts
                break
            tries += 1
            step *= 1 if tries % 4 else 2
            target += step


def _needed_above(
    lengths: Sequence[int], ladder: list[int], rows: int, common: int
) -> tuple[int, ...]:
    """Microbatches of the rows longer than ladder[common] that are needed for the items that fit in no shorter row."""
    counts = [0] * len(ladder)
    for k in range(common + 1, len(ladder)):
        long = [n for n in lengths if ladder[k - 1] < n <= ladder[k]]
        if long:
            used = first_fit_decreasing(long, [ladder[k]] * len(long))
            assert used is not None, "each has a row of its own"
            counts[k] = -(-(max(used) + 1) // rows)
    return tuple(counts)


def _change(
    tokens: int, above: tuple[int, ...], ladder: list[int], rows: int, common: int
) -> tuple[int, ...]:
    """`above`, and microbatches that hold `tokens` more: of ladder[common] as many as are filled, then shorter ones."""
    counts = list(above)
    for k in range(common, -1, -1):
        more, tokens = divmod(tokens, rows * ladder[k])
        counts[k] += more
    counts[0] += tokens > 0
    # Microbatches of shorter rows that together are as large as one of longer rows are that one.
    for k in range(common):
        ratio, odd = divmod(ladder[k + 1], ladder[k])
        if not odd and counts[k] >= ratio:
            counts[k + 1] += counts[k] // ratio
            counts[k] %= ratio
    return tuple(counts)


def _room(counts: Sequence[int], ladder: list[int], rows: int) -> list[int]:
    """The rows' lengths, the longest first: short rows stay free for the short items, which are placed last."""
    pairs = list(zip(counts, ladder, strict=True))
    return [length for n, length in reversed(pairs) for _ in range(n * rows)]


def _fit(
    lengths: Sequence[int], counts: Sequence[int], ladder: list[int], rows: int
) -> list[int] | None:
    """The row of each item in `_room`, which is also tried the other way round: either may succeed where one fails."""
    room = _room(counts, ladder, rows)
    where = first_fit_decreasing(lengths, room)
    if where is None and (turned := first_fit_decreasing(lengths, room[::-1])) is not None:
        where = [len(room) - 1 - row for row in turned]
    return where


def _cost(counts: Sequence[int], ladder: list[int], rows: int) -> float:
    """Time of a plan, in tokens without attention."""
    return sum(
        n * (rows * length * (1 + length / ATTENTION_TOKENS) + MICROBATCH_TOKENS)
        for n, length in zip(counts, ladder, strict=True)
    )


def _grouped(
    lengths: Sequence[int], counts: tuple[int, ...], ladder: list[int], rows: int, shards: int
) -> tuple[Group, ...]:
    where = _fit(lengths, counts, ladder, rows)
    assert where is not None, "the plan was chosen because it fits"
    groups, first = [], 0
    for n, length in reversed(list(zip(counts, ladder, strict=True))):
        size = n * rows
        if size:
            mine = [i for i, row in enumerate(where) if first <= row < first + size]
            placed = in_rows([(where[i] - first, lengths[i]) for i in mine], size)
            dealt = _dealt(placed, size, n * shards)
            groups.append(Group(length, size, tuple(mine), dealt))
        first += size
    return tuple(groups)


def in_rows(rows_and_lengths: list[tuple[int, int]], rows: int) -> list[Placement]:
    """The longest first in each row, as they were put there."""
    filled = [0] * rows
    placements = [Placement(0, 0, 0)] * len(rows_and_lengths)
    for index in sorted(range(len(placements)), key=lambda i: -rows_and_lengths[i][1]):
        row, length = rows_and_lengths[index]
        placements[index] = Placement(row, filled[row], length)
        filled[row] += length
    return placements


def _dealt(placements: list[Placement], rows: int, parts: int) -> tuple[Placement, ...]:
    """The same rows in another order: dealt forth and back to `parts` runs of rows, the fullest first."""
    tokens = [0] * rows
    for placement in placements:
        tokens[placement.row] += placement.length
    size = rows // parts
    moved = [0] * rows
    for rank, row in enumerate(sorted(range(rows), key=lambda r: -tokens[r])):
        turn, part = divmod(rank, parts)
        part = parts - 1 - part if turn % 2 else part
        moved[row] = part * size + turn
    return tuple(p._replace(row=moved[p.row]) for p in placements)
