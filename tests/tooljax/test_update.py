"""The update on a tiny decoder: gradients, denominators, masks, skips and determinism."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import (
    changed,
    gradient,
    model,
    new_items,
    new_updater,
    slow_log_probs,
    slow_loss,
)

from rollout_sidecar.protocol import TokenStream, Trajectory
from tolerance import tol
from tooljax.batch import pack, trajectory_items, unpack


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_packed_rows_are_those_of_each_trajectory_alone(temperature):
    _, params = model()
    items = new_items()
    batch = pack(items, row_lengths=(32,), rows_multiple=2)
    updater = new_updater(temperature=temperature, rows_per_microbatch=2)
    packed = unpack(updater.log_probs(params, batch), batch)
    expected = slow_log_probs(params, items, temperature)
    np.testing.assert_allclose(np.stack(packed), expected, **tol(np.float32, reduced=64))


@pytest.mark.parametrize("with_ref", [False, True])
@pytest.mark.parametrize("with_old", [False, True])
def test_loss_and_metrics_are_those_of_a_slow_float64_loop(with_old, with_ref):
    _, params = model()
    items = new_items()
    batch = pack(items, row_lengths=(16,), rows_multiple=1)
    updater = new_updater(kl_coef=0.5 if with_ref else 0.0)
    now = slow_log_probs(params, items)
    # Shifts of up to 0.6 put some ratios beyond the clip bounds 0.8 and 1.3, on both sides.
    rng = np.random.default_rng(1)
    old = now + rng.uniform(-0.6, 0.6, now.shape)
    ref = now + rng.uniform(-1, 1, now.shape)
    filled = batch.with_log_probs(
        old=laid_out(old, batch) if with_old else None,
        ref=laid_out(ref, batch) if with_ref else None,
    )
    _, metrics = updater.update(updater.init(params), filled)
    old = old if with_old else now
    expected = slow_loss(now, items, old=old, ref=ref if with_ref else None, kl_coef=0.5)
    assert metrics["policy/loss"] == pytest.approx(expected, abs=1e-6)
    spots = [(i, t) for i, item in enumerate(items) for t in np.flatnonzero(item.loss_mask)]
    ratios = np.array([np.exp(now[i][t] - old[i][t]) for i, t in spots])
    signs = np.array([np.sign(items[i].advantage) for i, _ in spots])
    clipped = ((signs > 0) & (ratios > 1.3)) | ((signs < 0) & (ratios < 0.8))
    assert clipped.any() == with_old
    assert metrics["policy/clip_frac"] == pytest.approx(clipped.mean(), abs=1e-6)
    assert metrics["policy/ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)
    rollout = [np.asarray(item.rollout_log_probs) for item in items]
    d = np.array([old[i][t] - rollout[i][t] for i, t in spots])
    mismatch = np.minimum(np.exp(d) - 1 - d, 10)
    assert metrics["policy/kl_mismatch"] == pytest.approx(mismatch.mean(), rel=1e-5)
    if with_ref:
        d = np.array([ref[i][t] - now[i][t] for i, t in spots])
        assert metrics["policy/kl_ref"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-5)
    assert metrics["optim/skipped"] == 0
    assert ("policy/kl_ref" in metrics) == with_ref


def laid_out(values, batch) -> np.ndarray:
    """Per-item values in the batch's layout, 0 elsewhere."""
    out = np.zeros(batch.tokens.shape, np.float32)
    for value, (row, start, length) in zip(values, batch.placements, strict=True):
        out[row, start : start + length] = value
    return np.where(batch.loss_mask, out, np.float32(0))


@pytest.mark.parametrize("loss", ["grpo", "sft"])
def test_gradient_is_the_finite_difference_of_the_slow_loss(loss):
    _, params = model()
    items = new_items()
    batch = pack(items, row_lengths=(16,), rows_multiple=1)
    now = slow_log_probs(params, items)
    rng = np.random.default_rng(1)
    # Well inside the clip bounds, so that the loss is smooth along the step of the difference.
    old = now + rng.uniform(-0.1, 0.1, now.shape)
    ref = now + rng.uniform(-1, 1, now.shape)
    filled = batch.with_log_probs(old=laid_out(old, batch), ref=laid_out(ref, batch))
    found = gradient(new_updater(kl_coef=0.5), params, filled, loss)

    def value(shifted) -> float:
        logged = slow_log_probs(shifted, items)
        if loss == "sft":
            count = sum(sum(item.loss_mask) for item in items)
            return -logged.sum() / count
        return slow_loss(logged, items, old=old, ref=ref, kl_coef=0.5)

    # The directional derivative along random directions, one per weight array.
    step = 4e-3
    paths = jax.tree_util.tree_leaves_with_path(params)
    for index, (path, leaf) in enumerate(paths):
        direction = np.sign(rng.normal(size=leaf.shape)).astype(np.float32)

        def moved(scale: float, index=index, direction=direction):
            leaves, tree = jax.tree.flatten(params)
            leaves[index] = leaves[index] + jnp.asarray(scale * direction)
            return jax.tree.unflatten(tree, leaves)

        slope = (
            8 * (value(moved(step)) - value(moved(-step)))
            - (value(moved(2 * step)) - value(moved(-2 * step)))
        ) / (12 * step)
        name = jax.tree_util.keystr(path)
        # float32 hidden states leave about 1e-6 of noise in the loss: 3e-4 in a difference over 4e-3.
        assert np.vdot(found[name], direction) == pytest.approx(slope, rel=1e-3, abs=5e-4), name


@pytest.mark.parametrize("loss", ["grpo", "sft"])
def test_cutting_a_batch_into_microbatches_does_not_change_the_gradient(loss):
    _, params = model()
    # One trajectory a row: rows hold 1, 2, 3 and 4 loss tokens.
    batch = pack(new_items(), row_lengths=(16,), rows_multiple=4)
    batch = batch.with_log_probs(
        old=np.where(batch.loss_mask, np.float32(-2.9), np.float32(0)),
        ref=np.where(batch.loss_mask, np.float32(-2.5), np.float32(0)),
    )
    assert batch.loss_mask.sum(axis=1).tolist() == [1, 2, 3, 4]
    whole, single, pairs = (
        gradient(new_updater(rows_per_microbatch=n, kl_coef=0.5), params, batch, loss)
        for n in (4, 1, 2)
    )
    for name, expected in whole.items():
        assert np.abs(expected).max() > 1e-3, name
        np.testing.assert_allclose(single[name], expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(pairs[name], expected, rtol=0, atol=1e-6)


def test_packing_does_not_change_loss_or_gradient():
    _, params = model()
    packed = pack(new_items(), row_lengths=(48,), rows_multiple=1)
    alone = pack(new_items(), row_lengths=(16,), rows_multiple=1)
    assert (packed.tokens.shape, alone.tokens.shape) == ((1, 48), (4, 16))
    updater = new_updater()
    losses = [updater.update(updater.init(params), b)[1]["policy/loss"] for b in (packed, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    gradients = [gradient(updater, params, batch) for batch in (packed, alone)]
    for name, expected in gradients[1].items():
        np.testing.assert_allclose(gradients[0][name], expected, rtol=0, atol=1e-5)


def test_a_trajectory_of_two_streams_gives_the_loss_and_gradient_of_two_rows():
    _, params = model()
    one, two, other = new_items((3, 2, 4))
    one, two = replace(one, advantage=0.7), replace(two, advantage=0.7)

    def fields(item) -> dict:
        names = ("token_ids", "loss_mask", "rollout_log_probs")
        return {name: getattr(item, name) for name in names} | {"prompt_tokens": 5}

    forked = Trajectory(
        task_index=0,
        sample_index=0,
        task_id="t",
        seed=0,
        status="completed",
        earlier_streams=[TokenStream(**fields(one), version_spans=[])],
        **fields(two),
    )
    # Beside another trajectory in one row, or every stream in a row and microbatch of its own.
    packed = pack([other, *trajectory_items(forked, 0.7)], row_lengths=(48,), rows_multiple=1)
    apart = pack([one, two, other], row_lengths=(16,), rows_multiple=1)
    assert (packed.tokens.shape, apart.tokens.shape) == ((1, 48), (3, 16))
    updater = new_updater()
    losses = [updater.update(updater.init(params), b)[1]["policy/loss"] for b in (packed, apart)]
    expected = slow_loss(slow_log_probs(params, [one, two, other]), [one, two, other])
    assert losses == pytest.approx([expected, expected], abs=1e-6)
    gradients = [gradient(updater, params, batch) for batch in (packed, apart)]
    for name, value in gradients[1].items():
        assert np.abs(value).max() > 1e-3, name
        np.testing.assert_allclose(gradients[0][name], value, rtol=0, atol=1e-5)


def test_masked_tokens_and_padding_do_not_move_the_update():
    _, params = model()
    items = new_items()
    batch = pack(items, row_lengths=(16,), rows_multiple=1)
    noise = np.random.default_rng(3).normal(size=batch.tokens.shape).astype(np.float32)
    disturbed = replace(
        batch,
        tokens=np.where(batch.segment_ids == 0, np.int32(7), batch.tokens),
        advantages=np.where(batch.loss_mask, batch.advantages, noise),
        rollout_log_probs=np.where(batch.loss_mask, batch.rollout_log_probs, noise),
    )
    updater = new_updater()
    plain, plain_metrics = updater.update(updater.init(params), batch)
    plain = changed(plain)
    other, other_metrics = updater.update(updater.init(params), disturbed)
    assert plain_metrics == other_metrics
    for name, value in changed(other).items():
        np.testing.assert_array_equal(value, plain[name])


def test_untrained_items_are_out_of_numerator_and_denominator():
    _, params = model()
    items = new_items()
    updater = new_updater()
    without = pack(items[:2], row_lengths=(16,), rows_multiple=1)
    untrained = [replace(item, trained=False) for item in items[2:]]
    beside = pack([*items[:2], *untrained], row_lengths=(16,), rows_multiple=1)
    results = [updater.update(updater.init(params), b)[1] for b in (without, beside)]
    assert results[0] == results[1]


def test_two_runs_give_bit_identical_weights():
    _, params = model()
    runs = []
    for _ in range(2):
        updater = new_updater(kl_coef=0.5, rows_per_microbatch=2)
        state = updater.init(params)
        for seed in range(2):
            batch = pack(new_items(seed=seed), row_lengths=(16,), rows_multiple=2)
            now = updater.log_probs(updater.compute_params(state), batch)
            batch = batch.with_log_probs(old=now, ref=updater.log_probs(params, batch))
            state, _ = updater.update(state, batch)
        runs.append(changed(state))
    for name, value in runs[0].items():
        np.testing.assert_array_equal(value, runs[1][name])


def test_an_update_raises_the_probability_of_what_was_rewarded():
    _, params = model()
    items = [replace(item, advantage=1.0 - 2.0 * (i % 2)) for i, item in enumerate(new_items())]
    batch = pack(items, row_lengths=(16,), rows_multiple=1)
    updater = new_updater()
    state, metrics = updater.update(updater.init(params), batch)
    gained = updater.log_probs(state.params, batch) - updater.log_probs(params, batch)
    assert metrics["policy/ratio_max"] == 1
    assert metrics["policy/clip_frac"] == 0
    assert (gained * batch.advantages).sum() > 0.01


def test_old_log_probs_of_the_same_weights_give_the_gradient_of_none():
    _, params = model()
    batch = pack(new_items(), row_lengths=(16,), rows_multiple=1)
    updater = new_updater()
    cheap = gradient(updater, params, batch)
    exact = gradient(updater, params, batch.with_log_probs(old=updater.log_probs(params, batch)))
    for name, value in exact.items():
        np.testing.assert_allclose(cheap[name], value, **tol(np.float32, reduced=10, gradient=True))


def test_sft_loss_is_the_mean_negative_log_likelihood_at_temperature_one():
    _, params = model()
    items = [replace(item, advantage=5.0) for item in new_items()]
    batch = pack(items, row_lengths=(16,), rows_multiple=1)
    updater = new_updater(temperature=0.5)
    _, metrics = updater.update(updater.init(params), batch, loss="sft")
    # 1 + 2 + 3 + 4 = 10 loss tokens
    total = slow_log_probs(params, items).sum()
    assert metrics["policy/loss"] == pytest.approx(-total / 10, abs=1e-6)


@pytest.mark.parametrize("items", [[], new_items((0, 0))], ids=["no items", "no loss tokens"])
def test_a_batch_without_loss_tokens_is_skipped(items):
    _, params = model()
    updater = new_updater(kl_coef=0.5)
    batch = pack(items, row_lengths=(16,), rows_multiple=2)
    state, metrics = updater.update(updater.init(params), batch)
    assert metrics == {"optim/skipped": 1.0, "optim/learning_rate": pytest.approx(0.01)}
    assert int(state.step) == 1
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_gradient_that_is_not_finite_is_skipped_and_the_next_update_is_not():
    _, params = model()
    good = pack(new_items(), row_lengths=(16,), rows_multiple=1)
    bad = replace(good, advantages=np.where(good.loss_mask, np.float32(np.nan), good.advantages))
    updater = new_updater()
    state, metrics = updater.update(updater.init(params), bad)
    assert metrics["optim/skipped"] == 1
    assert not np.isfinite(metrics["policy/loss"])
    for leaf in jax.tree.leaves(state.opt_state):
        assert np.all(np.isfinite(leaf))
    after_bad, metrics = updater.update(state, good)
    assert metrics["optim/skipped"] == 0
    assert int(after_bad.step) == 2
    straight, _ = updater.update(updater.init(params), good)
    expected = changed(straight)
    for name, value in changed(after_bad).items():
        np.testing.assert_array_equal(value, expected[name])


def test_small_updates_are_not_lost_in_a_bfloat16_model():
    _, params = model("bfloat16")
    updater = new_updater(learning_rate=1e-6, dtype="bfloat16")
    batch = pack(new_items(), row_lengths=(16,), rows_multiple=1)
    state = updater.init(params)
    before = np.array(state.opt_state.master["final_norm"][...])
    for _ in range(2):
        state, _ = updater.update(state, batch)
    # Adam moves each weight by about the learning rate: far below a bfloat16's half step at 1.0, which is 2**-9.
    moved = np.abs(state.opt_state.master["final_norm"][...] - before)
    np.testing.assert_allclose(moved, 2e-6, rtol=0.1)
    for leaf, master in zip(
        *map(jax.tree.leaves, (state.params, state.opt_state.master)), strict=True
    ):
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, master.astype(jnp.bfloat16))
    assert updater.compute_params(state) is state.params


def test_init_leaves_the_given_weights_usable():
    _, params = model()
    updater = new_updater()
    batch = pack(new_items(), row_lengths=(16,), rows_multiple=1)
    before = updater.log_probs(params, batch)
    updater.update(updater.init(params), batch)
    np.testing.assert_array_equal(updater.log_probs(params, batch), before)


def test_a_missing_reference_is_refused():
    _, params = model()
    updater = new_updater(kl_coef=0.5)
    batch = pack(new_items(), row_lengths=(16,), rows_multiple=1)
    with pytest.raises(ValueError, match=r"kl_coef=0.5 needs the log-probs of the reference"):
        updater.update(updater.init(params), batch)


def test_more_microbatches_need_no_new_compilation():
    _, params = model()
    updater = new_updater()
    state = updater.init(params)
    compiled = []
    for count in (2, 4, 3):
        batch = pack(new_items((2,) * count), row_lengths=(16,), rows_multiple=1)
        state, _ = updater.update(state, batch)
        compiled.append(updater._accumulate["grpo"]._cache_size())
    assert compiled == compiled[:1] * 3
