"""How a reward is put together: outcome, weighted terms, and rewards that cannot be made."""

import logging
from typing import Any

import msgspec
import pytest

from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import (
    CallStatus,
    InteractionReply,
    RewardWeights,
    Task,
    ToolCallRecord,
    Turn,
)
from rollout_sidecar.scoring import Scored, Scorer, overlong_penalty

TASK = Task(task_id="t", messages=[], data_source="openai/gsm8k", ground_truth="2")


def turn(*calls: ToolCallRecord, score: float | None = None) -> Turn:
    reply = None if score is None else InteractionReply(text="Go on.", score=score)
    return Turn(start=0, end=1, policy_version=0, finish="stop", calls=list(calls), reply=reply)


def call(status: CallStatus = "ok", reward: float = 0.0, name: str = "calc") -> ToolCallRecord:
    return ToolCallRecord(name=name, status=status, result="", reward=reward)


async def score(
    *turns: Turn, weights: RewardWeights | None = None, scorer: Scorer | None = None, **given: Any
) -> Scored:
    arguments = {
        "policy_text": "#### 2",
        "all_text": "#### 2",
        "turns": turns,
        "tool_rewards": {},
        "response_tokens": 10,
        "max_response_tokens": 100,
        "timeout_s": 10.0,
        "metrics": Metrics(),
    }
    return await (scorer or Scorer()).score(
        given.pop("task", TASK), weights=weights, **{**arguments, **given}
    )


# --- terms ------------------------------------------------------------------------------------------------------


async def test_rewards_of_calls_and_of_the_whole_trajectory_add_up_by_tool():
    """Pain point 5: -0.05 twice, and an outcome of 1."""
    name = "calc_gsm8k_reward"
    turns = [turn(call(reward=-0.05, name=name)) for _ in range(2)]
    scored = await score(*turns, tool_rewards={name: 0.0}, weights=RewardWeights(tool=1.0))
    assert scored.terms == {"outcome": 1.0, f"tool/{name}": pytest.approx(-0.1)}
    assert sum(scored.terms.values()) == pytest.approx(0.9)
    assert scored.metrics[f"tool_reward/{name}"] == pytest.approx(-0.1)


async def test_each_tool_is_a_term_of_its_own():
    scored = await score(
        turn(call(reward=0.5, name="a"), call(reward=0.25, name="b")),
        tool_rewards={"a": 1.0, "c": 2.0},  # b is made for each call anew, and has none
        weights=RewardWeights(tool=0.5),
    )
    assert scored.terms == {"outcome": 1.0, "tool/a": 0.75, "tool/c": 1.0, "tool/b": 0.125}


@pytest.mark.parametrize(
    ("merge", "expected"), [("sum", 0.75), ("mean", 0.25), ("last", -0.25), ("max", 1.0)]
)
async def test_scores_of_turns_are_merged(merge, expected):
    turns = [turn(score=1.0), turn(call()), turn(score=0.0), turn(score=-0.25)]
    scored = await score(*turns, weights=RewardWeights(turn=2.0, turn_merge=merge))
    assert scored.terms == {"outcome": 1.0, "turn": 2 * expected}
    assert scored.metrics["turn_score"] == 0.75


async def test_without_an_interaction_the_turn_term_is_0():
    scored = await score(turn(), weights=RewardWeights(turn=1.0))
    assert scored.terms == {"outcome": 1.0, "turn": 0.0}


async def test_shaping_of_calls():
    weights = RewardWeights(valid_call=0.25, invalid_call=-1.0)
    mixed = [
        turn(call("ok"), call("parse_error")),
        turn(call("unknown_tool"), call("bad_arguments"), call("ok")),
        # The policy is not to blame for these.
        turn(call("timeout"), call("error"), call("not_executed")),
    ]
    assert (await score(*mixed, weights=weights)).terms == {
        "outcome": 1.0,
        "valid_call": 0.25,
        "invalid_call": -3 / 8,
    }
    failed = await score(turn(call("error")), weights=weights)
    assert failed.terms == {"outcome": 1.0, "valid_call": 0.0, "invalid_call": 0.0}
    assert (await score(turn(), weights=weights)).terms == failed.terms


@pytest.mark.parametrize(
    ("tokens", "expected"),
    # L_max 100, L_cache 20: ((100 - 20) - |y|) / 20 from 80 on
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)],
)
def test_the_over_long_penalty(tokens: int, expected: float):
    """arXiv:2503.14476, eq. 13."""
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(expected)


def test_a_buffer_longer_than_what_the_prompt_left():
    assert overlong_penalty(0, 10, 50) == 0.0
    assert overlong_penalty(5, 10, 50) == pytest.approx(-0.5)
    assert overlong_penalty(0, 0, 50) == 0.0


async def test_the_over_long_penalty_is_a_term():
    weights = RewardWeights(overlong=0.5, overlong_buffer_tokens=20)
    for tokens, expected in ((10, 0.0), (90, -0.25), (100, -0.5)):
        scored = await score(turn(), weights=weights, response_tokens=tokens)
        assert scored.terms == {"outcome": 1.0, "overlong": pytest.approx(expected)}


async def test_without_weights_the_reward_is_the_outcome():
    turns = [turn(call(reward=5.0), score=3.0), turn(call("parse_error"))]
    scored = await score(*turns, response_tokens=100)
    assert scored.terms == {"outcome": 1.0}
    assert scored.metrics == {
        "acc": 1.0,
        "answered": 1.0,
        "tool_reward/calc": 5.0,
        "turn_score": 3.0,
    }


# --- warnings ---------------------------------------------------------------------------------------------------


async def test_what_is_ignored_is_warned_about_once(caplog):
    task = msgspec.structs.replace(TASK, interaction="tutor")
    turns = [turn(call(reward=-0.05), call(reward=0.5, name="b")), turn(score=0.25)]
    scorer = Scorer()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await score(*turns, task=task, weights=RewardWeights(valid_call=1.0), scorer=scorer)
    assert sorted(record.message for record in caplog.records) == [
        "interaction 'tutor' gave a turn the score 0.25, which is ignored because its weight is 0"
        " (set reward.turn)",
        "tool 'b' returned the reward 0.5, which is ignored because its weight is 0"
        " (set reward.tool)",
        "tool 'calc' returned the reward -0.05, which is ignored because its weight is 0"
        " (set reward.tool)",
    ]


@pytest.mark.parametrize("before", [None, RewardWeights(tool=0.1)])
async def test_evaluations_and_annealed_weights_are_no_oversight(caplog, before):
    scorer = Scorer()
    with caplog.at_level(logging.WARNING):
        await score(turn(call(reward=1.0)), weights=before, scorer=scorer)
        if before is not None:
            await score(turn(call(reward=1.0)), weights=RewardWeights(), scorer=scorer)
    assert not caplog.records


# --- what the function reads ------------------------------------------------------------------------------------


async def test_a_tool_cannot_earn_the_reward_unless_its_text_is_asked_for():
    """Pain point 6."""
    texts: dict[str, Any] = {
        "policy_text": "I don't know",
        "all_text": "<tool_response>#### 2</tool_response> I don't know",
    }
    assert (await score(turn(call()), **texts)).terms == {"outcome": 0.0}
    verls = Scorer(text="all")
    assert (await score(turn(call()), scorer=verls, **texts)).terms == {"outcome": 1.0}


async def test_arguments_reach_the_function():
    scorer = Scorer(reward="gsm8k", reward_kwargs={"format_score": 0.5})
    assert (await score(policy_text="#### 3", scorer=scorer)).terms == {"outcome": 0.5}
    # Chosen by data_source, it is given what it takes.
    scorer = Scorer(reward_kwargs={"format_score": 0.5, "measure": "f1"})
    assert (await score(policy_text="#### 3", scorer=scorer)).terms == {"outcome": 0.5}


async def test_a_function_sees_scores_of_tools_and_turns_by_verls_names(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, *, bonus):\n"
        "    assert extra_info == {\n"
        "        'num_turns': 5,\n"
        "        'rollout_reward_scores': {'calc': 0.5, 'user_turn_rewards': [0.25]},\n"
        "        'tool_rewards': [-0.5],\n"
        "        'turn_scores': [0.25],\n"
        "    }, extra_info\n"
        "    return bonus\n"
    )
    scorer = Scorer(reward=str(file), reward_kwargs={"bonus": 0.75})
    turns = [turn(call(reward=-0.5)), turn(score=0.25)]  # 2 of the policy, 2 answers, the prompt
    scored = await score(*turns, tool_rewards={"calc": 0.5}, scorer=scorer)
    assert (scored.error, scored.terms) == ("", {"outcome": 0.75})


# --- rewards that cannot be made --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise KeyError('x')", "reward: KeyError: 'x'"),
        ("return float('nan')", "returned score = nan, expected a finite number"),
        ("return {'acc': 1}", "returned keys ['acc'], but no \"score\""),
        ("import time; time.sleep(0.4)", "reward: no result within 0.2 s"),
        ("import asyncio; raise asyncio.CancelledError", "reward: it was cancelled"),
        ("import sys; sys.exit(3)", "reward: it raised SystemExit(3)"),
        ("raise KeyboardInterrupt", "reward: it raised KeyboardInterrupt()"),
        ("raise StopIteration", "reward: "),
        (
            "from rollout_sidecar.errors import ToolError; raise ToolError('no tool')",
            "reward: no tool",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_reward_that_fails_leaves_nothing_behind(tmp_path, body, error, kind):
    file = tmp_path / "reward.py"
    file.write_text(f"{kind} compute_score(**kwargs):\n    {body}\n")
    metrics = Metrics()
    scored = await score(
        turn(call(reward=1.0)),
        scorer=Scorer(reward=str(file)),
        weights=RewardWeights(tool=1.0, valid_call=1.0),
        timeout_s=0.2,
        metrics=metrics,
    )
    assert (scored.scored, scored.terms, scored.metrics) == (False, {}, {})
    assert error in scored.error
    assert metrics.value("reward_errors_total") == 1


async def test_a_task_that_no_reward_is_for_is_unscored():
    task = Task(task_id="t", messages=[], data_source="mine")
    scored = await score(task=task)
    assert not scored.scored
    assert "no built-in reward for data_source 'mine'" in scored.error


async def test_a_term_that_is_not_finite_is_no_reward():
    scored = await score(turn(score=float("nan")), weights=RewardWeights(turn=1.0))
    assert scored == Scored(
        scored=False, error="reward: the term turn is nan, expected a finite number"
    )
