"""The multi-turn loop: every limit, every status, and that sampled tokens are never touched."""

import logging
import time
from typing import Literal

import msgspec
import pytest
from sidecar_cases import (
    CounterTool,
    EchoTool,
    HangingTool,
    PenaltyTool,
    RaisingTool,
    SayingTool,
    call,
    make_agent,
    make_task,
    play,
    statuses,
    tool_messages,
)

from rollout_sidecar.engines.base import GenerateResult
from rollout_sidecar.engines.scripted import ScriptedEngine, scripted_log_prob
from rollout_sidecar.protocol import Limits, RewardWeights, derive_seed
from rollout_sidecar.tools.base import ToolResponse
from rollout_sidecar.truncation import MARKER


async def test_an_answer_without_a_call_completes_the_trajectory(tiny_tokenizer):
    trajectory = await play(make_agent(tiny_tokenizer, ["#### 2"]))
    sampled = [*tiny_tokenizer.encode("#### 2"), tiny_tokenizer.end_of_turn_id]
    assert (trajectory.status, trajectory.error) == ("completed", "")
    assert trajectory.token_ids[trajectory.prompt_tokens :] == sampled
    assert trajectory.rollout_log_probs[trajectory.prompt_tokens :] == [
        scripted_log_prob(id) for id in sampled
    ]
    assert trajectory.reward_terms == {"outcome": 1.0}
    assert trajectory.metrics == {"acc": 1.0, "answered": 1.0}


async def test_sampled_tokens_are_kept_and_observations_come_between_them_with_mask_0(
    tiny_tokenizer,
):
    # Odd spacing and key order: what would change if the call were rendered again.
    odd = '<tool_call>{"arguments":  {},"name": "counter"}</tool_call>'
    trajectory = await play(make_agent(tiny_tokenizer, [odd, "#### 2"], CounterTool()))
    text = tiny_tokenizer.decode(trajectory.token_ids[trajectory.prompt_tokens :])
    assert text == (
        odd + "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n#### 2<|im_end|>"
    )
    masked = [
        id for id, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask
    ]
    assert tiny_tokenizer.decode(masked) == odd + "<|im_end|>#### 2<|im_end|>"
    assert [turn.finish for turn in trajectory.turns] == ["stop", "stop"]


async def test_turns_have_seeds_of_their_own_that_depend_on_nothing_else(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], CounterTool())
    await play(agent)
    assert [request.seed for request in agent.engine.requests] == [
        derive_seed(0, 0),
        derive_seed(0, 1),
    ]
    # Fixed for ever, or old runs cannot be repeated: first 8 bytes of `printf 1,2 | b2sum -l 64`, little-endian.
    assert derive_seed(1, 2) == 8485882570109257902
    assert len({derive_seed(a, b) for a in range(20) for b in range(20)}) == 400


# --- limits -----------------------------------------------------------------------------------------------------


async def test_a_prompt_that_is_too_long_is_rejected_whole(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    tokens = (await play(agent)).prompt_tokens
    fits = await play(make_agent(tiny_tokenizer, ["#### 2"]), max_prompt_tokens=tokens)
    assert fits.status == "completed"

    trajectory = await play(make_agent(tiny_tokenizer, ["#### 2"]), max_prompt_tokens=tokens - 1)
    assert trajectory.status == "prompt_too_long"
    assert trajectory.prompt_tokens == tokens == len(trajectory.token_ids)
    assert f"{tokens} tokens exceed max_prompt_tokens={tokens - 1}" in trajectory.error
    assert (trajectory.reward, trajectory.reward_terms, trajectory.metrics) == (0.0, {}, {})


async def test_a_prompt_that_leaves_no_room_is_rejected(tiny_tokenizer):
    tokens = (await play(make_agent(tiny_tokenizer, ["#### 2"]))).prompt_tokens
    trajectory = await play(make_agent(tiny_tokenizer, ["#### 2"]), max_trajectory_tokens=tokens)
    assert trajectory.status == "prompt_too_long"
    assert f"leave no room in the {tokens} of a trajectory" in trajectory.error
    agent = make_agent(tiny_tokenizer, ["#### 2"], max_model_tokens=tokens)
    assert (await play(agent)).status == "prompt_too_long"


async def test_a_turn_that_ends_by_length_ends_the_trajectory_with_its_tokens(tiny_tokenizer):
    trajectory = await play(make_agent(tiny_tokenizer, ["#### 2 or so"]), max_tokens_per_turn=6)
    assert trajectory.status == "max_tokens"
    assert tiny_tokenizer.decode(trajectory.token_ids[trajectory.prompt_tokens :]) == "#### 2"
    assert trajectory.turns[0].finish == "length"
    assert trajectory.reward == 1.0


async def test_the_engine_is_never_asked_for_more_than_what_is_left(tiny_tokenizer):
    tokens = (await play(make_agent(tiny_tokenizer, ["#### 2"]))).prompt_tokens
    for max_trajectory_tokens, max_model_tokens in ((tokens + 3, 4096), (4096, tokens + 3)):
        agent = make_agent(tiny_tokenizer, ["#### 2"], max_model_tokens=max_model_tokens)
        trajectory = await play(agent, max_trajectory_tokens=max_trajectory_tokens)
        assert agent.engine.requests[0].max_tokens == 3
        assert len(trajectory.token_ids) == tokens + 3
        assert trajectory.status == "max_tokens"


async def test_the_last_allowed_turn_runs_no_tools(tiny_tokenizer):
    tool = CounterTool()
    trajectory = await play(make_agent(tiny_tokenizer, [call("counter")] * 3, tool), max_turns=2)
    assert trajectory.status == "max_turns"
    assert statuses(trajectory) == [["ok"], ["not_executed"]]
    assert tool.times("execute") == 1
    assert trajectory.loss_mask[-1]
    assert trajectory.messages[-1]["role"] == "assistant"


async def test_the_trajectory_deadline_keeps_what_was_sampled_and_releases_tools(tiny_tokenizer):
    tool = HangingTool()
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    started = time.monotonic()
    trajectory = await play(agent, trajectory_timeout_s=0.2)
    assert time.monotonic() - started < 2
    assert (trajectory.status, trajectory.error) == ("timeout", "not finished within 0.2 s")
    assert statuses(trajectory) == [["timeout"]]
    assert sum(trajectory.loss_mask) == trajectory.turns[0].end - trajectory.turns[0].start
    assert tool.times("release") == 1


async def test_the_trajectory_deadline_covers_generation(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"], delay_s=30)
    trajectory = await play(agent, trajectory_timeout_s=0.1)
    assert (trajectory.status, trajectory.turns, trajectory.reward_terms) == ("timeout", [], {})
    assert trajectory.prompt_tokens == len(trajectory.token_ids) > 0


# --- pain point 17: what exactly fits, fits ----------------------------------------------------------------------


async def fitted(tokenizer, room, result: str = "0123456789" * 4):
    """A trajectory with `room` tokens left after the first turn, which calls a tool that answers `result`."""
    first = call("echo", text=result)
    agent = make_agent(tokenizer, [first, "#### 2"], EchoTool())
    free = await play(agent)
    used = free.turns[0].end
    observation = free.turns[1].start - used
    agent = make_agent(tokenizer, [first, "#### 2"], EchoTool())
    return used, observation, await play(agent, max_trajectory_tokens=used + room(observation))


async def test_an_observation_that_fits_exactly_is_kept_and_then_the_trajectory_stops(
    tiny_tokenizer,
):
    """Pain point 17."""
    used, observation, trajectory = await fitted(tiny_tokenizer, lambda observation: observation)
    assert trajectory.status == "max_tokens"
    assert len(trajectory.token_ids) == used + observation
    assert tool_messages(trajectory) == ["0123456789" * 4]
    assert not trajectory.turns[0].calls[0].truncated


async def test_an_observation_one_token_too_long_loses_its_middle(tiny_tokenizer):
    """Pain point 17."""
    used, observation, trajectory = await fitted(
        tiny_tokenizer, lambda observation: observation - 1
    )
    assert trajectory.status == "max_tokens"
    assert len(trajectory.token_ids) == used + observation - 1
    # 39 tokens, of which the marker takes 17: 11 digits remain at each end.
    assert tool_messages(trajectory) == ["01234567890" + MARKER + "90123456789"]
    record = trajectory.turns[0].calls[0]
    assert (record.result, record.truncated) == ("01234567890" + MARKER + "90123456789", True)
    assert record.result_tokens == 39


async def test_an_observation_whose_frame_does_not_fit_is_left_out_and_sampled_tokens_stay(
    tiny_tokenizer,
):
    """Pain point 17."""
    used, _, trajectory = await fitted(tiny_tokenizer, lambda observation: 20)
    assert trajectory.status == "max_tokens"
    assert len(trajectory.token_ids) == used
    assert trajectory.loss_mask[-1]
    assert tool_messages(trajectory) == []
    record = trajectory.turns[0].calls[0]
    assert (record.status, record.result, record.truncated) == ("ok", "", True)


async def test_results_are_cut_in_tokens_not_in_characters(tiny_tokenizer):
    # "é" is two tokens here; a character is never cut in half.
    agent = make_agent(tiny_tokenizer, [call("echo", text="é" * 40), "#### 2"], EchoTool())
    trajectory = await play(agent, max_tool_result_tokens=30)
    # 30 - 17 = 13 tokens: 7 in front, of which the last is half a character, and 6 behind.
    assert tool_messages(trajectory) == ["ééé" + MARKER + "ééé"]
    assert trajectory.status == "completed"


async def test_an_enormous_result_is_cut_too(tiny_tokenizer):
    class Enormous(CounterTool):
        async def answer(self, instance_id, parameters):
            return ToolResponse(text="a" + "x" * 2_000_000 + "z"), 0.0, {}

    trajectory = await play(
        make_agent(tiny_tokenizer, [call("counter"), "#### 2"], Enormous()),
        max_tool_result_tokens=27,
    )
    assert tool_messages(trajectory) == ["axxxx" + MARKER + "xxxxz"]


# --- engine faults ----------------------------------------------------------------------------------------------


class _Returning(ScriptedEngine):
    """Returns one fixed result, or raises it."""

    def __init__(self, tokenizer, result):
        super().__init__(tokenizer, [])
        self._fixed = result

    async def generate(self, request):
        if isinstance(self._fixed, Exception):
            raise self._fixed
        return self._fixed


def _result(ids, log_probs=None, finish: Literal["stop", "length", "aborted"] = "length"):
    log_probs = [-1.0] * len(ids) if log_probs is None else log_probs
    return GenerateResult(token_ids=ids, log_probs=log_probs, finish=finish, policy_version=0)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (RuntimeError("out of memory"), "out of memory"),
        (_result([5, 6], [-1.0]), "2 ids with 1 log-probs"),
        (_result([]), "returned no token"),
        (_result([5], [float("nan")]), "the log-prob nan for id 5"),
        (_result([5], [float("-inf")]), "the log-prob -inf for id 5"),
        (_result([10**6]), "returned the id 1000000"),
        (_result([5], finish="stop"), "stopped at id 5, which is not a stop id"),
        (_result([5] * 9), "returned 9 ids, 8 were allowed"),
    ],
)
async def test_what_cannot_be_trained_on_is_an_engine_error(tiny_tokenizer, result, error):
    agent = make_agent(tiny_tokenizer, [], CounterTool())
    agent.engine = _Returning(tiny_tokenizer, result)
    trajectory = await play(agent, max_tokens_per_turn=8)
    assert trajectory.status == "engine_error"
    assert error in trajectory.error
    assert (sum(trajectory.loss_mask), trajectory.reward_terms) == (0, {})


async def test_an_engine_error_in_a_later_turn_keeps_the_earlier_ones(tiny_tokenizer):
    tool = CounterTool()
    trajectory = await play(make_agent(tiny_tokenizer, [call("counter")], tool))
    assert trajectory.status == "engine_error"
    assert "the script has 1 turns, and turn 2 was asked" in trajectory.error
    assert statuses(trajectory) == [["ok"]]
    assert tool.times("release") == 1


async def test_an_aborted_generation_keeps_its_tokens(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [])
    agent.engine = _Returning(tiny_tokenizer, _result([5, 6], finish="aborted"))
    trajectory = await play(agent)
    assert trajectory.status == "aborted"
    assert sum(trajectory.loss_mask) == 2


async def test_a_conversation_that_the_template_rejects_is_no_crash(tiny_tokenizer):
    task = make_task(messages=[{"role": "user", "content": 5}])
    trajectory = await play(make_agent(tiny_tokenizer, ["#### 2"]), task)
    assert trajectory.status == "engine_error"
    assert trajectory.error.startswith("the prompt could not be rendered: ")


# --- rewards ----------------------------------------------------------------------------------------------------


async def test_rewards_of_tools_are_weighted_terms(tiny_tokenizer):
    """Pain point 5."""
    script = [call("counter"), call("counter"), "#### 2"]
    agent = make_agent(tiny_tokenizer, script, PenaltyTool())
    trajectory = await play(agent, weights=RewardWeights(tool=1.0))
    # 1 for the answer, twice -0.05 for the calls.
    assert trajectory.reward_terms == {"outcome": 1.0, "tool/counter": -0.1}
    assert trajectory.reward == pytest.approx(0.9)
    assert trajectory.metrics["tool_reward/counter"] == -0.1
    assert [turn.calls[0].reward for turn in trajectory.turns[:2]] == [-0.05, -0.05]


async def test_rewards_of_tools_that_are_ignored_are_warned_about_once(tiny_tokenizer, caplog):
    """Pain point 5."""
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], PenaltyTool())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            trajectory = await play(agent, weights=RewardWeights())
            assert trajectory.reward_terms == {"outcome": 1.0}
            assert trajectory.metrics["tool_reward/counter"] == -0.05
    assert [record.message for record in caplog.records] == [
        "tool 'counter' returned the reward -0.05, which is ignored because its weight is 0"
        " (set reward.tool)"
    ]


async def test_a_successful_call_earns_its_reward_once(tiny_tokenizer):
    script = [call("counter"), call("counter"), "#### 3"]
    weights = RewardWeights(valid_call=0.25)
    trajectory = await play(make_agent(tiny_tokenizer, script, CounterTool()), weights=weights)
    assert trajectory.reward_terms == {"outcome": 0.0, "valid_call": 0.25}
    trajectory = await play(make_agent(tiny_tokenizer, script, RaisingTool()), weights=weights)
    assert trajectory.reward_terms == {"outcome": 0.0, "valid_call": 0.0}


async def test_a_tool_cannot_earn_the_reward_for_the_policy(tiny_tokenizer):
    tool = SayingTool("#### 2")
    trajectory = await play(make_agent(tiny_tokenizer, [call("counter"), "I don't know"], tool))
    assert trajectory.reward == 0.0


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise KeyError('x')", "reward: KeyError: 'x'"),
        ("return float('nan')", "expected a finite number"),
        ("return 'good'", "expected a number or a dict"),
    ],
)
async def test_a_reward_function_that_fails_leaves_the_trajectory_unscored(
    tiny_tokenizer, tmp_path, body, error
):
    file = tmp_path / "reward.py"
    file.write_text(f"def compute_score(**kwargs):\n    {body}\n")
    tool = CounterTool()
    agent = make_agent(tiny_tokenizer, ["#### 2"], tool, reward=f"{file}:compute_score")
    trajectory = await play(agent, weights=RewardWeights(valid_call=1.0))
    assert (trajectory.status, trajectory.scored) == ("completed", False)
    assert (trajectory.reward_terms, trajectory.metrics) == ({}, {})
    assert error in trajectory.error
    assert agent.metrics.value("reward_errors_total") == 1
    assert tool.times("release") == 1


async def test_a_reward_function_sees_what_verl_shows(tiny_tokenizer, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert (data_source, ground_truth) == ('openai/gsm8k', '2')\n"
        "    assert solution_str.endswith('#### 2') and 'tool_response' not in solution_str\n"
        "    assert extra_info == {\n"
        "        'index': 7, 'num_turns': 4, 'tool_rewards': [0.0], 'turn_scores': [],\n"
        "        'rollout_reward_scores': {'counter': 0.0, 'user_turn_rewards': []},\n"
        "    }\n"
        "    return {'score': 0.5, 'style': 'terse', 'length': 3}\n"
    )
    task = make_task(extra_info={"index": 7})
    script = [call("counter"), "#### 2"]
    agent = make_agent(tiny_tokenizer, script, CounterTool(), reward=f"{file}:compute_score")
    trajectory = await play(agent, task)
    assert (trajectory.error, trajectory.reward_terms) == ("", {"outcome": 0.5})
    assert trajectory.metrics == {"length": 3.0}


async def test_a_fault_of_ours_is_one_trajectory_lost_and_not_the_batch(tiny_tokenizer):
    tool = CounterTool()
    agent = make_agent(tiny_tokenizer, ["#### 2"], tool)
    agent.scorer = None  # type: ignore[assignment]
    trajectory = await play(agent)
    assert trajectory.status == "engine_error"
    assert trajectory.error.startswith("internal error: AttributeError")
    assert tool.times("release") == 1


async def test_the_prefix_is_released_when_the_trajectory_ends(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    await play(agent)
    assert agent.engine.released == ["r:0"]


def test_limits_must_be_positive():
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 1 - at `\$.max_turns`"):
        msgspec.json.decode(b'{"max_turns": 0}', type=Limits)
