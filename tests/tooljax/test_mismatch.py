"""Statistics of two sets of log-probs of the same tokens."""

import numpy as np
import pytest

from tooljax.grpo.mismatch import measure


def test_by_hand():
    # d = (0, ln 2): w = (1, 2); k3 = (0, 1 - ln 2); ESS = 3^2 / (2 * 5)
    found = measure(np.array([-1.0, -1.0]), np.array([-1.0, -1.0 - np.log(2)]))
    assert found.tokens == 2
    np.testing.assert_allclose(found.mean_kl, (1 - np.log(2)) / 2, rtol=1e-12)
    np.testing.assert_allclose(found.mean_difference, -np.log(2) / 2, rtol=1e-12)
    np.testing.assert_allclose(found.rms, np.log(2) / np.sqrt(2), rtol=1e-12)
    np.testing.assert_allclose(found.max_abs, np.log(2), rtol=1e-12)
    np.testing.assert_allclose(found.ess, 0.9, rtol=1e-12)
    assert (found.within_1pct, found.within_5pct) == (0.5, 0.5)


def test_shares_are_of_the_ratio():
    differences = np.log([0.9899, 0.9901, 1.0099, 1.0101, 1.0499, 1.0501])
    found = measure(np.full(6, -2.0) + differences, np.full(6, -2.0))
    assert (found.within_1pct, found.within_5pct) == (2 / 6, 5 / 6)


def test_the_estimate_is_the_kl_of_the_two_distributions():
    """Tokens drawn from p; KL(p || q) from the definition. 200,000 draws leave a standard error below 1 %."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(20))
    q = p * np.exp(0.2 * rng.standard_normal(20))
    q /= q.sum()
    drawn = rng.choice(20, 200_000, p=p)
    found = measure(np.log(q[drawn]), np.log(p[drawn]))
    exact = float(np.sum(p * np.log(p / q)))
    np.testing.assert_allclose(found.mean_kl, exact, rtol=0.03)
    np.testing.assert_allclose(found.mean_difference, exact, rtol=0.1)
    # var w = E[w^2] - 1, and ESS = 1 / E[w^2]
    np.testing.assert_allclose(found.ess, 1 / np.sum(q * q / p), rtol=0.03)


def test_what_is_not_finite_is_the_largest_difference():
    found = measure(np.array([np.nan, -np.inf, -1.0]), np.full(3, -1.0))
    assert found.max_abs == 20
    assert found.mean_kl > 5
    assert np.isfinite(list(found.metrics("gate").values())).all()


def test_without_tokens_there_is_nothing_to_say():
    with pytest.raises(ValueError, match="no sampled tokens to compare"):
        measure(np.zeros(0), np.zeros(0))
