"""Rewards from the trainer's side: weights that fall over the steps, evaluations without them, rewards that failed."""

import math

import pytest
from served_sidecars import make_tasks, make_tokenizer, serve

from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import Limits, RewardWeights, SamplingParams, Task, Trajectory
from rollout_sidecar.tools.calculator import CalculatorTool
from tooljax.config import Config, ConfigError, load_config
from tooljax.config.schema import EvaluateConfig, LimitsConfig, RewardConfig
from tooljax.evaluate import evaluate, reward_weights
from tooljax.evaluation.result import Evaluation, is_correct
from tooljax.metrics import check_names, rollout_metrics
from tooljax.rollouts import Sidecars

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def trajectory(reward=0.0, *, scored=True, **fields) -> Trajectory:
    return Trajectory(
        task_index=0,
        sample_index=0,
        task_id="t",
        seed=0,
        status="completed",
        token_ids=[1, 2],
        loss_mask=[False, True],
        reward=reward,
        scored=scored,
        **fields,
    )


# --- annealing --------------------------------------------------------------------------------------------------


def test_shaping_falls_linearly_and_the_length_penalty_stays():
    config = RewardConfig(
        tool=1.0,
        turn=0.5,
        turn_merge="mean",
        valid_call=0.25,
        invalid_call=-0.5,
        anneal_steps=4,
        overlong=2.0,
        overlong_buffer_tokens=100,
    )
    fixed = {"turn_merge": "mean", "overlong": 2.0, "overlong_buffer_tokens": 100}
    for step, left in ((0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0), (1000, 0.0)):
        assert reward_weights(config, step) == RewardWeights(
            tool=left, turn=left * 0.5, valid_call=left * 0.25, invalid_call=left * -0.5, **fixed
        )


def test_without_annealing_weights_stay():
    config = RewardConfig(tool=1.0, valid_call=0.1)
    assert reward_weights(config, 10**6) == RewardWeights(tool=1.0, valid_call=0.1)


def test_weights_reach_the_reward_and_evaluations_are_scored_without_them(tokenizer):
    shaped = RewardConfig(valid_call=0.5, invalid_call=-0.25, anneal_steps=2)
    call = get_format("hermes").render_call("calculator", {"expression": "1+1"})
    broken = '<tool_call>{"name": "calculator"</tool_call>'

    def script(request, turn: int) -> str:
        return f"{call}{broken}" if turn == 0 else "#### 0"

    config = Config(
        limits=LimitsConfig(max_turns=3, max_tokens_per_turn=128),
        evaluate=EvaluateConfig(),
        reward=shaped,
    )
    tasks = make_tasks(1)
    with (
        serve(tokenizer, script, tools=[CalculatorTool({}, SCHEMA)]) as served,
        Sidecars([served[0].url], token=None, timeout_s=30.0) as sidecars,
    ):
        rolled = [
            sidecars.rollout(
                tasks,
                samples=1,
                seed=(0,),
                sampling=SamplingParams(),
                limits=Limits(max_turns=3, max_tokens_per_turn=128),
                reward_weights=reward_weights(shaped, step),
            )[0][0]
            for step in range(3)
        ]
        evaluation = evaluate(config, sidecars, tasks)
    # Half of the two calls could not be read.
    assert [t.reward_terms for t in rolled] == [
        {"outcome": 1.0, "valid_call": 0.5, "invalid_call": -0.125},
        {"outcome": 1.0, "valid_call": 0.25, "invalid_call": -0.0625},
        {"outcome": 1.0},
    ]
    assert [t.reward for t in rolled] == [1.375, 1.1875, 1.0]
    assert evaluation.trajectories[0].reward_terms == {"outcome": 1.0}


# --- rewards that failed ----------------------------------------------------------------------------------------


def test_unscored_trajectories_are_counted_and_are_in_no_mean():
    kept = [
        trajectory(1.0, reward_terms={"outcome": 1.0}, metrics={"acc": 1.0}),
        trajectory(0.5, reward_terms={"outcome": 0.5}, metrics={"acc": 0.0}),
        trajectory(scored=False, error="reward: no such table"),
    ]
    metrics = rollout_metrics(kept)
    check_names(metrics)
    assert metrics["rollout/unscored_frac"] == pytest.approx(1 / 3)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.75, 0.25)
    assert metrics["reward/terms/outcome/mean"] == 0.75
    assert metrics["rollout/accuracy"] == 0.5
    assert rollout_metrics(kept[:2])["rollout/unscored_frac"] == 0


def test_without_a_reward_there_is_no_mean():
    metrics = rollout_metrics([trajectory(scored=False)])
    assert metrics["rollout/unscored_frac"] == 1
    assert not [name for name in metrics if name.startswith("reward/")]


def test_unscored_trajectories_are_neither_right_nor_wrong():
    unscored = trajectory(scored=False)
    assert not is_correct(unscored)
    evaluation = Evaluation([[trajectory(1.0), trajectory(1.0)], [trajectory(0.0), unscored]])
    assert evaluation.accuracy == pytest.approx(2 / 3)
    nothing = Evaluation([[unscored]])
    assert math.isnan(nothing.accuracy)
    assert nothing.interval == (0.0, 1.0)


def test_an_evaluation_whose_rewards_fail_has_no_accuracy(tokenizer):
    task = Task(
        task_id="t",
        messages=[{"role": "user", "content": "Which?"}],
        data_source="openai/gsm8k",
        ground_truth="many",
    )
    with (
        serve(tokenizer, ["#### 1"]) as served,
        Sidecars([served[0].url], token=None, timeout_s=30.0) as sidecars,
    ):
        evaluation = evaluate(Config(), sidecars, [task])
    assert evaluation.trajectories[0].error == "reward: the ground truth 'many' is not a number"
    assert "eval/accuracy" not in evaluation.metrics
    assert evaluation.metrics["eval/rollout/unscored_frac"] == 1.0


# --- the config section -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("sidecar.reward=gsm8k", r"no field 'reward' .*Did you mean section reward\?"),
        ("sidecar.tool_reward_weight=1", r"Did you mean grpo\.reward_weights\?"),
        ("sidecar.valid_call_reward=0.1", r"Did you mean reward\.valid_call\?"),
        ("reward.turn_merge=avg", r"one of 'sum', 'mean', 'last', 'max'"),
        ("reward.function_kwargs={'a': 1}", r"is not a JSON object; write for example '\{\"format"),
        ("reward.function_kwargs=[1]", r"reward\.function_kwargs='\[1\]' is not a JSON object"),
        ("reward.overlong=1", r"overlong=1 needs reward\.overlong_buffer_tokens from 1 to below"),
        ("reward.overlong=-1", r"reward\.overlong takes float >= 0"),
    ],
)
def test_mistakes_in_the_reward_section(binding, message):
    with pytest.raises(ConfigError, match=message):
        load_config([], [binding])


def test_the_reward_section_from_the_command_line():
    config = load_config(
        [], ['reward.function_kwargs={"format_score": 0.1}', "reward.anneal_steps=10"]
    )
    assert config.reward.function_kwargs == '{"format_score": 0.1}'
    assert config.reward.anneal_steps == 10
