"""Intervals against hand-worked values and brute force."""

import itertools

import numpy as np
import pytest

from tooljax.intervals import paired_bootstrap, wilson


def test_wilson_by_hand():
    # 8 of 10, z = 1.959964, z² = 3.841459:
    # centre (0.8 + 0.192073) / 1.384146 = 0.716740
    # half   1.959964 / 1.384146 * sqrt(0.016 + 3.841459 / 400) = 1.416010 * sqrt(0.025603648) = 0.226577
    result = wilson(8, 10)
    assert result.low == pytest.approx(0.490162, abs=2e-6)
    assert result.high == pytest.approx(0.943318, abs=2e-6)


def test_wilson_at_the_ends():
    # 0 of n: [0, z² / (n + z²)]
    assert wilson(0, 10) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((1 - 3.841459 / 13.841459, 1.0), abs=1e-6)


def test_wilson_bounds_are_where_the_score_test_rejects():
    # The definition: |rate - p| = z * sqrt(p (1 - p) / n) at both bounds.
    z = 1.6448536269514722
    result = wilson(37, 200, confidence=0.9)
    for p in (result.low, result.high):
        assert abs(0.185 - p) == pytest.approx(z * (p * (1 - p) / 200) ** 0.5, rel=1e-9)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_what_is_no_rate(successes, n):
    with pytest.raises(ValueError, match=f"{successes} successes of {n} is not a rate"):
        wilson(successes, n)


def test_confidence_must_be_a_probability():
    with pytest.raises(ValueError, match="confidence=95 must be between 0 and 1"):
        wilson(1, 2, confidence=95)


def test_bootstrap_matches_all_resamplings_of_a_small_case():
    a, b = [0, 0, 1, 1, 0], [1, 0, 1, 1, 1]
    differences = np.subtract(b, a)
    every = [differences[list(picks)].mean() for picks in itertools.product(range(5), repeat=5)]
    result = paired_bootstrap(a, b, seed=0, n=50_000)
    assert result == pytest.approx(np.quantile(every, [0.025, 0.975]), abs=1e-12)


def test_bootstrap_keeps_the_pairing():
    # b is better by exactly 0.1 on every problem, however different the problems are.
    a = np.random.default_rng(0).normal(size=50)
    assert paired_bootstrap(list(a), list(a + 0.1), seed=1) == pytest.approx((0.1, 0.1))


def test_bootstrap_width_is_that_of_the_normal_approximation():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 2000))
    error = (b - a).std() / 2000**0.5
    result = paired_bootstrap(list(a), list(b), seed=0, n=4000)
    # 4000 resamplings place a 2.5 % quantile to about 3 % of the half-width.
    assert (result.high - result.low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_bootstrap_repeats_with_its_seed():
    a, b = [0.0, 1.0, 0.5, 0.2], [1.0, 0.0, 0.7, 0.9]
    assert paired_bootstrap(a, b, seed=5) == paired_bootstrap(a, b, seed=5)


def test_bootstrap_needs_pairs():
    with pytest.raises(ValueError, match="a has 1 scores and b has 2"):
        paired_bootstrap([1.0], [1.0, 2.0], seed=0)
