"""An update beyond the limits of the guard rails is left out on the device; limits that are kept change nothing."""

import math

import jax
import numpy as np
import pytest
from update_cases import changed, model, new_items, new_updater

from tooljax.batch import pack

FAR = {
    "policy/kl_mismatch": (-math.inf, 1e6),
    "policy/entropy": (-1.0, 1e6),
    "optim/grad_norm": (-math.inf, 1e6),
}


@pytest.fixture(scope="module")
def batch():
    return pack(new_items(), row_lengths=(16,), rows_multiple=1)


def updated(batch, limits):
    _, params = model()
    updater = new_updater()
    state, metrics = updater.update(updater.init(params), batch, limits=limits)
    moments = [np.array(leaf) for leaf in jax.tree.leaves(state.opt_state)]
    return state, changed(state), moments, without_cost(metrics)


def without_cost(metrics):
    """Without what was compiled or timed."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


@pytest.fixture(scope="module")
def plain(batch):
    return updated(batch, {})


def test_limits_that_are_kept_change_no_bit(batch, plain):
    _, weights, moments, metrics = updated(batch, FAR)
    assert metrics == plain[3]
    assert metrics["optim/skipped"] == 0
    for name, value in plain[1].items():
        np.testing.assert_array_equal(weights[name], value)
    for one, other in zip(moments, plain[2], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("metric", FAR)
@pytest.mark.parametrize("side", ["above", "below"])
def test_beyond_a_limit_weights_and_moments_stay(batch, plain, metric, side):
    value = plain[3][metric]
    bounds = (value + 0.01, 1e6) if side == "below" else (-math.inf, value - 0.01)
    state, weights, moments, metrics = updated(batch, FAR | {metric: bounds})
    assert metrics == plain[3] | {"optim/skipped": 1.0}
    first = changed(new_updater().init(model()[1]))
    for name, before in first.items():
        assert (plain[1][name] != before).any(), name
        np.testing.assert_array_equal(weights[name], before)
    # Adam's moments, and how often it was called, are those of no update; the schedule's count goes on.
    for leaf in moments:
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    assert int(state.step) == 1


def test_the_update_after_one_that_was_left_out_is_the_first(batch, plain):
    _, params = model()
    updater = new_updater()
    state, _ = updater.update(
        updater.init(params), batch, limits={"optim/grad_norm": (-math.inf, 1e-9)}
    )
    state, metrics = updater.update(state, batch)
    assert without_cost(metrics) == plain[3]
    for name, value in changed(state).items():
        np.testing.assert_array_equal(value, plain[1][name])
