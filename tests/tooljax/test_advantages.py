"""Group relative advantages against hand-worked groups and a float64 loop."""

import jax
import numpy as np
import pytest

from tolerance import tol
from tooljax.grpo.advantages import group_advantages, zero_variance


def rewards(*groups) -> np.ndarray:
    return np.array(groups, np.float32)


def slow_advantages(reward, valid, *, scale_by_std: bool) -> np.ndarray:
    """One group, and one member, after the other; float64."""
    out = np.zeros(reward.shape)
    for i, (group, mask) in enumerate(zip(reward.astype(np.float64), valid, strict=True)):
        members = group[mask]
        if len(members) < 2 or np.ptp(members) <= 1e-6:
            continue
        scale = members.std(ddof=1) + 1e-6 if scale_by_std else 1.0
        out[i, mask] = (members - members.mean()) / scale
    return out


def test_groups_worked_by_hand():
    reward = rewards([1, 0, 0, 1], [3, 1, 1, 1])
    # Means 0.5 and 1.5.
    np.testing.assert_allclose(
        group_advantages(reward, scale_by_std=False),
        [[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]],
        **tol(np.float32),
    )
    # Variances (n - 1): 4 x 0.25 / 3 = 1/3 and (2.25 + 0.75) / 3 = 1, so divided by 0.577350 and 1, plus 1e-6.
    a, b = 0.5 / (3**-0.5 + 1e-6), 1 / (1 + 1e-6)
    np.testing.assert_allclose(
        group_advantages(reward, scale_by_std=True),
        [[a, -a, -a, a], [1.5 * b, -0.5 * b, -0.5 * b, -0.5 * b]],
        **tol(np.float32, reduced=4),
    )


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_advantages_are_those_of_a_slow_loop(size, scale_by_std):
    rng = np.random.default_rng(size)
    reward = rng.normal(size=(20, size)).astype(np.float32)
    valid = rng.random((20, size)) < 0.7
    found = group_advantages(reward, scale_by_std=scale_by_std, valid=valid)
    expected = slow_advantages(reward, valid, scale_by_std=scale_by_std)
    np.testing.assert_allclose(found, expected, **tol(np.float32, reduced=10 * size))
    assert found.dtype == np.float32


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_groups_without_variance_get_exactly_zero(scale_by_std):
    # 0.1 + 0.2 is 0.30000000000000004: the last groups differ by rounding only.
    reward = np.array(
        [
            [0, 0, 0, 0],
            [1, 1, 1, 1],
            [0.1 + 0.2, 0.3, 0.1 + 0.2, 0.3],
            [1e6, 1e6, 1e6 + 0.0625, 1e6],
        ]
    )
    noisy = np.float32(0.3) + np.array([[0, 1, 2, -1]], np.float32) * np.float32(3e-8)
    reward = np.concatenate([reward, noisy]).astype(np.float32)
    assert len(set(reward[3].tolist())) == 2
    assert len(set(noisy[0].tolist())) == 4
    found = group_advantages(reward, scale_by_std=scale_by_std)
    np.testing.assert_array_equal(found, np.zeros((5, 4)))
    assert zero_variance(reward).tolist() == [True] * 5


def test_float64_rewards_that_differ_by_rounding_are_flagged():
    reward = np.array([[0.1 + 0.2] * 4 + [0.3] * 4])
    assert len(set(reward[0].tolist())) == 2
    assert zero_variance(reward).tolist() == [True]
    np.testing.assert_array_equal(group_advantages(reward, scale_by_std=True), np.zeros((1, 8)))


def test_small_true_differences_are_kept():
    reward = rewards([0.001, 0, 0, 0], [1, 1, 1, 1], [-1, -1, -1.001, -1])
    assert zero_variance(reward).tolist() == [False, True, False]
    found = np.asarray(group_advantages(reward, scale_by_std=True))
    # 0.001 - 0.00025 over 0.0005 + 1e-6
    assert found[0, 0] == pytest.approx(0.00075 / 0.000501, rel=1e-4)


def test_statistics_leave_out_members_that_are_not_valid():
    reward = rewards([1, 0, 100, 0], [5, 9, 9, 9], [1, 0, 0, 0], [7, 7, 3, 7])
    valid = np.array([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]], bool)
    found = group_advantages(reward, scale_by_std=False, valid=valid)
    # (1, 0, 0): mean 1/3. A group of one, of none, and of equals: nothing to learn.
    np.testing.assert_allclose(
        found,
        [[2 / 3, -1 / 3, 0, -1 / 3], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        **tol(np.float32),
    )
    assert zero_variance(reward, valid=valid).tolist() == [False, True, True, True]


def test_rewards_of_invalid_members_may_be_anything():
    valid = np.array([[True, True, False]])
    for anything in (np.nan, np.inf, -1e30):
        reward = rewards([1, 0, anything])
        found = group_advantages(reward, scale_by_std=False, valid=valid)
        np.testing.assert_array_equal(found, [[0.5, -0.5, 0]])
        assert zero_variance(reward, valid=valid).tolist() == [False]


def test_order_shift_and_scale_of_rewards_do_not_matter():
    reward = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    base = np.asarray(group_advantages(reward, scale_by_std=True))
    close = tol(np.float32, reduced=80)
    np.testing.assert_allclose(
        group_advantages(reward[:, ::-1], scale_by_std=True), base[:, ::-1], **close
    )
    np.testing.assert_allclose(
        group_advantages(reward * 8 + 4, scale_by_std=True), base, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(base.sum(axis=1), np.zeros(6), atol=5e-6)


def test_no_nan_in_gradients_of_groups_without_variance():
    reward = rewards([1, 1, 1], [1, 0, 0])
    slope = jax.grad(lambda r: (group_advantages(r, scale_by_std=False) * r).sum())(
        jax.numpy.asarray(reward)
    )
    assert np.isfinite(slope).all()
