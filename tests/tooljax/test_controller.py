"""The adaptive weight of the KL term: verl's rule, step after step."""

import math

import pytest

from tooljax.grpo.controller import KlController


def test_the_weight_is_steered_as_in_verl():
    control = KlController(0.01, target=0.1, horizon=1000.0)
    # KL at 1.1 x the target: error 0.1, times 64 / 1000
    control.steer(0.11, 64)
    assert control.coef == pytest.approx(0.01 * (1 + 0.1 * 0.064))
    # Far above and far below, errors are bounded to +-0.2.
    before = control.coef
    control.steer(5.0, 64)
    assert control.coef == pytest.approx(before * (1 + 0.2 * 0.064))
    before = control.coef
    control.steer(-3.0, 64)
    assert control.coef == pytest.approx(before * (1 - 0.2 * 0.064))


def test_without_a_target_it_is_fixed():
    control = KlController(0.01)
    control.steer(5.0, 64)
    assert control.coef == 0.01


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_what_is_not_a_number_steers_nowhere(kl):
    control = KlController(0.01, target=0.1)
    control.steer(kl, 64)
    assert control.coef == 0.01


def test_a_checkpoint_keeps_the_steered_weight_and_not_a_fixed_one():
    control = KlController(0.01, target=0.1)
    control.steer(5.0, 64)
    resumed = KlController(0.01, target=0.1)
    resumed.restore(control.state())
    assert resumed.coef == control.coef != 0.01
    changed = KlController(0.02)
    changed.restore(control.state())
    assert changed.coef == 0.02
