"""Trajectories whose tools fail in every way: all end as they should, and nothing is left.

TOOLJAX_CHAOS_TRAJECTORIES=1000 plays as many as `python benchmarks/tool_chaos.py` does.
"""

import logging
import os

import pytest

from benchmarks.tool_chaos import chaos

COUNT = int(os.environ.get("TOOLJAX_CHAOS_TRAJECTORIES", "80"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("profile", ["default", "C"])
async def test_no_fault_of_a_tool_crashes_stalls_or_leaks(tiny_tokenizer, profile, caplog):
    """Pain points 11, 13 and 15."""
    caplog.set_level(logging.CRITICAL, logger="rollout_sidecar")
    report = await chaos(tiny_tokenizer, COUNT, seed=1, profile=profile)
    assert report.internal == []
    assert report.statuses.total() + report.cancelled == COUNT
    assert set(report.statuses) <= {"completed", "tool_error", "timeout"}
    assert report.statuses["completed"] > COUNT / 2
    assert not any(report.left.values()), report.left
    assert report.longest_pause_s < 1.0  # a tool that blocks holds up nobody else
    assert report.grown_bytes < 256 * 1024
    # It was chaos indeed.
    kinds = ("hang", "stubborn", "slow", "crash", "cancel", "refuse", "garbage", "huge")
    kinds += ("block", "sleep")
    assert report.most_lost > 1
    assert all(report.faults[kind] > 0 for kind in kinds)
    calls = ("ok", "error", "timeout", "parse_error", "bad_arguments", "unknown_tool")
    assert all(report.calls[status] > 0 for status in calls)
