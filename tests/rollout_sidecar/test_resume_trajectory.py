"""A trajectory taken up again after any of its turns has the tokens that it would have had anyway."""

import dataclasses
from typing import Any

import aiohttp
import msgspec
import pytest
from sidecar_cases import (
    CounterTool,
    EchoTool,
    call,
    check_trajectory,
    fault,
    make_agent,
    make_request,
    make_task,
    post,
    serving,
)

from rollout_sidecar.agent import run_rollout
from rollout_sidecar.engines.jax import JaxEngine
from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.protocol import (
    JSON,
    Limits,
    PartialTrajectory,
    ProgressFrame,
    RolloutRequest,
    RolloutSpec,
    Trajectory,
    Turn,
    VersionSpan,
    derive_seed,
    encode,
)
from rollout_sidecar.resume import is_stateless
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import ToolResponse
from tooljax.model import tiny

SEED = 7
TURN = {derive_seed(SEED, turn): turn for turn in range(8)}


class Asking(BaseInteraction):
    """Asks again until there are four answers."""

    stateless = True

    def __init__(self):
        super().__init__({})

    async def generate_response(self, instance_id, messages, **kwargs):
        turns = sum(message["role"] == "assistant" for message in messages)
        return turns == 4, f"Are you sure? ({turns})", 0.25, {}


class Echo(EchoTool):
    """Its answers hold what looks like a control token."""

    stateless = True

    async def answer(self, instance_id, parameters):
        return ToolResponse(text=f"<|im_end|>{parameters['text']}"), 0.5, {"n": 1}


def by_turn(texts: list[str]):
    """A policy that knows its turn from its seed alone, as one does that has never seen the earlier ones."""
    return lambda request, _: texts[TURN[request.seed]]


def make_agents(tokenizer, texts: list[str], *, policy: str = "keep", tool: Any = None):
    """Two that are alike and share nothing."""

    def make() -> Any:
        agent = make_agent(tokenizer, by_turn(texts), Echo() if tool is None else tool())
        agent.context_policy = policy
        agent.interactions = {"user": Asking()}
        return agent

    return make(), make()


def request(resume: PartialTrajectory | None = None, *, task: Any = None, **limits: int):
    spec = RolloutSpec(task_index=0, sample_index=0, seed=SEED, resume=resume)
    bounds = Limits(**{"max_tokens_per_turn": 1024, "max_invalid_turns": 3, **limits})
    return make_request(task, rollouts=[spec], limits=bounds)


async def play(agent, asked: RolloutRequest) -> tuple[Trajectory, list[PartialTrajectory]]:
    """The trajectory, and what was known of it after each turn."""
    known: list[PartialTrajectory] = []

    def note(frame: ProgressFrame) -> None:
        assert (frame.task_index, frame.sample_index) == (0, 0)
        partial = frame.extend(known[-1] if known else None)
        assert partial is not None
        known.append(partial)

    made = await run_rollout(agent, asked.tasks[0], asked.rollouts[0], asked, 0, note)
    assert agent.leases.live == 0
    return made, known


def essence(trajectory: Trajectory) -> Any:
    """Without what clocks and caches say."""
    record = msgspec.to_builtins(trajectory)
    for turn in record["turns"]:
        for key in ("generate_s", "cached_tokens"):
            del turn[key]
        for record_ in [*turn["calls"], *([turn["reply"]] if turn["reply"] else [])]:
            for key in ("latency_s", "queue_s"):
                record_.pop(key, None)
    return {key: value for key, value in record.items() if key not in ("total_s", "tool_s")}


CALLS = [
    call("echo", text="one"),
    call("echo", text="two") + "\n" + call("echo", text="three"),
    "<tool_call>nonsense</tool_call>",
    call("nobody"),
    "#### 2",
]


@pytest.mark.parametrize("policy", ["keep", "fork"])
async def test_a_trajectory_resumed_after_any_turn_is_the_same(tiny_tokenizer, policy):
    first, second = make_agents(tiny_tokenizer, CALLS, policy=policy)
    undisturbed, known = await play(first, request())
    assert (undisturbed.status, undisturbed.reward, len(undisturbed.turns)) == ("completed", 1.0, 5)
    assert [len(partial.turns) for partial in known] == [1, 2, 3, 4]
    for partial in known:
        resumed, later = await play(second, request(partial))
        check_trajectory(resumed)
        assert essence(resumed) == essence(undisturbed)
        # It is told of whole again, and from there on as before.
        assert [len(each.turns) for each in later] == list(range(len(partial.turns) + 1, 5))
        assert [each.token_ids for each in later] == [
            each.token_ids for each in known[len(partial.turns) :]
        ]
    # Only the turns that were missing were generated.
    assert len(second.engine.requests) == 4 + 3 + 2 + 1


THOUGHTS = ["a</think>#### 3", "b</think>#### 4", "c</think>#### 5", "d</think>#### 2"]


@pytest.mark.parametrize("policy", ["keep", "fork"])
async def test_streams_that_a_template_began_anew_are_resumed_too(think_tokenizer, policy):
    first, second = make_agents(think_tokenizer, THOUGHTS, policy=policy)
    task = make_task(interaction="user")
    undisturbed, known = await play(first, request(task=task))
    assert len(undisturbed.streams) == (4 if policy == "fork" else 1)
    assert [len(partial.streams) for partial in known] == (
        [2, 3, 4] if policy == "fork" else [1] * 3
    )
    for partial in known:
        resumed, _ = await play(second, request(partial, task=task))
        assert essence(resumed) == essence(undisturbed)


async def test_turns_without_an_executable_call_are_counted_across_sidecars(tiny_tokenizer):
    first, second = make_agents(tiny_tokenizer, ["<tool_call>nonsense</tool_call>"] * 4)
    undisturbed, known = await play(first, request())
    assert (undisturbed.status, len(undisturbed.turns)) == ("invalid_calls", 3)
    resumed, _ = await play(second, request(known[1]))
    assert essence(resumed) == essence(undisturbed)


async def test_versions_within_a_turn_are_kept(tiny_tokenizer):
    first, second = make_agents(tiny_tokenizer, CALLS)
    generate = first.engine.generate

    async def swapped_meanwhile(asked):
        result = await generate(asked)
        n = len(result.token_ids)
        spans = [VersionSpan(start=0, end=2, policy_version=3)]
        spans.append(VersionSpan(start=2, end=n, policy_version=4))
        return dataclasses.replace(result, policy_version=4, version_spans=spans)

    first.engine.generate = swapped_meanwhile
    second.engine.policy_version = 5
    _, known = await play(first, request())
    resumed, _ = await play(second, request(known[1]))
    versions = [span.policy_version for span in resumed.version_spans]
    assert versions == [3, 4, 3, 4, 5, 5, 5]
    assert [turn.policy_version for turn in resumed.turns] == [4, 4, 5, 5, 5]
    assert sum(s.end - s.start for s in resumed.version_spans) == sum(resumed.loss_mask)


# --- state ------------------------------------------------------------------------------------------------------


class Counter(CounterTool):
    """Keeps a count, which no message holds."""


async def test_after_a_tool_that_keeps_state_nothing_more_is_told(tiny_tokenizer):
    texts = ["<tool_call>nonsense</tool_call>", call("counter"), call("counter"), "#### 2"]
    first, second = make_agents(tiny_tokenizer, texts, tool=Counter)
    undisturbed, known = await play(first, request())
    # The first call never reached the tool: from there it can go on, and finds the tool as new as it was.
    assert [len(partial.turns) for partial in known] == [1]
    resumed, later = await play(second, request(known[0]))
    assert essence(resumed) == essence(undisturbed)
    assert [record.result for turn in resumed.turns[1:3] for record in turn.calls] == ["1", "2"]
    assert later == []


async def test_after_an_interaction_that_keeps_state_nothing_is_told(tiny_tokenizer):
    first, _ = make_agents(tiny_tokenizer, ["#### 1", "#### 2", "#### 3", "#### 2"])
    first.interactions["user"].stateless = False
    made, known = await play(first, request(task=make_task(interaction="user")))
    assert (len(made.turns), known) == (4, [])


def test_the_config_may_say_what_the_class_does_not():
    counter, echo = Counter(), Echo()
    assert not is_stateless(counter)
    counter.config = {"stateless": True}
    assert is_stateless(counter)
    echo.config = {"stateless": False}
    assert not is_stateless(echo)
    assert not is_stateless(None)


# --- what does not fit ------------------------------------------------------------------------------------------


def spoilt(partial: PartialTrajectory, what: str) -> PartialTrajectory:
    """A partial trajectory that another sidecar would not write."""
    ids, turns = partial.token_ids, partial.turns
    changes = {
        "prompt": {"token_ids": [ids[0] + 1, *ids[1:]]},
        "shorter": {"token_ids": ids[:-1]},
        "mask": {"loss_mask": [True, *partial.loss_mask[1:]]},
        "stream": {"turns": [msgspec.structs.replace(turns[0], stream=1), *turns[1:]]},
        "place": {"turns": [msgspec.structs.replace(turns[0], end=10**6), *turns[1:]]},
        "messages": {"messages": partial.messages[:1]},
        "prompt_messages": {"prompt_messages": 0},
    }
    return msgspec.structs.replace(partial, **changes[what])


@pytest.mark.parametrize(
    "what", ["prompt", "shorter", "mask", "stream", "place", "messages", "prompt_messages"]
)
async def test_what_this_sidecar_would_write_otherwise_starts_from_the_prompt(
    tiny_tokenizer, what, caplog
):
    first, second = make_agents(tiny_tokenizer, CALLS)
    undisturbed, known = await play(first, request())
    resumed, _ = await play(second, request(spoilt(known[1], what)))
    assert essence(resumed) == essence(undisturbed)
    assert len(second.engine.requests) == 5
    assert second.metrics.value("resumes_refused_total") == 1
    assert "r:0 starts from its prompt again" in caplog.text


async def test_a_partial_that_cannot_be_this_rollouts_is_refused(tiny_tokenizer):
    first, second = make_agents(tiny_tokenizer, CALLS)
    _, known = await play(first, request())
    async with serving(second) as (url, _), aiohttp.ClientSession() as http:
        for partial, limits, message in (
            (msgspec.structs.replace(known[0], seed=8), {}, "seed=8, and the rollout's is 7"),
            (known[2], {"max_turns": 3}, "3 turns to resume after, and limits.max_turns=3"),
            (msgspec.structs.replace(known[0], turns=[]), {}, "0 turns to resume after"),
        ):
            body = encode(request(partial, **limits), JSON)
            async with http.post(f"{url}/v1/rollouts", data=body) as response:
                assert message in (await fault(response, 400, "invalid_request")).message
        (frame, _) = await post(http, url, request(known[2]))
    assert len(frame.trajectory.turns) == 5


def test_frames_that_come_again_change_nothing():
    turns = [Turn(start=i, end=i + 1, policy_version=0, finish="stop") for i in range(3)]

    def partial(i: int) -> PartialTrajectory:
        return PartialTrajectory(
            seed=1,
            turns=[turns[i]],
            token_ids=[i],
            prompt_tokens=0,
            loss_mask=[True],
            rollout_log_probs=[-1.0],
            version_spans=[],
            messages=[],
            prompt_messages=0,
        )

    frames = [
        ProgressFrame(task_index=0, sample_index=0, known_turns=i, partial=partial(i))
        for i in range(3)
    ]
    known = None
    for frame in frames:
        known = frame.extend(known)
    assert known is not None
    assert (known.token_ids, known.turns) == ([0, 1, 2], turns)
    for frame in frames:
        assert frame.extend(known) is known
    # A piece without what came before it says nothing.
    assert frames[1].extend(None) is None
    assert frames[2].extend(frames[0].extend(None)) == frames[0].partial


# --- a real model -----------------------------------------------------------------------------------------------


async def test_the_embedded_engine_goes_on_with_the_same_tokens(tmp_path):
    tiny.build(tmp_path, ["Are you sure? Count to two."], vocab=300, embed=64, layers=1, seed=0)
    agent = make_agent(ChatTokenizer.from_folder(tmp_path), [])
    # One engine: it forgets a trajectory that has ended, and reads the context of the next one anew.
    agent.engine = JaxEngine(str(tmp_path), dtype="float32", slots=1, max_model_tokens=512)
    agent.interactions = {"user": Asking()}
    agent.tokenizer.stop_ids |= frozenset(range(40, 55))  # so that one token in twenty ends a turn
    task = make_task(interaction="user", tools=[])
    await agent.engine.start()
    try:
        undisturbed, known = await play(agent, request(task=task, max_trajectory_tokens=512))
        assert (undisturbed.status, len(undisturbed.turns), len(known)) == ("completed", 4, 3)
        for partial in known:
            asked = request(partial, task=task, max_trajectory_tokens=512)
            resumed, _ = await play(agent, asked)
            assert resumed.token_ids == undisturbed.token_ids
            assert resumed.loss_mask == undisturbed.loss_mask
            # Contexts are read in one go here and were sampled token by token there: rounding differs.
            assert resumed.rollout_log_probs == pytest.approx(
                undisturbed.rollout_log_probs, abs=1e-4
            )
    finally:
        await agent.engine.close()
