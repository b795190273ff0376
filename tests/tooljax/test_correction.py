"""Off-policy correction: importance weights and rejection, token after token in float64, and what they do to a loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tolerance import Tolerance
from tooljax.batch import PackItem, TrainBatch, pack, unpack
from tooljax.grpo.correction import (
    accepted,
    correction_metrics,
    importance_weights,
    weight_metrics,
)
from tooljax.grpo.policy_losses import PolicyLoss
from tooljax.grpo.preparation import Correction, Preparation, Rejection
from tooljax.objective import GrpoObjective
from tooljax.sampled import Sampled

EXACT = Tolerance(rtol=1e-6, atol=1e-6)
SEQUENCE = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
RATIOS = [np.flatnonzero(SEQUENCE == i) for i in range(4)]


def draw(seed=0, spread=0.8) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-spread, spread, SEQUENCE.size)


def slow_weights(r, level, low, high, normalize) -> np.ndarray:
    out = np.zeros(r.shape)
    for tokens in RATIOS:
        for t in tokens:
            ratio = np.exp(r[t] if level == "token" else sum(r[s] for s in tokens))
            inside = low <= ratio <= high
            out[t] = (ratio if inside else 0.0) if low > 0 else min(ratio, high)
    if not normalize:
        return out
    if level == "token":
        return out / out.mean()
    return out / np.mean([out[tokens[0]] for tokens in RATIOS])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("low", [0.0, 0.7])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(level, low, normalize):
    r = draw()
    found = importance_weights(r, SEQUENCE, level=level, low=low, high=1.4, normalize=normalize)
    expected = slow_weights(r, level, low, 1.4, normalize)
    assert len(set(expected.round(6))) >= 2
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_weights_worked_by_hand():
    r = np.log([0.5, 1.0, 4.0])
    one = np.zeros(3, int)
    truncated = importance_weights(r, one, level="token", low=0.0, high=2.0)
    np.testing.assert_allclose(truncated, [0.5, 1, 2])
    icepop = importance_weights(r, one, level="token", low=0.6, high=5.0)
    np.testing.assert_allclose(icepop, [0, 1, 4])
    # 0.5 x 1 x 4 = 2, for each of its tokens
    whole = importance_weights(r, one, level="sequence", low=0.0, high=3.0)
    np.testing.assert_allclose(whole, [2, 2, 2])
    # Two of three are at the bound or 0; the effective sample size is 5^2 / (3 (0 + 1 + 16))
    found = weight_metrics(icepop, high=4.0)
    assert found["policy/is_weight/truncated_frac"] == pytest.approx(2 / 3)
    assert found["policy/is_weight/ess"] == pytest.approx(25 / 51)
    assert found["policy/is_weight/mean"] == pytest.approx(5 / 3)
    assert found["policy/is_weight/max"] == pytest.approx(4)


def test_absurd_ratios_weigh_at_most_the_bound_and_stay_finite():
    weights = importance_weights(
        np.array([900.0, -900.0]), np.array([0, 1]), level="sequence", low=0.0, high=2.0
    )
    np.testing.assert_allclose(weights, [2, np.exp(-20)])


ESTIMATES = {
    "k1": lambda r: -r,
    "k2": lambda r: r * r / 2,
    "k3": lambda r: np.exp(r) - 1 - r,
}
OVER = {
    "token": None,
    "seq_sum": sum,
    "seq_mean": lambda values: sum(values) / len(values),
    "seq_max": max,
}


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("over", OVER)
def test_rejection(over, estimate):
    r = draw(seed=2)
    values = np.array([ESTIMATES[estimate](x) for x in r])
    combine = OVER[over]
    if combine is not None:
        values = np.concatenate([[combine(list(values[t]))] * len(t) for t in RATIOS])
    # Between two of the values, so that there are some on either side.
    first, second, *_, third, last = np.unique(values)
    low, high = (first + second) / 2, (third + last) / 2
    if estimate == "k1":
        low, high = np.exp(low), np.exp(high)
        expected = (values > first) & (values < last)
    else:
        expected = values < last
    assert 0 < expected.sum() < expected.size
    found = accepted(r, SEQUENCE, kind=f"{over}_{estimate}", low=low, high=high)
    np.testing.assert_array_equal(found, expected)


def test_mismatch_metrics_are_those_of_loops():
    rng = np.random.default_rng(1)
    now, rollout = -rng.uniform(0.2, 2, (2, SEQUENCE.size))
    found = correction_metrics(now, rollout, SEQUENCE)
    r = now - rollout
    of_sequences = {
        "chi2_seq": np.mean([np.exp(2 * r[t].sum()) for t in RATIOS]) - 1,
        "training_ppl": np.mean([np.exp(-now[t].mean()) for t in RATIOS]),
        "rollout_ppl": np.mean([np.exp(-rollout[t].mean()) for t in RATIOS]),
    }
    expected = of_sequences | {
        "kl": -r.mean(),
        "k3_kl": np.mean(np.exp(r) - 1 - r),
        "chi2_token": np.mean(np.exp(2 * r)) - 1,
    }
    assert found == pytest.approx({f"policy/mismatch/{k}": v for k, v in expected.items()})
    assert correction_metrics(now[:0], rollout[:0], SEQUENCE[:0]) == {}


# --- in the loss --------------------------------------------------------------------------------------------------

LENGTHS = (3, 2, 1, 4)
ADVANTAGES = np.array([0.5, -1.0, 2.0, -0.25])


def make_batch(old: np.ndarray | None, rollout: np.ndarray) -> TrainBatch:
    items = [
        PackItem([1, *[2] * n], [False, *[True] * n], a, [0.0, *rollout[t]])
        for n, a, t in zip(LENGTHS, ADVANTAGES, RATIOS, strict=True)
    ]
    batch = pack(items, row_lengths=(32,), rows_multiple=1)
    return batch if old is None else batch.with_log_probs(old=laid(old, batch))


def laid(values: np.ndarray, batch: TrainBatch) -> np.ndarray:
    out = np.zeros(batch.tokens.shape, np.float32)
    for t, (row, start, length) in zip(RATIOS, batch.placements, strict=True):
        out[row, start + 1 : start + length] = values[t]
    return out


def objective(mode="vanilla", **correction) -> GrpoObjective:
    policy = PolicyLoss(mode, clip_low=0.2, clip_high=0.3)
    return GrpoObjective(Preparation(policy, correction=Correction(**correction)), kl_coef=0.0)


def loss_and_slope(objective, batch, now):
    prepared, metrics = objective.prepare(batch, lambda _: laid(now, batch))
    placed, count = jax.device_put(prepared), jnp.float32(prepared.loss_tokens)

    def loss(log_probs):
        sampled = Sampled(log_probs, jnp.zeros_like(log_probs))
        return objective(sampled, placed, count, temperature=1.0, remat="none")[0]

    value, slope = jax.value_and_grad(loss)(jnp.asarray(laid(now, batch)))
    return float(value), np.concatenate([cut[1:] for cut in unpack(slope, batch)]), metrics


def log_probs(seed, spread):
    rng = np.random.default_rng(seed)
    now = -rng.uniform(0.5, 2, SEQUENCE.size)
    return now, *(now + rng.uniform(-spread, spread, SEQUENCE.size) for _ in range(2))


def surrogate(now, old) -> tuple[np.ndarray, np.ndarray]:
    """The clipped loss of each token, and its derivative."""
    a = ADVANTAGES[SEQUENCE]
    ratio = np.exp(now - old)
    bounded = np.clip(ratio, 0.8, 1.3)
    loss = np.maximum(-a * ratio, -a * bounded)
    return loss, np.where(-a * bounded > -a * ratio, 0.0, -a * ratio)


@pytest.mark.parametrize(
    ("level", "low"), [("token", 0.0), ("sequence", 0.0), ("token", 0.7), ("sequence", 0.7)]
)
def test_decoupled_the_ratio_is_the_trainers_and_the_weight_is_the_engines(level, low):
    """Three log-probs: now / old in the clip, old / rollout in the weight, which is a constant."""
    now, old, rollout = log_probs(0, 0.5)
    how: dict[str, Any] = {"level": level, "low": low, "high": 1.2}
    value, slope, metrics = loss_and_slope(objective(**how), make_batch(old, rollout), now)
    weights = slow_weights(old - rollout, level, low, 1.2, False)
    loss, derivative = surrogate(now, old)
    assert value == pytest.approx((weights * loss).mean(), abs=1e-6)
    np.testing.assert_allclose(slope, weights * derivative / SEQUENCE.size, **EXACT)
    assert metrics["policy/is_weight/max"] == pytest.approx(weights.max(), rel=1e-6)


def test_before_the_first_update_the_current_policy_is_the_old_one():
    now, _, rollout = log_probs(4, 0.5)
    how: dict[str, Any] = {"level": "token", "high": 1.2}
    value, slope, _ = loss_and_slope(objective(**how), make_batch(None, rollout), now)
    weights = slow_weights(now - rollout, "token", 0.0, 1.2, False)
    a = ADVANTAGES[SEQUENCE]
    assert value == pytest.approx(-(weights * a).mean(), abs=1e-6)
    np.testing.assert_allclose(slope, -weights * a / SEQUENCE.size, **EXACT)


def test_bypass_takes_the_engines_log_probs_for_the_old_ones():
    now, old, rollout = log_probs(1, 0.5)
    how: dict[str, Any] = {"bypass": True}
    found = loss_and_slope(objective(**how), make_batch(old, rollout), now)
    loss, derivative = surrogate(now, rollout)
    assert found[0] == pytest.approx(loss.mean(), abs=1e-6)
    np.testing.assert_allclose(found[1], derivative / SEQUENCE.size, **EXACT)


@pytest.mark.parametrize("bypass", [False, True])
def test_the_mismatch_is_between_engine_and_trainer_whoever_is_in_the_ratio(bypass):
    now, old, rollout = log_probs(1, 0.5)
    how = objective(bypass=bypass)
    batch = make_batch(old, rollout)
    prepared = jax.device_put(how.prepare(batch, lambda _: laid(now, batch))[0])
    sampled = Sampled(jnp.asarray(laid(now, batch)), jnp.zeros(batch.tokens.shape))
    means = how(sampled, prepared, jnp.float32(10), temperature=1.0, remat="none")[1]
    d = (now if bypass else old) - rollout
    assert float(means["policy/kl_mismatch"]) == pytest.approx((np.exp(d) - 1 - d).mean(), abs=1e-6)


def test_bypass_with_a_plain_policy_gradient_weighs_by_the_current_policy():
    """verl's bypass_mode with loss_type=reinforce."""
    now, old, rollout = log_probs(1, 0.5)
    how: dict[str, Any] = {"bypass": True, "level": "sequence", "high": 1.5}
    found = loss_and_slope(objective("gpg", **how), make_batch(old, rollout), now)
    weights = slow_weights(now - rollout, "sequence", 0.0, 1.5, False)
    a = ADVANTAGES[SEQUENCE]
    assert found[0] == pytest.approx(-(weights * a * now).mean(), abs=1e-6)
    np.testing.assert_allclose(found[1], -weights * a / SEQUENCE.size, **EXACT)


@pytest.mark.parametrize("bypass", [False, True])
def test_what_is_rejected_leaves_loss_gradient_and_denominator(bypass):
    now, old, rollout = log_probs(3, 0.8)
    bounds = (Rejection("token_k2", 0.0, 0.05), Rejection("seq_mean_k1", 0.75, 4 / 3))
    how: dict[str, Any] = {"bypass": bypass, "rejections": bounds}
    value, slope, metrics = loss_and_slope(objective(**how), make_batch(old, rollout), now)
    r = (now if bypass else old) - rollout
    means = np.concatenate([[-r[t].mean()] * len(t) for t in RATIOS])
    kept = (r * r / 2 <= 0.05) & (np.abs(means) <= np.log(4 / 3))
    assert 2 <= kept.sum() < 10
    loss, derivative = surrogate(now, rollout if bypass else old)
    assert value == pytest.approx(loss[kept].mean(), abs=1e-6)
    np.testing.assert_allclose(slope, np.where(kept, derivative, 0) / kept.sum(), **EXACT)
    assert metrics["policy/rejected_frac"] == pytest.approx(1 - kept.mean())


def test_a_batch_that_is_rejected_whole_has_no_loss_tokens():
    now, old, rollout = log_probs(3, 0.8)
    how = objective(rejections=(Rejection("seq_max_k2", 0.0, 1e-9),))
    batch, metrics = how.prepare(make_batch(old, rollout), lambda _: None)
    assert batch.loss_tokens == 0
    assert metrics["policy/rejected_frac"] == 1


def test_a_trajectory_of_two_streams_is_one_sequence():
    """Its weight is the product over both, wherever they are packed."""
    r = np.log([1.1, 1.2, 1.05])
    items = [
        PackItem([1, 2, 2], [False, True, True], 1.0, [0.0, -1.0, -1.0], sequence=0),
        PackItem([1, 2], [False, True], 1.0, [0.0, -1.0], sequence=0),
    ]
    batch = pack(items, row_lengths=(3,), rows_multiple=1)
    old = np.where(batch.loss_mask, np.float32(-1), np.float32(0))
    spots = [tuple(spot) for row, start, n in batch.placements for spot in _spots(row, start, n)]
    for spot, value in zip(spots, r, strict=True):
        old[spot] += np.float32(value)
    batch = dataclasses.replace(batch, old_log_probs=old)
    prepared, _ = objective(level="sequence", high=9.0).prepare(batch, lambda _: old)
    weights = [prepared.token_values["weight"][spot] for spot in spots]
    np.testing.assert_allclose(weights, [1.1 * 1.2 * 1.05 / 3] * 3, rtol=1e-6)


def _spots(row: int, start: int, length: int) -> list[tuple[int, int]]:
    return [(row, t) for t in range(start + 1, start + length)]
