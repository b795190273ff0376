"""Predictions of step times, against cases worked by hand and against runs that were made."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_sidecar.protocol import RewardWeights, ToolCallRecord, Trajectory, Turn
from tooljax.config import Config, GrpoConfig, RunConfig, SidecarConfig, to_gin
from tooljax.cost import Measured, Setting, Step, main, measure, predict
from tooljax.store.store import Credit, TrajectoryStore

NOW = Setting(sidecars=1, lag=0, group_size=4)

STEP = Step(
    trajectories=8,
    tokens=1000,
    rollout_s=10.0,
    longest_s=4.0,
    update_s=2.0,
    rest_s=1.0,
    step_s=13.0,
)
"""An engine of 100 tokens a second needs all of the 10 seconds."""


def step_s(setting: Setting, step: Step = STEP, peak: float = 100.0, now: Setting = NOW) -> float:
    return predict(Measured(now, [step] * 3, peak), setting).step_s


def test_the_run_itself_is_as_it_was():
    assert step_s(NOW) == pytest.approx(13.0)
    # Also where engines were not full, and where they worked faster than at the peak that was reckoned with.
    assert step_s(NOW, peak=170.0) == pytest.approx(13.0)
    assert step_s(NOW, peak=80.0) == pytest.approx(13.0)


@pytest.mark.parametrize(
    ("sidecars", "expected"),
    [
        (2, 5.0 + 3.0),  # half of 10
        (4, 4.0 + 3.0),  # 2.5, but the longest trajectory takes 4
    ],
)
def test_more_sidecars(sidecars, expected):
    setting = replace(NOW, sidecars=sidecars)
    found = predict(Measured(NOW, [STEP], 100.0), setting)
    assert (found.step_s, found.rollout_s) == (pytest.approx(expected), pytest.approx(expected - 3))
    assert found.bound == {2: "engine", 4: "longest trajectory"}[sidecars]


def test_fewer_sidecars():
    now = replace(NOW, sidecars=2)
    step = replace(STEP, rollout_s=5.0, step_s=8.0)
    assert step_s(replace(NOW, sidecars=1), step, now=now) == pytest.approx(10.0 + 3.0)


def test_a_rollout_that_took_longer_than_the_model_says_goes_on_to():
    # 12 s where the engine needs 10: 1.2 times. With two sidecars 1.2 x 5, with four 1.2 x 4.
    step = replace(STEP, rollout_s=12.0)
    assert step_s(replace(NOW, sidecars=2), step) == pytest.approx(6.0 + 3.0)
    assert step_s(replace(NOW, sidecars=4), step) == pytest.approx(4.8 + 3.0)


def test_lag_overlaps_rollout_and_update():
    # The engine is busy for 10 s of each step, the trainer for 3.
    assert step_s(replace(NOW, lag=1)) == pytest.approx(10.0)
    assert step_s(replace(NOW, lag=3)) == pytest.approx(10.0)
    # The other way round: the engine waits for a trainer that takes 15.
    assert step_s(replace(NOW, lag=1), replace(STEP, update_s=14.0)) == pytest.approx(15.0)


def test_lag_hides_long_trajectories_and_not_the_engines_work():
    # One trajectory waits for a tool for 10 s, the engine works for 2. Begun a step ahead, it ends 10 s later: it takes
    # up a step and the wait in the next. T = wait + 3, 10 = T + wait: 6.5 s.
    step = replace(STEP, tokens=200, longest_s=10.0)
    assert step_s(NOW, step) == pytest.approx(13.0)
    found = [step_s(replace(NOW, lag=lag), step) for lag in (1, 2, 3, 4)]
    # 10 = 2 T + wait: 13 / 3 s, then 13 / 4 s; at last the trainer's 3 s.
    np.testing.assert_allclose(found[:3], [6.5, 13 / 3, 13 / 4], rtol=0.25)
    assert found == sorted(found, reverse=True)
    assert found[3] == pytest.approx(3.0)


def test_group_size_scales_tokens_and_update():
    found = predict(Measured(NOW, [STEP], 100.0), replace(NOW, group_size=8))
    assert found.step_s == pytest.approx(20.0 + 2 * 2.0 + 1.0)
    assert found.trajectories == 16


def test_cost_of_a_trajectory():
    # 13 s for 8 trajectories; an hour is 2 x 1.5 + 6.
    found = predict(Measured(NOW, [STEP], 100.0), replace(NOW, sidecars=2))
    assert found.cost(1.5, 6.0) == pytest.approx((2 * 1.5 + 6.0) / 3600 * 8.0 / 8)


# --- against runs that were made: benchmarks/async_training.py, the same tasks with and without lag ---


def recorded(name: str) -> tuple[Measured, float]:
    """What was measured of a run, and the mean time of its steps."""
    file = Path(__file__).parents[1] / "data" / "cost" / f"{name}.json"
    told = json.loads(file.read_text())
    steps = [Step(**step) for step in told["steps"]]
    measured = Measured(Setting(**told["setting"]), steps, told["peak_tokens_per_s"])
    return measured, float(np.mean([step.step_s for step in steps]))


@pytest.mark.parametrize(("known", "asked"), [("lag_0", "lag_1"), ("lag_1", "lag_0")])
def test_the_step_time_of_another_lag_is_predicted_within_15_percent(known, asked):
    """Steps of 4.62 s without lag and 2.38 s with: far more apart than that."""
    (measured, _), (other, truth) = recorded(known), recorded(asked)
    assert predict(measured, other.setting).step_s == pytest.approx(truth, rel=0.15)


# --- from a run's files ---


def played(generate_s: float, tool_s: float) -> Trajectory:
    """20 tokens, a call, 20 tokens."""
    call = ToolCallRecord(name="t", status="ok", result="", latency_s=tool_s)
    ends = {"policy_version": 0, "finish": "stop", "generate_s": generate_s}
    return Trajectory(
        task_index=0,
        sample_index=0,
        task_id="t",
        seed=1,
        status="completed",
        token_ids=[1] * 45,
        prompt_tokens=5,
        loss_mask=[False] * 5 + [True] * 40,
        rollout_log_probs=[0.0] * 45,
        turns=[Turn(start=5, end=25, calls=[call], **ends), Turn(start=25, end=45, **ends)],
        tool_s=tool_s,
        total_s=2 * generate_s + tool_s,
    )


@pytest.fixture
def run(tmp_path) -> Path:
    """Three steps of two trajectories; the first compiles."""
    config = Config(
        run=RunConfig(dir=str(tmp_path / "run")),
        grpo=GrpoConfig(group_size=2),
        sidecar=SidecarConfig(urls=("http://127.0.0.1:1", "http://127.0.0.1:2")),
    )
    store = TrajectoryStore(config, [])
    rows = []
    for step in (1, 2, 3):
        store.write(
            step,
            [[played(2.0, 1.0), played(2.0, 6.0)]],
            credit=Credit(np.zeros((1, 2), np.float32), [["left out"] * 2]),
            values=[],
            metrics={},
            reward_weights=RewardWeights(),
        )
        times = {"rollout": 10.0, "update": 2.5, "batch": 0.5, "push": 1.0}
        row = {"step": step, "perf/compilations": float(step == 1), "fleet/live": 2.0}
        row |= {f"time/{name}_s": seconds for name, seconds in times.items()}
        rows.append(row | {"time/step_s": 40.0 if step == 1 else 14.5})
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run" / "config.gin").write_text(to_gin(config))
    return tmp_path / "run"


def test_a_run_is_measured_from_its_files(run):
    measured, rows = measure(run)
    assert [row["step"] for row in rows] == [2, 3]
    assert measured.setting == Setting(sidecars=2, lag=0, group_size=2)
    # Both at 10 tokens a second, side by side: 20, of two sidecars.
    assert measured.peak_tokens_per_s == pytest.approx(10.0)
    step = Step(
        trajectories=2,
        tokens=80,
        rollout_s=10.0,
        longest_s=10.0,  # 40 tokens of 0.1 s, and 6 s in the tool
        update_s=3.0,
        rest_s=1.5,
        step_s=14.5,
    )
    assert measured.steps == [step, step]


def test_the_command_prints_what_was_and_what_would_be(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    asked = ["--sidecars", "1", "2", "--lag", "0", "1", "--gpu_hour_price", "1.8"]
    assert main([str(run), *asked, "--trainer_hour_price", "3.6"]) == 0
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    rows = {row[0]: row[1:] for row in lines if len(row) == 4}
    assert rows["trainer"] == ["3.00", "11.50", "21%"]
    assert rows["engine"] == ["6.00", "8.50", "41%"]  # 0 to 2, 3 to 5, 8 to 10
    assert rows["tools"] == ["6.00", "8.50", "41%"]
    table = {tuple(row[:3]): row[3:] for row in lines if len(row) == 8}
    assert len(table) == 4
    # 14.5 s of 2 trajectories at 2 x 1.8 + 3.6 an hour: 1000 cost 14.5.
    assert table["2", "0", "2"] == ["14.50", "100%", "10.00", "14.5", "longest trajectory"]


def test_what_cannot_be_measured_is_told(tmp_path, run, capsys):
    (run / "metrics.jsonl").write_text("")
    assert main([str(run)]) == 1
    assert "has no step that was both logged and stored" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "tooljax.cost: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run), "--sidecars", "0"])
    assert "'0' is no whole number from 1 on" in capsys.readouterr().err
