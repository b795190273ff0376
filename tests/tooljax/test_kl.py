"""KL estimates: hand-worked tokens, the exact KL of a small distribution, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tolerance import tol
from tooljax.grpo.kl import k1, k2, k3


def test_tokens_worked_by_hand():
    # p = 1/2 under the policy; 1/4, 1/2 and 1 under the reference, so d = -ln 2, 0 and ln 2.
    policy, reference = jnp.log(jnp.full(3, 0.5)), jnp.log(jnp.array([0.25, 0.5, 1.0]))
    ln2 = np.log(2)
    close = tol(np.float32, reduced=4)
    np.testing.assert_allclose(k1(policy, reference), [ln2, 0, -ln2], **close)
    np.testing.assert_allclose(k2(policy, reference), [ln2**2 / 2, 0, ln2**2 / 2], **close)
    # 1/2 - 1 + ln 2, 0 and 2 - 1 - ln 2
    np.testing.assert_allclose(k3(policy, reference), [ln2 - 0.5, 0, 1 - ln2], **close)


@pytest.mark.parametrize("estimate", [k1, k3])
def test_the_expected_value_is_the_kl(estimate):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    exact = np.sum(p * np.log(p / q))
    values = estimate(jnp.log(jnp.asarray(p, jnp.float32)), jnp.log(jnp.asarray(q, jnp.float32)))
    assert np.sum(p * np.asarray(values)) == pytest.approx(exact, rel=1e-5)


def test_k3_is_exact_where_the_policies_nearly_agree():
    # exp(d) - 1 - d is d^2/2 + d^3/6: 5e-9 at 1e-4, which exp(d) - 1 would drown in rounding of 6e-8.
    policy = jnp.zeros(2)
    reference = jnp.array([1e-3, -1e-4])
    np.testing.assert_allclose(k3(policy, reference), [5.0016671e-7, 4.9998333e-9], rtol=2e-2)


def test_k3_is_never_negative_and_at_most_ten():
    d = np.concatenate([np.linspace(-50, 50, 1001), [-1e4, 1e4]]).astype(np.float32)
    values = np.asarray(k3(jnp.zeros(d.shape), jnp.asarray(d)))
    assert values.min() >= 0
    assert values.max() == 10
    slow = np.minimum(np.exp(np.clip(d.astype(np.float64), -20, 20)) - 1 - np.clip(d, -20, 20), 10)
    np.testing.assert_allclose(values, slow, **tol(np.float32, reduced=16))


def test_gradients_are_those_of_the_formulas():
    policy = jnp.array([-1.0, -2.0, -0.5])
    reference = jnp.array([-1.5, -1.2, -0.5])
    d = np.asarray(reference - policy, np.float64)
    for estimate, slope in [(k1, np.ones(3)), (k2, -d), (k3, 1 - np.exp(d))]:
        found = jax.grad(lambda lp, f=estimate: jnp.sum(f(lp, reference)))(policy)
        np.testing.assert_allclose(found, slope, **tol(np.float32, gradient=True))


def test_the_expected_gradient_of_k3_pulls_to_the_reference():
    # Minimising the token mean of k3 over samples of p must raise p where the reference is higher.
    logits = jnp.array([0.3, -0.1, 0.2])
    reference = jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.0]))

    def value(logits):
        log_probs = jax.nn.log_softmax(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_probs)) * k3(log_probs, reference))

    assert np.argmin(jax.grad(value)(logits)) == 1
