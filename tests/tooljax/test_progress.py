"""The terminal display, and the times it takes."""

import io
import re
import sys
import time

import pytest

from tooljax.metrics import check_names
from tooljax.progress import SHOWN, Progress

METRICS = {
    "reward/mean": 0.414,
    "policy/kl_ref": 0.0021,
    "rollout/turns/mean": 2.3,
    "optim/grad_norm": 1.0,
}


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch) -> Terminal:
    """Standard output becomes a terminal. Called in the test: pytest sets its own after the fixtures."""
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    return out


@pytest.fixture(autouse=True)
def _terminal_settings(monkeypatch):
    """The environment of the tests must not decide what is a terminal, or how wide."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_a_plain_line(capsys):
    with Progress("plain", 200, "run", start=11) as progress:
        for name in ("rollout", "update", "push"):
            with progress.phase(name):
                time.sleep(0.06)
        with progress.phase("batch"):
            pass
        progress.step(12, METRICS)
    line = re.sub(r"\d\.\ds", "0.1s", capsys.readouterr().out)
    assert line == (
        "step 12/200 | reward 0.41 | kl_ref 0.002 | turns 2.3 | rollout 0.1s train 0.1s sync 0.1s\n"
    )


def test_a_step_without_metrics_is_a_line_all_the_same(capsys):
    with Progress("plain", 2) as progress:
        progress.step(1, {})
        progress.step(2, {"policy/loss": 0.5, "some/other": 1.0})
    assert capsys.readouterr().out == "step 1/2\nstep 2/2 | loss 0.5\n"


def test_phases_are_timed_and_add_up():
    with Progress("off", 2) as progress:
        for _ in range(2):
            with progress.phase("rollout"):
                time.sleep(0.02)
        with pytest.raises(KeyError), progress.phase("update"):
            raise KeyError  # a phase that fails is timed too
        timings = progress.timings()
        assert list(timings) == ["time/rollout_s", "time/update_s", "time/step_s"]
        assert 0.04 <= timings["time/rollout_s"] <= timings["time/step_s"] < 5
        check_names(timings)
        progress.step(1, {})
        assert list(progress.timings()) == ["time/step_s"]
        assert progress.timings()["time/step_s"] < timings["time/step_s"]


def test_off_writes_nothing(monkeypatch, capfd):
    terminal = open_terminal(monkeypatch)
    with Progress("off", 2) as progress:
        progress.rollout(1, 2)
        progress.step(1, METRICS)
    assert terminal.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_live_without_a_terminal_is_plain(capsys):
    with Progress("live", 2) as progress:
        assert progress.mode == "plain"
        progress.step(1, METRICS)
    assert capsys.readouterr().out.startswith("step 1/2 | reward 0.41")


def test_live_shows_the_run(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Progress("live", 200, "gsm8k", start=11) as progress:
        assert progress.mode == "live"
        progress.step(12, {**METRICS, "rollout/accuracy": 0.5, "eval/accuracy": 0.25})
        progress.step(13, {"reward/mean": 0.75})
        with progress.phase("rollout"):
            progress.rollout(5, 64)
            assert progress._live is not None
            progress._live.refresh()
            seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    last = seen[seen.rindex("gsm8k") :]
    assert "13/200" in last
    assert "s left" in last
    assert re.search(r"trajectories\s.*\b5/64", last)
    assert "reward 0.75" in last
    assert "held-out 0.250" in last  # from the evaluation of an earlier step
    assert "rollout 0s into the step" in last


def test_what_is_shown_is_registered():
    check_names(name for name, _ in SHOWN.values())


@pytest.mark.parametrize(
    ("step_s", "done", "left"),
    [(2.0, 190, "20 s left"), (60.0, 190, "10 min left"), (60.0, 75, "2 h 05 min left")],
)
def test_the_time_left_comes_from_recent_steps(step_s, done, left):
    progress = Progress("off", 200, start=done)
    assert progress._time_left() == ""
    progress._durations.extend([step_s, step_s])
    assert progress._time_left() == left
