"""Packing: where tokens go, what pads them, and what is refused."""

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sidecar.protocol import TokenStream, Trajectory
from tooljax.batch import PackItem, Placement, pack, trajectory_items, unpack


def item(length: int, *, first: int = 0, advantage: float = 1.0) -> PackItem:
    """Tokens first, first + 1, ...; all but the first sampled, with log-probs -0.5."""
    return PackItem(
        token_ids=list(range(first, first + length)),
        loss_mask=[False] + [True] * (length - 1),
        advantage=advantage,
        rollout_log_probs=[0.0] + [-0.5] * (length - 1),
    )


def test_rows_are_drawn_as_expected():
    items = [item(2, first=10, advantage=2.0), item(4, first=20), item(3, first=30, advantage=-1.0)]
    batch = pack(items, row_lengths=(6, 12), rows_multiple=2)
    # Longest first: 4, then 3 (no room beside it: 4 + 3 > 6), then 2 beside the 4.
    assert batch.tokens.tolist() == [[20, 21, 22, 23, 10, 11], [30, 31, 32, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]
    assert (batch.loss_mask * 1).tolist() == [[0, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 1, 1, 1, 0, 2], [0, -1, -1, 0, 0, 0]]
    assert batch.rollout_log_probs.tolist() == [
        [0, -0.5, -0.5, -0.5, 0, -0.5],
        [0, -0.5, -0.5, 0, 0, 0],
    ]
    assert batch.placements == (Placement(0, 4, 2), Placement(0, 0, 4), Placement(1, 0, 3))
    assert batch.loss_tokens == 6
    assert batch.padding_fraction == 3 / 12


def test_padding_of_packed_rows_is_small():
    batch = pack([item(n) for n in (100, 900, 1000)], row_lengths=(1024, 4096), rows_multiple=1)
    assert batch.tokens.shape == (2, 1024)
    assert batch.padding_fraction == 48 / 2048


def test_the_smallest_row_length_that_holds_the_longest_is_used():
    for longest, expected in [(5, 8), (8, 8), (9, 16), (16, 16)]:
        batch = pack([item(longest), item(3)], row_lengths=(16, 8), rows_multiple=1)
        assert batch.tokens.shape[1] == expected


def test_rows_are_rounded_up_with_empty_ones():
    batch = pack([item(8)] * 5, row_lengths=(8,), rows_multiple=4)
    assert batch.tokens.shape == (8, 8)
    assert batch.segment_ids.any(axis=1).tolist() == [True] * 5 + [False] * 3
    empty = pack([], row_lengths=(8, 16), rows_multiple=4)
    assert empty.tokens.shape == (4, 8)
    assert (empty.loss_tokens, empty.padding_fraction) == (0, 1.0)


def trajectory(**streams) -> Trajectory:
    """Token 6 of 5, 6, 7 was sampled."""
    return Trajectory(
        task_index=0,
        sample_index=0,
        task_id="t",
        seed=1,
        status="completed",
        token_ids=[5, 6, 7],
        prompt_tokens=1,
        loss_mask=[False, True, False],
        rollout_log_probs=[0.0, -0.25, 0.0],
        **streams,
    )


def stream(token_ids: list[int], loss_mask: list[bool]) -> TokenStream:
    """Sampled tokens have the log-prob -2."""
    return TokenStream(
        token_ids=token_ids,
        prompt_tokens=1,
        loss_mask=loss_mask,
        rollout_log_probs=[-2.0 * mask for mask in loss_mask],
        version_spans=[],
    )


def test_a_trajectory_is_packed_by_its_tokens():
    batch = pack(trajectory_items(trajectory(), 0.5), row_lengths=(4,), rows_multiple=1)
    assert batch.tokens.tolist() == [[5, 6, 7, 0]]
    assert batch.advantages.tolist() == [[0, 0.5, 0, 0]]
    assert batch.rollout_log_probs.tolist() == [[0, -0.25, 0, 0]]


def test_every_stream_in_which_something_was_sampled_is_packed_with_the_advantage():
    earlier = [
        stream([1, 2], [False, True]),
        stream([3, 4], [False, False]),
        stream([3, 4, 5], [False, False, True]),
    ]
    items = trajectory_items(trajectory(earlier_streams=earlier), 0.5)
    assert [item.token_ids for item in items] == [[1, 2], [3, 4, 5], [5, 6, 7]]
    batch = pack(items, row_lengths=(8,), rows_multiple=1)
    # The longest first: 3, 4, 5 and 5, 6, 7 and 1, 2.
    assert batch.tokens.tolist() == [[3, 4, 5, 5, 6, 7, 1, 2]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 3, 3]]
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0, 0.5, 0, 0, 0.5]]
    assert batch.rollout_log_probs.tolist() == [[0, 0, -2, 0, -0.25, 0, 0, -2]]
    assert batch.loss_tokens == 3


def test_a_trajectory_in_which_nothing_was_sampled_gives_no_items():
    silent = msgspec.structs.replace(trajectory(), loss_mask=[False] * 3)
    assert trajectory_items(silent, 1.0) == []


def test_untrained_items_keep_their_tokens_and_lose_their_loss():
    items = [item(3), PackItem([7, 8, 9], [False, True, True], 1.0, [0, -1, -1], trained=False)]
    batch = pack(items, row_lengths=(6,), rows_multiple=1)
    assert batch.tokens.tolist() == [[0, 1, 2, 7, 8, 9]]
    assert (batch.loss_mask * 1).tolist() == [[0, 1, 1, 0, 0, 0]]
    assert batch.rollout_log_probs.tolist() == [[0, -0.5, -0.5, 0, 0, 0]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 16), max_size=30),
    st.integers(1, 5),
)
def test_every_token_is_packed_once_and_comes_back(lengths, rows_multiple):
    items = [item(n, first=100 * i) for i, n in enumerate(lengths)]
    batch = pack(items, row_lengths=(16,), rows_multiple=rows_multiple)
    assert [ids.tolist() for ids in unpack(batch.tokens, batch)] == [i.token_ids for i in items]
    assert [p.tolist() for p in unpack(batch.positions, batch)] == [[*range(n)] for n in lengths]
    assert (batch.segment_ids != 0).sum() == sum(lengths)
    assert batch.tokens.shape[0] % rows_multiple == 0
    # First-fit never leaves two rows half empty.
    used = (batch.segment_ids != 0).sum(axis=1)
    assert sum(0 < n <= 8 for n in used) <= 1
    again = pack(items, row_lengths=(16,), rows_multiple=rows_multiple)
    for found, expected in zip(jax.tree.leaves(again), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_microbatches_are_cuts_of_the_batch():
    batch = pack([item(4, first=10 * i) for i in range(4)], row_lengths=(4,), rows_multiple=2)
    batch = batch.with_log_probs(old=np.full((4, 4), -1.0, np.float32))
    first, second = batch.microbatches(2)
    assert first.tokens[:, 0].tolist() == [0, 10]
    assert second.tokens[:, 0].tolist() == [20, 30]
    assert second.old_log_probs is not None
    assert second.old_log_probs.tolist() == [[-1.0] * 4] * 2
    assert first.ref_log_probs is None
    assert jax.tree.structure(first) == jax.tree.structure(second)
    with pytest.raises(
        ValueError, match=r"4 rows cannot be cut into microbatches of 3; pack with rows"
    ):
        batch.microbatches(3)


def test_log_probs_are_filled_in_one_after_the_other():
    batch = pack([item(4)], row_lengths=(4,), rows_multiple=1)
    old, ref = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    filled = batch.with_log_probs(old=old).with_log_probs(ref=ref)
    assert filled.old_log_probs is old
    assert filled.ref_log_probs is ref
    assert batch.old_log_probs is None


def test_a_trajectory_longer_than_every_row_is_refused():
    message = (
        r"a trajectory of 17 tokens fits no row: the longest of batch.row_lengths=\(8, 16\) is 16"
    )
    with pytest.raises(ValueError, match=message):
        pack([item(3), item(17)], row_lengths=(8, 16), rows_multiple=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (PackItem([], [], 1.0), r"item 1 has no tokens"),
        (
            PackItem([1, 2], [True, True], 1.0),
            r"item 1 has loss_mask\[0\] True, but nothing predicts",
        ),
        (PackItem([1, 2], [False], 1.0), r"item 1 has 2 token_ids but 1 loss_mask"),
        (
            PackItem([1], [False], 1.0, [0.0, 0.0]),
            r"item 1 has 1 token_ids but 2 rollout_log_probs",
        ),
    ],
)
def test_items_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        pack([item(2), wrong], row_lengths=(8,), rows_multiple=1)
