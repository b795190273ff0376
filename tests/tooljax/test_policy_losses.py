"""The clipped surrogate: hand-worked tokens, a float64 loop, and where its gradient is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tolerance import tol
from tooljax.grpo.policy_losses import clipped_ratio_loss, importance_ratio

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def loss(log_probs, old, advantages, **clip):
    arrays = [jnp.asarray(x, jnp.float32) for x in (log_probs, old, advantages)]
    return clipped_ratio_loss(*arrays, **(clip or CLIP))


def test_tokens_worked_by_hand():
    # Ratios 2, 2, 1/2, 1/2 and 1, bounds 0.8 and 1.3:
    #   A = 1,  ratio 2:   -min(2, 1.3)           = -1.3, clipped
    #   A = -1, ratio 2:   -min(-2, -1.3)         = 2, not clipped: the policy must come back
    #   A = 1,  ratio 1/2: -min(0.5, 0.8)         = -0.5, not clipped
    #   A = -1, ratio 1/2: -min(-0.5, -0.8)       = 0.8, clipped
    #   A = 3,  ratio 1:   -3
    log_ratio = np.log([2, 2, 0.5, 0.5, 1])
    found, clipped = loss(log_ratio - 1.5, np.full(5, -1.5), [1, -1, 1, -1, 3])
    np.testing.assert_allclose(found, [-1.3, 2, -0.5, 0.8, -3], **tol(np.float32, reduced=4))
    assert clipped.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize(
    "clip", [CLIP, {"clip_low": 0.0, "clip_high": 0.0}, {"clip_low": 0.5, "clip_high": 2.0}]
)
def test_losses_are_those_of_a_slow_loop(clip):
    rng = np.random.default_rng(0)
    log_probs, old = -rng.uniform(0, 3, (2, 7, 11))
    advantages = rng.normal(size=(7, 11))
    found, clipped = loss(log_probs, old, advantages, **clip)
    for index in np.ndindex(7, 11):
        ratio = np.exp(log_probs[index] - old[index])
        bounded = min(max(ratio, 1 - clip["clip_low"]), 1 + clip["clip_high"])
        gains = ratio * advantages[index], bounded * advantages[index]
        assert found[index] == pytest.approx(-min(gains), rel=2e-6)
        assert clipped[index] == (gains[1] < gains[0])


def test_gradient_is_that_of_the_ratio_and_zero_where_clipped():
    log_ratio = np.log([2, 2, 0.5, 0.5, 1.1])
    advantages = np.array([1.0, -1, 1, -1, 3])

    def total(log_probs, old):
        return jnp.sum(loss(log_probs, old, advantages)[0])

    slopes = jax.grad(total, argnums=(0, 1))(jnp.asarray(log_ratio, jnp.float32), jnp.zeros(5))
    # d(-A ratio)/d log_prob = -A ratio; clipped tokens have none, and the old policy never has.
    np.testing.assert_allclose(slopes[0], [0, 2, -0.5, 0, -3.3], **tol(np.float32, gradient=True))
    np.testing.assert_array_equal(slopes[1], np.zeros(5))


def test_at_the_old_policy_the_gradient_is_the_policy_gradient():
    log_probs = jnp.array([-1.0, -2.0, -3.0])
    advantages = np.array([0.5, -1.5, 2.0], np.float32)
    slope = jax.grad(lambda lp: jnp.sum(loss(lp, log_probs, advantages)[0]))(log_probs)
    np.testing.assert_allclose(slope, -advantages, **tol(np.float32))


def test_absurd_log_ratios_stay_finite():
    log_ratio = jnp.array([1000.0, -1000.0, 20.0])
    np.testing.assert_allclose(
        importance_ratio(log_ratio, jnp.zeros(3)), np.exp([20.0, -20.0, 20.0]), rtol=1e-5
    )
    found, _ = loss(log_ratio, np.zeros(3), [-1.0, -1.0, -1.0])
    slope = jax.grad(lambda lp: jnp.sum(loss(lp, np.zeros(3), -np.ones(3))[0]))(log_ratio)
    assert np.isfinite(found).all()
    assert np.isfinite(slope).all()
