"""Batches of rows of several lengths: the loss and gradient of rows of one length, and few compilations."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from training_batch_cases import config, trajectory
from update_cases import gradient, model, new_items, new_updater

from tooljax.batch import PackedBatch, PackItem, packed, unpack_field, with_advantages
from tooljax.training_batch import make_batch, with_kl_in_reward

pytestmark = pytest.mark.usefixtures("quick_compilations")


def items() -> list[PackItem]:
    """Of 12, 4, 12, 12 and 8 tokens."""
    made = new_items((1, 2, 3, 4, 3))
    for i, length in ((1, 8), (4, 9)):
        made[i] = PackItem(
            made[i].token_ids[:length],
            [*made[i].loss_mask[: length - 1], True],
            made[i].advantage,
            [*(made[i].rollout_log_probs or ())[: length - 1], -2.0],
        )
    return made


def batch(*, mixed: bool, lengths=(12, 24), rows: int = 1):
    return packed(
        items(), row_lengths=lengths, rows_per_microbatch=rows, mixed_lengths=mixed, shards=rows
    )


def test_rows_of_several_lengths_give_the_update_of_rows_of_one():
    _, params = model()
    # 53 tokens: two rows of 24 and one of 12 hold them with less padding than three rows of 24.
    mixed, plain = batch(mixed=True), batch(mixed=False, lengths=(24,))
    assert isinstance(mixed, PackedBatch)
    assert [group.tokens.shape for group in mixed.groups] == [(2, 24), (1, 12)]
    assert mixed.padding_fraction < plain.padding_fraction
    assert mixed.loss_tokens == plain.loss_tokens
    updater = new_updater(kl_coef=0.5)
    both = []
    for each in (mixed, plain):
        ready = each.with_log_probs(
            old=updater.log_probs(params, each), ref=updater.log_probs(params, each)
        )
        ready = with_advantages(ready, [0.5, -1.0, 2.0, 0.25, -0.75])
        state, metrics = updater.update(updater.init(params), ready)
        both.append((metrics, gradient(updater, params, ready)))
    assert both[0][0] == pytest.approx(both[1][0], rel=1e-5, abs=1e-6)
    for name, expected in both[1][1].items():
        np.testing.assert_allclose(both[0][1][name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mixed", [True, False])
def test_advantages_are_laid_out_as_they_were_packed(mixed):
    made = batch(mixed=mixed, lengths=(12,))
    new = [np.arange(len(item.token_ids)) + 100.0 * i for i, item in enumerate(items())]
    for found, wanted in zip(
        unpack_field("advantages", with_advantages(made, new)), new, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_a_batch_without_loss_has_none_in_any_row():
    assert batch(mixed=True).without_loss().loss_tokens == 0


def test_compilations_are_counted_and_late_ones_told(caplog):
    _, params = model()
    updater = new_updater(learning_rate=0.02)
    state = updater.init(params)
    steps = [batch(mixed=True, lengths=lengths) for lengths in ((12,), (12,), (16,))]
    last = steps[-1].groups[0]
    counts = []
    with caplog.at_level(logging.WARNING, "tooljax"):
        for each in (*steps, replace(last, tokens=last.tokens.astype(np.int16))):
            state, _ = updater.update(state, each)
            counts.append(updater.compilations.since_last())
    # Zeros, the optimizer's step, and gradients of rows of 12; nothing; gradients of rows of 16; and these again for
    # tokens of another dtype.
    assert counts == [3, 0, 1, 1]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "1 programs of the update were compiled for microbatches not seen before: 1 x 16 (rows x tokens); fewer "
        "batch.row_lengths give fewer shapes",
        "1 programs of the update were compiled again, for microbatches seen before: 1 x 16 (rows x tokens); dtypes or "
        "placements have changed",
    ]


def test_a_step_of_trajectories_gets_the_same_advantages_in_rows_of_any_lengths():
    groups = [
        [trajectory(1.0, sampled=3), trajectory(0.0, sampled=1)],
        [trajectory(0.5, sampled=9, task=1), trajectory(0.0, sampled=2, task=1)],
    ]
    settings = config(scale_by_std=False, kl_in="reward", kl_loss_type="k1")
    mixed = replace(settings, batch=replace(settings.batch, mixed_lengths=True))
    found = []
    for each in (settings, mixed):
        made, metrics, _ = make_batch(each, groups)
        assert metrics["perf/loss_tokens"] == 15
        old = [np.where(part.loss_mask, np.float32(-0.5), np.float32(0)) for part in made.groups]
        ref = [np.where(part.loss_mask, part.tokens / -8, 0).astype("f4") for part in made.groups]
        if isinstance(made, PackedBatch):
            filled = made.with_log_probs(old=old, ref=ref)
        else:
            filled = made.with_log_probs(old=old[0], ref=ref[0])
        charged, kl = with_kl_in_reward(each, groups, filled, 0.5)
        found.append((kl, [part.tolist() for part in unpack_field("advantages", charged)]))
    # 13, 7 + 6 and 5 tokens
    assert [part.tokens.shape for part in made.groups] == [(2, 16), (1, 8)]
    assert found[0][1][0][3] > 0
    assert found[1] == found[0]
