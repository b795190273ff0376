"""The token mean: one denominator for the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np

from tolerance import tol
from tooljax.grpo.aggregation import token_mean


def test_a_batch_worked_by_hand():
    values = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = jnp.array([[True, False, True], [False, True, False]])
    # (1 + 3 + 5) / 3
    assert token_mean(values, mask, jnp.float32(3)) == 3


def test_parts_add_up_to_the_whole_however_it_is_cut():
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(4, 9)), jnp.float32)
    # Rows of 1, 2, 3 and 4 tokens
    mask = jnp.asarray(np.arange(9)[None] < np.arange(1, 5)[:, None])
    whole = token_mean(values, mask, jnp.float32(10))
    slow = np.mean(np.asarray(values, np.float64)[np.asarray(mask)])
    np.testing.assert_allclose(whole, slow, **tol(np.float32, reduced=10))
    for rows in (1, 2):
        parts = [
            token_mean(values[i : i + rows], mask[i : i + rows], jnp.float32(10))
            for i in range(0, 4, rows)
        ]
        np.testing.assert_allclose(sum(parts), whole, **tol(np.float32, reduced=10))


def test_masked_values_do_not_count_whatever_they_are():
    mask = jnp.array([True, False, False, False])
    values = jnp.array([2.0, jnp.nan, jnp.inf, 1e38])
    value, slope = jax.value_and_grad(token_mean)(values, mask, jnp.float32(1))
    assert value == 2
    np.testing.assert_array_equal(slope, [1, 0, 0, 0])


def test_gradient_is_one_over_the_denominator():
    mask = jnp.array([True, True, False, True])
    slope = jax.grad(token_mean)(jnp.ones(4), mask, jnp.float32(12))
    np.testing.assert_allclose(slope, [1 / 12, 1 / 12, 0, 1 / 12], **tol(np.float32))


def test_no_tokens_give_zero():
    assert token_mean(jnp.ones(3), jnp.zeros(3, bool), jnp.float32(0)) == 0
