"""Plans over a ladder of row lengths: worked cases, padding, shards, and that every item is placed once."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tooljax.batch import PackItem, pack_mixed
from tooljax.packing import first_fit_decreasing, plan


def item(length: int, first: int = 0) -> PackItem:
    return PackItem([*range(first, first + length)], [False] + [True] * (length - 1), 1.0)


def test_the_longest_go_first_into_the_first_row_with_room():
    # 5 fills the row of 5, 4 and 3 open and share the row of 8, 1 finds its last entry.
    assert first_fit_decreasing([3, 5, 1, 4], [5, 8]) == [1, 0, 1, 1]
    assert first_fit_decreasing([5, 5], [8, 4]) is None
    assert first_fit_decreasing([], []) == []


def test_the_rest_of_a_batch_goes_into_shorter_rows():
    # 8 + 8 + 4 tokens: two rows of 8 and one of 4, where three rows of 8 would be a sixth padding.
    groups = plan([8, 8, 3, 1], row_lengths=(4, 8), rows=1)
    assert [(g.row_length, g.rows, g.items) for g in groups] == [(8, 2, (0, 1)), (4, 1, (2, 3))]


def test_one_long_item_does_not_make_every_row_long():
    groups = plan([16_384, *[2048] * 32], row_lengths=(2048, 16_384), rows=1)
    assert {g.row_length: len(g.items) for g in groups} == {16_384: 1, 2048: 32}


def test_an_empty_batch_is_one_microbatch_of_the_shortest_rows():
    (group,) = plan([], row_lengths=(16, 8), rows=3)
    assert (group.row_length, group.rows, group.items) == (8, 3, ())


def test_rows_are_dealt_to_shards_by_their_tokens():
    # Rows of 8, 7, 6 and 5 tokens, to two shards of two rows: 8 + 5 and 7 + 6.
    (group,) = plan([8, 7, 6, 5], row_lengths=(8,), rows=4, shards=2)
    tokens = np.zeros(4, int)
    for placement in group.placements:
        tokens[placement.row] += placement.length
    assert tokens.tolist() == [8, 5, 7, 6]


def test_padding_of_multi_turn_lengths_is_within_the_goal():
    for seed in range(3):
        rng = np.random.default_rng(seed)
        turns = 1 + rng.geometric(1 / 4, 256)
        lengths = [min(int(rng.lognormal(5.2, 0.8, n).sum()) + 50, 4096) for n in turns]
        groups = plan(lengths, row_lengths=(512, 2048, 4096, 16384), rows=8, shards=8)
        entries = sum(g.rows * g.row_length for g in groups)
        assert 1 - sum(lengths) / entries <= 0.03
        assert len(groups) <= 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 32), max_size=40), st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]))
def test_every_token_is_packed_once_and_comes_back(lengths, rows_and_shards):
    rows, shards = rows_and_shards
    items = [item(n, first=100 * i) for i, n in enumerate(lengths)]

    def packed():
        return pack_mixed(items, row_lengths=(8, 20, 32), rows_per_microbatch=rows, shards=shards)

    batch = packed()
    tokens = batch.unpack([group.tokens for group in batch.groups])
    assert [ids.tolist() for ids in tokens] == [i.token_ids for i in items]
    assert sum((group.segment_ids != 0).sum() for group in batch.groups) == sum(lengths)
    assert batch.loss_tokens == sum(n - 1 for n in lengths)
    for group in batch.groups:
        assert group.tokens.shape[0] % rows == 0
    assert len({m.tokens.shape for m in batch.microbatches(rows)}) <= 3
    again = packed()
    assert again.order == batch.order
    for one, two in zip(batch.groups, again.groups, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


def test_log_probs_are_filled_in_group_by_group():
    batch = pack_mixed(
        [item(8), item(8), item(4)], row_lengths=(4, 8), rows_per_microbatch=1, shards=1
    )
    assert [g.tokens.shape for g in batch.groups] == [(2, 8), (1, 4)]
    values = [np.full(g.tokens.shape, -float(i), np.float32) for i, g in enumerate(batch.groups)]
    filled = batch.with_log_probs(ref=values)
    assert filled.has_ref
    assert not batch.has_ref
    assert [float(v[0]) for v in filled.unpack(values)] == [0.0, 0.0, -1.0]
    assert batch.padding_fraction == 0
    assert pack_mixed([item(3)], row_lengths=(4,), rows_per_microbatch=1).padding_fraction == 0.25


def test_what_fits_no_row_is_refused():
    message = (
        "a trajectory of 33 tokens fits no row: the longest of batch.row_lengths=(8, 32) is 32"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_mixed([item(33)], row_lengths=(8, 32), rows_per_microbatch=1)
