"""Prompts that several items share: laid out once, as a trunk, and behind it what each item has of its own.

A trunk and its branches are a bundle, which takes a place in a row as an item does. A branch begins with the prompt's
last token: that costs one token an item, and every token is predicted from the one before it. Bundles that fit no row,
or would leave much of it empty, are cut, and each piece has a trunk of its own.

Plans with larger and smaller bundles are made, and the cheapest is taken if it costs clearly less than one that shares
nothing. The same lengths give the same plan.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tooljax.packing import Group, Placement, cost, first_fit_decreasing

PAYS = 0.95
"""A plan that shares prompts is taken if it costs at most this share of one that does not: attention to a trunk takes a
pass of its own on some devices."""

MOST_SEGMENTS = 128
"""Trunks and branches of a row: what kernels are given room for (tooljax.model.attention_cudnn)."""

_PIECES = (1, 2, 3, 4)
"""Bundles are at most a row, or one of so many parts of it."""

Arrange = Callable[[Sequence[int], Sequence[int]], tuple[Group, ...]]
"""A plan for items of these lengths in rows of these lengths."""


class Bundle(NamedTuple):
    """Items that are packed together."""

    items: tuple[int, ...]
    shared: int
    """Their common first tokens that are laid out once; 0 for an item alone."""


def families(prompts: Sequence[bytes | None]) -> list[tuple[int, ...]]:
    """The items that have equal prompts, two or more, in the order of their first. None: an item shares nothing."""
    of: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt is not None:
            of.setdefault(prompt, []).append(index)
    return [tuple(items) for items in of.values() if len(items) > 1]


def cheapest(
    lengths: Sequence[int],
    alike: Sequence[Bundle],
    arrange: Arrange,
    *,
    ladders: Sequence[Sequence[int]],
    plain: tuple[Group, ...],
    rows: int,
) -> tuple[Group, ...]:
    """The plan that is to be taken: `plain`, or one in which items of `alike` share their first tokens.

    `ladders` are the choices of row lengths that `arrange` may be given, `rows` those of a microbatch.
    """
    best, least = plain, PAYS * cost(plain, rows)
    tried = set()
    for ladder, size in _choices(ladders, lengths):
        bundles = tuple(_cut(lengths, alike, size))
        if (key := (tuple(ladder), bundles)) in tried or all(b.shared == 0 for b in bundles):
            continue
        tried.add(key)
        sizes = [b.shared + sum(lengths[i] - b.shared for i in b.items) for b in bundles]
        groups = tuple(_unbundled(g, bundles, lengths) for g in arrange(sizes, ladder))
        price = cost(groups, rows)
        if price < least and all(_segments(group) <= MOST_SEGMENTS for group in groups):
            best, least = groups, price
    return best


def _choices(
    ladders: Sequence[Sequence[int]], lengths: Sequence[int]
) -> Iterator[tuple[Sequence[int], int]]:
    """Row lengths, and the most tokens of a bundle in them."""
    longest = max(lengths, default=0)
    for ladder in ladders:
        if max(ladder) >= longest:
            yield from ((ladder, row // pieces) for row in ladder for pieces in _PIECES)


def _cut(lengths: Sequence[int], alike: Sequence[Bundle], size: int) -> Iterator[Bundle]:
    """All items, those that are alike in bundles of at most `size` tokens: as few as first-fit decreasing finds."""
    bundled = set()
    for items, shared in alike:
        own = {i: lengths[i] - shared for i in items if lengths[i] <= size}
        where = first_fit_decreasing(list(own.values()), [size - shared] * len(own))
        assert where is not None, "each may have a bundle of its own"
        pieces: list[list[int]] = [[] for _ in own]
        for item, piece in zip(own, where, strict=True):
            pieces[piece].append(item)
        for piece in pieces:
            # A trunk and all its branches are segments of one row.
            for first in range(0, len(piece), MOST_SEGMENTS - 1):
                part = piece[first : first + MOST_SEGMENTS - 1]
                if len(part) > 1:
                    bundled.update(part)
                    yield Bundle(tuple(part), shared)
    yield from (Bundle((i,), 0) for i in range(len(lengths)) if i not in bundled)


def _unbundled(group: Group, bundles: Sequence[Bundle], lengths: Sequence[int]) -> Group:
    """The group with the items of its bundles: where each has its own tokens, and where its trunk is."""
    found = []
    for index, (row, start, _) in zip(group.items, group.placements, strict=True):
        items, shared = bundles[index]
        trunk, at = Placement(row, start, shared), start + shared
        for item in items:
            found.append((item, Placement(row, at, lengths[item] - shared), trunk))
            at += lengths[item] - shared
    found.sort()
    items, placements, trunks = zip(*found, strict=True) if found else ((), (), ())
    return Group(group.row_length, group.rows, items, placements, trunks)


def _segments(group: Group) -> int:
    """Of the row that has most."""
    assert group.trunks is not None, "it was unbundled"
    counts = np.zeros(group.rows, int)
    for row, _, length in (*group.placements, *set(group.trunks)):
        counts[row] += length > 0
    return int(counts.max(initial=0))
