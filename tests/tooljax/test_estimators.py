"""Advantages by verl's names: groups worked by hand, and verl's published formulas one trajectory after the other."""

from typing import Any

import numpy as np
import pytest

from tolerance import Tolerance
from tooljax.grpo.estimators import (
    decoupled_advantages,
    discounted_returns,
    estimated_advantages,
    turn_advantages,
    whitened,
)

EXACT = Tolerance(rtol=1e-6, atol=1e-6)


def estimated(kind, reward, *, valid=None, lengths=None, scale_by_std=True, baseline=None):
    reward = np.asarray(reward, np.float64)
    return estimated_advantages(
        kind,
        reward,
        valid=np.ones(reward.shape, bool) if valid is None else valid,
        lengths=np.ones(reward.shape, int) if lengths is None else np.asarray(lengths),
        scale_by_std=scale_by_std,
        baseline=baseline,
    )


def slow(kind, reward, lengths, *, scale_by_std, baseline) -> np.ndarray:
    """verl's formula of each name, float64."""
    out = np.zeros(reward.shape)
    alpha = reward.size / np.count_nonzero(reward)
    for i, group in enumerate(reward):
        n, mean, std = len(group), sum(group) / len(group), np.std(group, ddof=1)
        for j, s in enumerate(group):
            out[i, j] = {
                "grpo": (s - mean) / (std + 1e-6) if scale_by_std else s - mean,
                "grpo_vectorized": (s - mean) / (std + 1e-6) if scale_by_std else s - mean,
                "dr_grpo": s - mean,
                "rloo": s - (sum(group) - s) / (n - 1),
                "rloo_vectorized": s * n / (n - 1) - mean * n / (n - 1),
                "opo": s - sum(lengths[i] * group) / sum(lengths[i]),
                "gpg": alpha * (s - mean),
                "grpo_passk": 0.0,
                "reinforce_plus_plus_baseline": s - mean,
                "reinforce_plus_plus": s,
                "remax": s - baseline[i],
            }[kind]
        if kind == "grpo_passk":
            best, second = sorted(group)[:-3:-1]
            scale = std + 1e-6 if scale_by_std else 1.0
            out[i, list(group).index(best)] = (best - second) / scale
    return out


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        *("grpo", "grpo_vectorized", "dr_grpo", "rloo", "rloo_vectorized", "opo", "gpg"),
        *("grpo_passk", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "remax"),
    ],
)
def test_advantages_are_verls(kind, scale_by_std):
    rng = np.random.default_rng(7)
    reward = np.round(rng.normal(size=(12, 5)), 2).astype(np.float32).astype(np.float64)
    lengths, baseline = rng.integers(1, 60, (12, 5)), rng.normal(size=12)
    options: dict[str, Any] = {"scale_by_std": scale_by_std, "baseline": baseline}
    found = estimated(kind, reward, lengths=lengths, **options)
    np.testing.assert_allclose(found, slow(kind, reward, lengths, **options), **EXACT)


def test_a_group_worked_by_hand():
    reward, lengths = [[1.0, 0.0, 0.0, 1.0]], [[1, 2, 3, 4]]
    # rloo: 1 less the mean of the others (1/3); 0 less theirs (2/3)
    np.testing.assert_allclose(estimated("rloo", reward), [[2 / 3, -2 / 3, -2 / 3, 2 / 3]], **EXACT)
    # opo: the baseline is (1 + 4) / 10
    np.testing.assert_allclose(
        estimated("opo", reward, lengths=lengths), [[0.5, -0.5, -0.5, 0.5]], **EXACT
    )
    # gpg: two of four rewards are not 0, so alpha is 2
    np.testing.assert_allclose(estimated("gpg", reward), [[1, -1, -1, 1]], **EXACT)
    # remax: less the greedy trajectory's 0.25
    np.testing.assert_allclose(
        estimated("remax", reward, baseline=np.array([0.25])),
        [[0.75, -0.25, -0.25, 0.75]],
        **EXACT,
    )
    # grpo_passk: (3 - 1) over the standard deviation of 3, 1, 0, 0, which is sqrt(2)
    np.testing.assert_allclose(
        estimated("grpo_passk", [[3.0, 1.0, 0.0, 0.0]]),
        [[2 / (2**0.5 + 1e-6), 0, 0, 0]],
        **EXACT,
    )


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_what_cannot_be_trained_on_is_as_if_it_were_not_there(kind):
    valid = np.array([[True, False, True, True, False]] * 2)
    reward = np.array([[1.0, 9.0, 0.0, 0.5, -7.0], [0.2, np.nan, 0.7, 0.1, np.inf]])
    lengths = np.array([[3, 50, 2, 4, 70]] * 2)
    found = estimated(kind, reward, valid=valid, lengths=lengths)
    left = estimated(kind, reward[:, [0, 2, 3]], lengths=lengths[:, [0, 2, 3]])
    np.testing.assert_allclose(found[:, [0, 2, 3]], left, **EXACT)
    np.testing.assert_array_equal(found[:, [1, 4]], np.zeros((2, 2)))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_rewards_that_are_all_equal_teach_exactly_nothing(kind):
    found = estimated(kind, [[0.1 + 0.2, 0.3, 0.3], [2.0, 2.0, 2.0]], lengths=[[1, 2, 3]] * 2)
    np.testing.assert_array_equal(found, np.zeros((2, 3)))


def test_returns_are_discounted_once_a_sampled_token():
    # 1 at the last of three tokens: 1/4, 1/2, 1. A reward of -2 on the first counts there alone.
    np.testing.assert_array_equal(
        discounted_returns(np.array([0.0, 0, 1]), gamma=0.5), [0.25, 0.5, 1]
    )
    np.testing.assert_array_equal(
        discounted_returns(np.array([-2.0, 0, 1]), gamma=0.5), [-1.75, 0.5, 1]
    )


def test_whitening_gives_mean_0_and_variance_1():
    # Mean 2, variance (1 + 0 + 1) / 2 = 1
    np.testing.assert_allclose(whitened(np.array([1.0, 2, 3])), [-1, 0, 1], atol=1e-8)
    values = whitened(np.random.default_rng(0).normal(3, 5, 1000))
    np.testing.assert_allclose([values.mean(), values.var(ddof=1)], [0, 1], atol=1e-8)
    np.testing.assert_array_equal(whitened(np.array([4.0])), [0])


def test_each_of_several_rewards_is_compared_on_its_own():
    """One large reward would drown the small one if they were added first."""
    rewards = np.array([[[100.0, 0.0]], [[0.0, 0.01]]])
    found = decoupled_advantages(
        rewards, np.array([1.0, 0.5]), valid=np.ones((1, 2), bool), scale_by_std=True
    )
    # (r - mean) / std of two rewards is +-1/sqrt 2, but for the epsilon: 0.005 / (0.00707 + 1e-6) = 0.70701
    a, b = 50 / (50 * 2**0.5 + 1e-6), 0.005 / (0.005 * 2**0.5 + 1e-6)
    np.testing.assert_allclose(found, [[a - b / 2, b / 2 - a]], **EXACT)


def test_turn_rewards_compare_within_the_turn():
    np.testing.assert_allclose(
        turn_advantages(np.array([1.0, 0.0, 0.5]), scale_by_std=False), [0.5, -0.5, 0], **EXACT
    )
    np.testing.assert_array_equal(turn_advantages(np.array([3.0]), scale_by_std=True), [0])


def test_what_is_missing_or_unknown_is_told():
    with pytest.raises(ValueError, match="needs the reward of each prompt's greedy trajectory"):
        estimated("remax", [[1.0, 0.0]])
    with pytest.raises(ValueError, match=r"there is no estimator 'gae' of one reward"):
        estimated("gae", [[1.0, 0.0]])
