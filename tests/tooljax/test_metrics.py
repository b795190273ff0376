"""Metrics of trajectories, worked by hand."""

import itertools

import pytest

from rollout_sidecar.protocol import (
    InteractionReply,
    TokenStream,
    ToolCallRecord,
    Trajectory,
    Turn,
    VersionSpan,
)
from tooljax.metrics import (
    REGISTRY,
    check_names,
    describe,
    pass_at_k,
    pass_metrics,
    rollout_metrics,
    with_speed,
)


def call(name: str, status: str, **fields) -> ToolCallRecord:
    return ToolCallRecord(name=name, status=status, result="", **fields)  # type: ignore[arg-type]


def trajectory(*turns: list[ToolCallRecord], **fields) -> Trajectory:
    """3 prompt tokens, then 2 completion tokens a turn, then 1 observation token where calls were made."""
    mask, made = [False] * 3, []
    for calls in turns:
        start = len(mask)
        mask += [True, True]
        made.append(Turn(start=start, end=start + 2, policy_version=4, finish="stop", calls=calls))
        mask += [False] * bool(calls)
    defaults = {
        "task_index": 0,
        "sample_index": 0,
        "task_id": "t",
        "seed": 0,
        "status": "completed",
        "token_ids": list(range(len(mask))),
        "loss_mask": mask,
        "prompt_tokens": 3,
        "turns": made,
        "version_spans": [
            VersionSpan(start=t.start, end=t.end, policy_version=t.policy_version) for t in made
        ],
    }
    return Trajectory(**{**defaults, **fields})


def test_rewards_and_their_terms():
    metrics = rollout_metrics(
        [
            trajectory([], reward=1.5, reward_terms={"outcome": 1.0, "valid_call": 0.5}),
            trajectory([], reward=0.5, reward_terms={"valid_call": 0.5}),
            trajectory([], reward=-0.5, reward_terms={"outcome": 0.0, "valid_call": -0.5}),
        ]
    )
    # mean 1.5 / 3; deviations 1, 0, -1: variance 2/3
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/std"] == pytest.approx((2 / 3) ** 0.5)
    assert metrics["reward/terms/outcome/mean"] == pytest.approx(0.5)  # of the two that have it
    assert metrics["reward/terms/valid_call/mean"] == pytest.approx(0.5 / 3)


def test_ragged_reports_are_averaged_over_those_that_have_them():
    metrics = rollout_metrics([trajectory([], metrics={"a": 1}), trajectory([], metrics={"b": 2})])
    assert metrics["rollout/metrics/a/mean"] == 1
    assert metrics["rollout/metrics/a/count"] == 1
    assert metrics["rollout/metrics/b/mean"] == 2
    assert metrics["rollout/metrics/b/count"] == 1
    assert "rollout/accuracy" not in metrics


def test_accuracy_with_and_without_tools():
    used = [call("calc", "ok")]
    metrics = rollout_metrics(
        [
            trajectory(used, [], metrics={"acc": 1.0}),
            trajectory(used, [], metrics={"acc": 1.0}),
            trajectory(used, [], metrics={"acc": 0.0}),
            trajectory([], metrics={"acc": 0.0}),
            trajectory([]),  # no verdict: in no accuracy
        ]
    )
    assert metrics["rollout/accuracy"] == pytest.approx(2 / 4)
    assert metrics["rollout/accuracy_with_tools"] == pytest.approx(2 / 3)
    assert metrics["rollout/accuracy_without_tools"] == 0


def test_lengths():
    metrics = rollout_metrics(
        [
            trajectory([call("calc", "ok")], [], total_s=3.0, tool_s=1.0),  # 3 + 2 + 1 + 2
            trajectory([], total_s=1.0, escaped_special_tokens=2),  # 3 + 2
        ]
    )
    assert metrics["rollout/turns/mean"] == 1.5
    assert metrics["rollout/prompt_tokens/mean"] == 3
    assert metrics["rollout/completion_tokens/mean"] == 3
    assert metrics["rollout/completion_tokens/max"] == 4
    assert metrics["rollout/observation_tokens/mean"] == 0.5
    assert metrics["rollout/escaped_special_tokens"] == 2
    assert metrics["rollout/trajectory_s/mean"] == 2
    assert metrics["rollout/trajectory_s/max"] == 3
    assert metrics["rollout/tool_s/mean"] == 0.5


def test_cached_tokens_are_a_share_of_all_contexts():
    turns = [
        Turn(start=4, end=6, policy_version=1, finish="stop", cached_tokens=0),
        Turn(start=8, end=9, policy_version=1, finish="stop", cached_tokens=6),
    ]
    # contexts of 4 and 8 tokens, 6 of them cached
    metrics = rollout_metrics([trajectory([], turns=turns)])
    assert metrics["rollout/cached_token_frac"] == pytest.approx(6 / 12)


def test_statuses_and_truncation():
    metrics = rollout_metrics(
        [trajectory([], status=s) for s in ("completed", "max_turns", "max_tokens", "tool_error")]
    )
    assert metrics["rollout/status/completed_frac"] == 0.25
    assert metrics["rollout/status/tool_error_frac"] == 0.25
    assert metrics["rollout/status/timeout_frac"] == 0
    assert metrics["rollout/truncated_frac"] == 0.5


def test_aborted_trajectories_are_counted_and_left_out():
    lost = trajectory([call("calc", "ok")], status="aborted", reward=100.0, metrics={"acc": 1.0})
    kept = trajectory([], reward=1.0, metrics={"acc": 0.0})
    metrics = rollout_metrics([lost, kept, lost, lost])
    assert metrics["rollout/aborted_frac"] == 0.75
    assert metrics["rollout/trajectories"] == 1
    without = rollout_metrics([kept])
    assert {k: v for k, v in metrics.items() if k != "rollout/aborted_frac"} == {
        k: v for k, v in without.items() if k != "rollout/aborted_frac"
    }


def test_nothing_kept_gives_counts_only():
    assert rollout_metrics([]) == {"rollout/trajectories": 0}
    assert rollout_metrics([trajectory([], status="aborted")]) == {
        "rollout/trajectories": 0,
        "rollout/aborted_frac": 1,
    }


def test_tool_calls():
    metrics = rollout_metrics(
        [
            trajectory(
                [
                    call("calc", "ok", latency_s=0.1),
                    call("calc", "timeout", latency_s=0.5, truncated=True),
                ],
                [call("calc", "bad_arguments"), call("", "parse_error")],
                [],
            ),
            trajectory([call("search", "error", latency_s=2.0), call("calc", "not_executed")], []),
            trajectory([]),
            trajectory([]),
        ]
    )
    assert metrics["tools/use_rate"] == 0.5
    assert metrics["tools/calls_per_trajectory"] == 1.5  # 6 attempts, 4 trajectories
    assert metrics["tools/valid_call_rate"] == pytest.approx(1 / 6)
    assert metrics["tools/parse_error_rate"] == pytest.approx(1 / 6)
    assert metrics["tools/not_executed_rate"] == pytest.approx(1 / 6)
    assert metrics["tools/unknown_rate"] == 0
    assert metrics["tools/calc/calls"] == 4
    assert metrics["tools/calc/timeout_rate"] == 0.25
    assert metrics["tools/calc/bad_arguments_rate"] == 0.25
    assert metrics["tools/calc/error_rate"] == 0
    assert metrics["tools/calc/truncated_rate"] == 0.25
    # executed in 0.1 and 0.5 s: median between them, 95 % at 0.1 + 0.95 * 0.4
    assert metrics["tools/calc/latency_p50_s"] == pytest.approx(0.3)
    assert metrics["tools/calc/latency_p95_s"] == pytest.approx(0.48)
    assert metrics["tools/search/calls"] == 1
    assert metrics["tools/search/error_rate"] == 1


def test_invented_tool_names_make_no_metrics():
    invented = [call(f"tool_{i}", "unknown_tool") for i in range(50)]
    invented += [call("tool_50", "not_executed"), call("calc", "ok")]
    metrics = rollout_metrics([trajectory(invented, [])])
    names = {name.split("/")[1] for name in metrics if name.startswith("tools/")}
    assert {name for name in names if not name.endswith(("_rate", "_trajectory"))} == {
        "calc",
        "unknown",
    }
    assert metrics["tools/unknown/calls"] == 51
    assert metrics["tools/unknown_rate"] == pytest.approx(50 / 52)


def test_named_tools_are_reported_though_never_executed():
    tried = trajectory([call("search", "not_executed")], [])
    assert rollout_metrics([tried])["tools/unknown/calls"] == 1
    assert rollout_metrics([tried], tool_names=["search"])["tools/search/calls"] == 1


def test_rates_of_no_calls_are_left_out():
    metrics = rollout_metrics([trajectory([])])
    assert metrics["tools/use_rate"] == 0
    assert "tools/valid_call_rate" not in metrics


def test_policy_lag_is_weighted_by_tokens():
    spans = [
        VersionSpan(start=3, end=6, policy_version=5),
        VersionSpan(start=6, end=7, policy_version=1),
    ]
    metrics = rollout_metrics([trajectory([], version_spans=spans)], policy_version=5)
    assert metrics["policy/lag/mean"] == 1  # 3 tokens of lag 0, 1 of lag 4
    assert metrics["policy/lag/max"] == 4
    assert "policy/lag/max" not in rollout_metrics([trajectory([])])


def test_everything_that_is_made_is_registered():
    made = rollout_metrics(
        [
            trajectory(
                [call("calc", "ok"), call("new", "unknown_tool")],
                [],
                reward_terms={"tool/calc": 1.0},
                metrics={"acc": 1.0, "päß@1": 1.0},
            )
        ],
        policy_version=7,
    )
    assert "rollout/metrics/p___1/mean" in made  # only what every tracker takes
    check_names(made)
    check_names(f"eval/{name}" for name in made if not name.startswith("policy/"))
    check_names(pass_metrics([[True, False]]))


@pytest.mark.parametrize(
    "name", ["reward/maen", "eval/policy/loss", "eval/", "tools//calls", "time/_s", "xreward/mean"]
)
def test_other_names_are_refused(name):
    assert describe(name) is None
    with pytest.raises(ValueError, match=f"unknown metric '{name}'; add it"):
        check_names(["reward/mean", name])


def test_every_metric_has_a_meaning():
    assert all(m.meaning.endswith(".") for m in REGISTRY.values())
    assert describe("time/rollout_s") == REGISTRY["time/{phase}_s"]
    assert describe("tools/calc/calls") == REGISTRY["tools/{name}/calls"]


def test_pass_at_k_by_hand():
    # n=4, c=1: one of four draws hits; 1 - C(3,2)/C(4,2) = 1 - 3/6; the third draw of 4 must hit
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(5, 0, 3) == 0


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 3), (6, 1, 2), (7, 4, 7), (6, 5, 2)])
def test_pass_at_k_counts_subsets(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match=r"pass@5 of 1 correct in 4 samples"):
        pass_at_k(4, 1, 5)


def test_pass_metrics_average_over_tasks():
    metrics = pass_metrics([[True, False, False, False], [False] * 5])
    assert metrics == {
        "eval/pass_at_1": pytest.approx(0.125),
        "eval/pass_at_2": pytest.approx(0.25),
        "eval/pass_at_4": pytest.approx(0.5),
    }


# --- statistics that /metrics of the sidecar has too (tests/rollout_sidecar/test_metrics_sidecar.py) ------------------


def test_waiting_attempts_tokens_and_rewards_of_a_tool():
    calls = [
        call("calc", "ok", queue_s=0.1, attempts=1, result_tokens=4, reward=0.5),
        call("calc", "error", queue_s=0.3, attempts=3, result_tokens=8, reward=-1.0),
        call("calc", "unavailable", queue_s=30.0, result_tokens=12),
        call("calc", "bad_arguments", result_tokens=16),
    ]
    metrics = rollout_metrics([trajectory(calls, []), trajectory([])])
    assert metrics["tools/calc/calls_per_trajectory"] == 2
    assert metrics["tools/calc/unavailable_rate"] == 0.25
    assert metrics["tools/calc/result_tokens_mean"] == 10
    # Of the two that were executed.
    assert metrics["tools/calc/attempts_mean"] == 2
    # Of the only trajectory that used it.
    assert metrics["tools/calc/reward_mean"] == -0.5
    assert metrics["tools/calc/reward_sum"] == -0.5
    # 0.1, 0.3 and 30: the one with bad arguments never waited.
    assert metrics["tools/calc/queue_p50_s"] == pytest.approx(0.3)
    assert metrics["tools/calc/queue_p95_s"] == pytest.approx(0.3 + 0.9 * 29.7)


def test_rewards_of_a_tool_add_up():
    """Pain point 5: two calls that cost a twentieth each."""
    calls = [call("calc", "ok", reward=-0.05)] * 2
    metrics = rollout_metrics([trajectory(calls, [])])
    assert metrics["tools/calc/reward_sum"] == pytest.approx(-0.10)


def test_rewards_of_a_tool_hold_what_it_gave_for_the_trajectory():
    """Scoring adds up calls and calc_reward: -0.1 + 1 and -0.05 + 0.05, which is left out."""
    scored = {"reward_terms": {"outcome": 1.0}}
    twice = [call("calc", "ok", reward=-0.05)] * 2
    first = trajectory(twice, [], metrics={"tool_reward/calc": 0.9}, **scored)
    second = trajectory([call("calc", "ok", reward=-0.05)], [], **scored)
    unused = trajectory([], metrics={"tool_reward/calc": 0.3}, **scored)
    metrics = rollout_metrics([first, second, unused])
    assert metrics["tools/calc/reward_mean"] == pytest.approx(0.45)
    assert metrics["tools/calc/reward_sum"] == pytest.approx(1.2)


def test_programs_that_fail_or_run_too_long_are_counted_though_their_calls_are_answers():
    calls = [
        call("python", "ok", metrics={"failed": 1.0, "timed_out": 1.0}),
        call("python", "ok", metrics={"failed": 1.0, "timed_out": 0.0}),
        call("python", "ok", metrics={"failed": 0.0, "timed_out": 0.0}),
        call("python", "ok", metrics={"failed": 0.0, "timed_out": 0.0}),
        call("python", "error"),
        call("other", "ok"),
    ]
    metrics = rollout_metrics([trajectory(calls, [])])
    assert metrics["tools/python/program_failure_rate"] == 0.5
    assert metrics["tools/python/program_timeout_rate"] == 0.25
    assert "tools/other/program_timeout_rate" not in metrics
    check_names(metrics)


def test_replies_of_an_interaction():
    def turn(score: float, done: bool, latency_s: float) -> Turn:
        reply = InteractionReply(text="", score=score, done=done, latency_s=latency_s)
        return Turn(start=3, end=4, policy_version=0, finish="stop", reply=reply)

    metrics = rollout_metrics(
        [
            trajectory(turns=[turn(0.0, False, 0.1), turn(1.0, True, 0.3)]),
            trajectory(turns=[turn(0.0, False, 0.2)]),
            trajectory([]),  # no interaction: in none of these means
        ]
    )
    assert metrics["interaction/replies_per_trajectory"] == 1.5
    assert metrics["interaction/turn_score_mean"] == pytest.approx(1 / 3)
    assert metrics["interaction/done_frac"] == 0.5
    assert metrics["interaction/latency_p50_s"] == pytest.approx(0.2)
    check_names(metrics)
    check_names(f"eval/{name}" for name in metrics)


def test_tokens_of_every_stream_count_once():
    earlier = TokenStream(
        token_ids=[0] * 9,  # a prompt of 4, 3 sampled, an observation of 2
        prompt_tokens=4,
        loss_mask=[False] * 4 + [True] * 3 + [False] * 2,
        rollout_log_probs=[0.0] * 9,
        version_spans=[VersionSpan(start=4, end=7, policy_version=1)],
    )
    forked = trajectory([], earlier_streams=[earlier])  # itself: a prompt of 3, 2 sampled
    metrics = rollout_metrics([forked], policy_version=4)
    assert metrics["rollout/prompt_tokens/mean"] == 4
    assert metrics["rollout/completion_tokens/mean"] == 5
    assert metrics["rollout/observation_tokens/mean"] == 2
    assert metrics["rollout/forks_per_trajectory"] == 1
    assert metrics["policy/lag/max"] == 3
    assert metrics["policy/lag/mean"] == pytest.approx((3 * 3 + 2 * 0) / 5)


def test_speed_is_of_the_whole_step():
    step = {"time/step_s": 4.0, "rollout/completion_tokens/mean": 10.0, "rollout/trajectories": 6.0}
    # 10 tokens x 6 trajectories in 4 s
    assert with_speed(step) == {**step, "perf/tokens_per_s": 15.0}
    assert with_speed({"time/step_s": 4.0}) == {"time/step_s": 4.0}
