"""Busy and idle times of a step, against timelines drawn by hand."""

import pytest

from rollout_sidecar.protocol import InteractionReply, ToolCallRecord, Trajectory, Turn
from tooljax.busy import Span, busy_times, covered, rates, timeline


def call(latency_s: float, queue_s: float = 0.0) -> ToolCallRecord:
    return ToolCallRecord(name="t", status="ok", result="", latency_s=latency_s, queue_s=queue_s)


def trajectory(*turns: Turn, tool_s: float = 0.0, total_s: float = 0.0, **changes) -> Trajectory:
    fields = {"task_index": 0, "sample_index": 0, "task_id": "t", "seed": 1, "status": "completed"}
    return Trajectory(**fields | changes, turns=list(turns), tool_s=tool_s, total_s=total_s)


def turn(generate_s: float, *calls: ToolCallRecord, tokens: int = 10, **changes) -> Turn:
    return Turn(
        start=5,
        end=5 + tokens,
        policy_version=0,
        finish="stop",
        generate_s=generate_s,
        calls=list(calls),
        **changes,
    )


#      0    1    2    3    4    5    6    7    8    9   10
# A    |gggg|ttttttttttttttttttt|ggggggggg|                   2 of its calls side by side, 4 s
# B    |ggggggggg|tttttttttttttt|                             the turn after it was cut off
A = trajectory(turn(1.0, call(4.0), call(1.0, queue_s=2.0)), turn(2.0), tool_s=4.0, total_s=7.0)
B = trajectory(turn(2.0, call(3.0), tokens=40), tool_s=3.0, total_s=5.0)


def test_turns_follow_each_other_and_calls_of_a_turn_run_side_by_side():
    assert timeline([A, B]) == (
        [Span(0, 1, 10), Span(5, 7, 10), Span(0, 2, 40)],
        [Span(1, 5), Span(2, 5)],
    )


def test_a_trajectory_starts_when_there_is_a_place_for_it():
    generated, _ = timeline([A, B, B], capacity=2)  # the third when the second has ended
    assert generated[-1] == Span(5, 7, 40)
    generated, _ = timeline([A, B], capacity=1)
    assert generated[-1] == Span(7, 9, 40)


def test_what_turns_waited_for_tools_adds_up_to_what_was_measured():
    # Of 4 s of calls the trajectory waited 2: some were begun before the turn had ended, say.
    _, waited = timeline([trajectory(turn(1.0, call(1.0)), turn(1.0, call(3.0)), tool_s=2.0)])
    assert waited == [Span(1.0, 1.5), Span(2.5, 4.0)]


def test_a_simulated_user_is_neither_engine_nor_tool():
    reply = InteractionReply(text="", latency_s=2.0)
    generated, waited = timeline([trajectory(turn(1.0, reply=reply), turn(1.0))])
    assert (generated, waited) == ([Span(0, 1, 10), Span(3, 4, 10)], [])


def test_a_step_by_hand():
    step = {
        "time/rollout_s": 7.5,
        "time/batch_s": 0.5,
        "time/update_s": 1.5,
        "time/push_s": 0.25,
        "time/step_s": 10.0,
    }
    aborted = trajectory(turn(9.0), total_s=9.0, status="aborted")
    assert busy_times(step, [A, B, aborted]) == {
        "perf/trainer_busy_s": 2.0,
        "perf/trainer_idle_s": 8.0,
        "perf/engine_busy_s": 4.0,  # 0 to 2, 5 to 7
        "perf/engine_idle_s": 6.0,
        "perf/sync_busy_s": 0.25,
        "perf/sync_idle_s": 9.75,
        "perf/tools_busy_s": 4.0,  # 1 to 5
        "perf/tools_idle_s": 6.0,
        "perf/engine_tokens_per_s": 15.0,  # 60 in 4 s
    }


def test_a_step_without_trajectories():
    told = busy_times({"time/step_s": 2.0}, [])
    assert told["perf/engine_idle_s"] == 2.0
    assert "perf/engine_tokens_per_s" not in told


def test_covered_counts_no_second_twice():
    assert covered([Span(4, 5), Span(0, 2), Span(1, 3), Span(1, 2)]) == 4.0


def test_rates_add_up_over_spans():
    # 10 a second for 2 s; beside it 20 a second, from 1 to 3; then nothing until 5; then 5 a second.
    spans = [Span(0, 2, 20), Span(1, 3, 40), Span(5, 6, 5)]
    assert rates(spans) == [
        (pytest.approx(rate), pytest.approx(seconds))
        for rate, seconds in ((10, 1), (30, 1), (20, 1), (5, 1))
    ]


def test_a_pause_between_spans_has_no_rate():
    spans = [Span(0, 0.1, 1), Span(0, 0.3, 1), Span(0.05, 0.7, 1), Span(100, 101, 1)]
    found = rates(spans)
    assert sum(seconds for _, seconds in found) == pytest.approx(1.7)
    assert min(rate for rate, _ in found) > 0.9
