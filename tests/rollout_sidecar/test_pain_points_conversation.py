"""Known failures of multi-turn training, from a policy's ids to its trajectory: what an agent must not get wrong."""

from typing import Literal

import pytest
from sidecar_cases import CounterTool, EchoTool, call, make_agent, make_task, play, tool_messages

from rollout_sidecar.engines.base import GenerateResult
from rollout_sidecar.engines.scripted import ScriptedEngine

END = 2
"""<|im_end|> of the tiny tokenizer: its padding token too."""


class Sampling(ScriptedEngine):
    """Returns ids as they are given, turn by turn: a policy samples what no tokenizer would write."""

    def __init__(self, tokenizer, *turns: list[int], finish: Literal["stop", "length"] = "stop"):
        super().__init__(tokenizer, [])
        self._left = list(turns)
        self._finish: Literal["stop", "length"] = finish

    async def generate(self, request):
        self.requests.append(request)
        ids = self._left.pop(0)
        return GenerateResult(
            token_ids=ids, log_probs=[-1.0] * len(ids), finish=self._finish, policy_version=0
        )


def sampled(trajectory) -> list[int]:
    pairs = zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
    return [token for token, by_policy in pairs if by_policy]


async def test_ids_of_a_call_in_unusual_spelling_reach_the_trajectory_unchanged(tiny_tokenizer):
    """Pain points 1 and 2: reversed keys, two spaces, a token a byte; a separator that was never sampled."""
    text = '<tool_call>{"arguments": {"text":"é"},  "name": "echo"}</tool_call>'
    ids = [token for character in text for token in tiny_tokenizer.encode(character)] + [END]
    assert ids[:-1] != tiny_tokenizer.encode(text)  # the tokenizer merges the two spaces
    answer = [*tiny_tokenizer.encode("#### 2"), END]
    agent = make_agent(tiny_tokenizer, [], EchoTool())
    agent.engine = Sampling(tiny_tokenizer, ids, answer)
    trajectory = await play(agent)
    assert tool_messages(trajectory) == ["é"]
    assert sampled(trajectory) == ids + answer
    # The second turn was sampled after exactly the first one's ids, a line break, and the next message.
    context = agent.engine.requests[1].token_ids
    start = trajectory.prompt_tokens
    assert context[start : start + len(ids)] == ids
    assert tiny_tokenizer.decode(context[start + len(ids) :]).startswith("\n<|im_start|>user\n")
    assert trajectory.token_ids[: len(context)] == context


async def test_a_call_in_thinking_text_is_not_run(tiny_tokenizer):
    """Pain point 10."""
    tool = CounterTool()
    script = [f"<think>call {call('counter')}</think>{call('counter')}", "#### 2"]
    trajectory = await play(make_agent(tiny_tokenizer, script, tool))
    assert (tool.times("execute"), tool_messages(trajectory)) == (1, ["1"])
    tool = CounterTool()
    trajectory = await play(make_agent(tiny_tokenizer, [f"<think>{call('counter')}"], tool))
    assert (tool.times("execute"), trajectory.status) == (0, "completed")


async def test_assistant_turns_of_the_prompt_are_not_trained_on(tiny_tokenizer):
    """Pain point 18: worked examples were written by somebody else."""
    shown = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "#### 2"},
        {"role": "user", "content": "Count to two."},
    ]
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    trajectory = await play(agent, make_task(messages=shown))
    assert "#### 2" in tiny_tokenizer.decode(trajectory.token_ids[: trajectory.prompt_tokens])
    assert not any(trajectory.loss_mask[: trajectory.prompt_tokens])
    assert sampled(trajectory) == [*tiny_tokenizer.encode("#### 2"), END]


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("ids", [[50, END, 51, END], [50, END, END]], ids=["went on", "twice"])
async def test_an_engine_that_runs_past_a_stop_id_is_an_engine_error(tiny_tokenizer, ids, finish):
    """Pain point 25: what comes after the end of a turn was sampled in a context that no template writes."""
    agent = make_agent(tiny_tokenizer, [])
    agent.engine = Sampling(tiny_tokenizer, ids, finish=finish)
    trajectory = await play(agent)
    assert trajectory.status == "engine_error"
    assert trajectory.error == f"the engine went on after the stop id {END}"
    assert not any(trajectory.loss_mask)


async def test_the_stop_id_is_there_once_and_is_trained_on_though_it_is_the_padding_too(
    tiny_tokenizer,
):
    """Pain point 25."""
    trajectory = await play(make_agent(tiny_tokenizer, [call("counter"), "#### 2"], CounterTool()))
    for turn in trajectory.turns:
        ids = trajectory.token_ids[turn.start : turn.end]
        assert ids.count(END) == 1
        assert ids[-1] == END
        assert trajectory.loss_mask[turn.end - 1]
