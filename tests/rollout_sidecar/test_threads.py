"""Threads get Python sooner while weights are worked on, and not afterwards."""

import sys

import pytest

from rollout_sidecar.threads import SWITCH_S, brisk, in_threads


def test_blocks_may_overlap_and_the_last_one_puts_back_what_was():
    usual = sys.getswitchinterval()
    first, second = brisk(), brisk()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_one_that_fails_puts_back_what_was():
    usual = sys.getswitchinterval()
    with pytest.raises(ValueError, match="no 3"), brisk():
        in_threads(_not_three, range(5))
    assert sys.getswitchinterval() == pytest.approx(usual)


def _not_three(number):
    if number == 3:
        raise ValueError("no 3")
