"""How long instances of tools live in verl's profiles, and what stands between trajectories and a tool."""

import asyncio

import pytest
from sidecar_cases import (
    CounterTool,
    HangingTool,
    PenaltyTool,
    Signal,
    call,
    make_agent,
    make_request,
    make_task,
    play,
    statuses,
    tool_messages,
)

from rollout_sidecar.agent import run_rollout
from rollout_sidecar.profiles import get_profile
from rollout_sidecar.protocol import Limits, RewardWeights
from rollout_sidecar.tools.base import ToolFailure, ToolResponse


def agent_of(tokenizer, script, *tools, profile="default"):
    agent = make_agent(tokenizer, script, *tools)
    agent.profile = get_profile(profile)
    return agent


class PerCallTool(CounterTool):
    """Written for verl 0.5 and later: create makes up the id, and kwargs come nested."""

    made = 0

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        self.made += 1
        self.note("create", instance_id, {"create_kwargs": create_kwargs, **kwargs})
        self.counts[f"i{self.made}"] = 0
        return f"i{self.made}", ToolResponse(text="not shown")


# --- profiles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["B", "C"])
async def test_in_profiles_b_and_c_an_instance_lives_for_one_call(tiny_tokenizer, profile):
    tool = PerCallTool()
    script = [call("counter"), call("counter") * 2, "#### 2"]
    agent = agent_of(tiny_tokenizer, script, tool, profile=profile)
    kwargs = {
        "create_kwargs": {"ground_truth": "2", "unused": None},
        "execute_kwargs": {"a": 1},
        "release_kwargs": {"b": 2},
    }
    trajectory = await play(agent, make_task(tools_kwargs={"counter": kwargs}))
    assert tool_messages(trajectory) == ["1", "1", "1"]
    assert [name for name, _ in tool.log][:3] == ["create", "execute", "release"]
    assert (
        sorted(name for name, _ in tool.log) == ["create"] * 3 + ["execute"] * 3 + ["release"] * 3
    )
    # No id for create, its kwargs as one argument; execute gets agent_data alone, release nothing.
    assert tool.log[0] == ("create", "")
    assert tool.log[1:3] == [("execute", "i1"), ("release", "i1")]
    assert tool.kwargs[0] == {"create_kwargs": {"ground_truth": "2"}}
    assert list(tool.kwargs[1]) == ["agent_data"]
    assert tool.kwargs[2] == {}
    assert (tool.counts, agent.leases.live) == ({}, 0)
    assert "not shown" not in tiny_tokenizer.decode(trajectory.token_ids)


async def test_agent_data_shows_the_trajectory_and_keeps_what_a_tool_puts_there(tiny_tokenizer):
    seen = []

    class Curious(PerCallTool):
        async def execute(self, instance_id, parameters, agent_data=None):  # type: ignore[override]
            assert agent_data is not None
            extra = agent_data.extra_fields
            extra["calls"] = extra.get("calls", 0) + 1
            roles = [message["role"] for message in agent_data.messages]
            seen.append((agent_data.request_id, agent_data.user_turns, extra["calls"], roles))
            agent_data.messages.clear()  # theirs to spoil
            return ToolResponse(text="ok"), -0.5, {}

    script = [call("counter"), call("counter"), "#### 2"]
    trajectory = await play(agent_of(tiny_tokenizer, script, Curious(), profile="C"))
    turn = ["assistant", "tool"]
    assert seen == [
        ("r:0", 0, 1, ["user", "assistant"]),
        ("r:0", 1, 2, ["user", *turn, "assistant"]),
    ]
    assert [message["role"] for message in trajectory.messages] == [
        "user",
        *turn,
        *turn,
        "assistant",
    ]


async def test_agent_data_is_not_forced_on_a_method_that_does_not_take_it(tiny_tokenizer):
    class Plain(PerCallTool):
        async def execute(self, instance_id, parameters):  # type: ignore[override]
            return ToolResponse(text="plain"), 0.0, {}

    trajectory = await play(
        agent_of(tiny_tokenizer, [call("counter"), "#### 2"], Plain(), profile="B")
    )
    assert tool_messages(trajectory) == ["plain"]


@pytest.mark.parametrize("profile", ["B", "C"])
async def test_rewards_of_calls_count_where_calc_reward_is_not_called(tiny_tokenizer, profile):
    """Pain point 5."""

    class Costly(PerCallTool, PenaltyTool):
        pass

    agent = agent_of(tiny_tokenizer, [call("counter"), "#### 2"], Costly(), profile=profile)
    request = make_request(
        limits=Limits(max_tokens_per_turn=1024), reward_weights=RewardWeights(tool=1.0)
    )
    trajectory = await run_rollout(agent, request.tasks[0], request.rollouts[0], request)
    assert trajectory.reward_terms == {"outcome": 1.0, "tool/counter": -0.05}


@pytest.mark.parametrize("fails", ["create", "execute", "hang", "release"])
async def test_per_call_instances_are_released_whatever_fails(tiny_tokenizer, fails):
    class Failing(PerCallTool):
        async def create(self, instance_id=None, create_kwargs=None, **kwargs):
            if fails == "create":
                raise OSError("no sandbox left")
            return await super().create(instance_id, create_kwargs)

        async def answer(self, instance_id, parameters):
            if fails == "hang":
                await asyncio.sleep(60)
            raise RuntimeError("no such table")

        async def release(self, instance_id, **kwargs):
            await super().release(instance_id)
            if fails == "release":
                raise OSError("gone")

    tool = Failing()
    agent = agent_of(tiny_tokenizer, [call("counter"), "#### 2"], tool, profile="B")
    trajectory = await play(agent, tool_timeout_s=0.1)
    assert trajectory.status == "completed"
    assert statuses(trajectory)[0] == ["timeout" if fails == "hang" else "error"]
    told = {
        "create": "Error executing tool 'counter': create of tool 'counter': no sandbox left",
        "hang": "Error executing tool 'counter': no result within 0.1 s",
    }.get(fails, "Error executing tool 'counter': no such table")
    assert tool_messages(trajectory) == [told]
    assert tool.times("create") == tool.times("release") == (0 if fails == "create" else 1)
    assert (tool.counts, agent.leases.live) == ({}, 0)


@pytest.mark.parametrize("where", ["create", "execute", "release"])
async def test_cancelling_releases_per_call_instances_exactly_once(tiny_tokenizer, where):
    """Pain point 15."""
    reached, go = Signal(), Signal()

    class Slow(PerCallTool):
        async def pause(self, at):
            if at == where:
                reached.set()
                await go.wait()

        async def create(self, instance_id=None, create_kwargs=None, **kwargs):
            await self.pause("create")
            return await super().create(instance_id, create_kwargs)

        async def answer(self, instance_id, parameters):
            await self.pause("execute")
            return ToolResponse(text="ok"), 0.0, {}

        async def release(self, instance_id, **kwargs):
            await self.pause("release")
            await super().release(instance_id)

    tool = Slow()
    agent = agent_of(tiny_tokenizer, [call("counter")] * 2, tool, profile="C")
    request = make_request()
    rollout = asyncio.create_task(
        run_rollout(agent, request.tasks[0], request.rollouts[0], request)
    )
    await reached.wait()
    rollout.cancel()
    await asyncio.sleep(0.05)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert (tool.times("create"), tool.times("release"), tool.counts) == (1, 1, {})
    assert (agent.closing, agent.leases.live) == (set(), 0)


async def test_profile_a_offers_the_tools_that_the_row_names(tiny_tokenizer):
    tools = [CounterTool(name) for name in ("one", "two", "three")]
    agent = agent_of(tiny_tokenizer, ["#### 2"], *tools, profile="A")
    # Tables have a key for every tool of any row, and None where it is not this row's.
    task = make_task(tools_kwargs={"three": {"create_kwargs": {}}, "one": {}, "two": None})
    await play(agent, task)
    assert [tool.times("create") for tool in tools] == [1, 0, 1]
    await play(agent, make_task(tools_kwargs={"two": None}))  # names none: all
    assert [tool.times("create") for tool in tools] == [2, 1, 2]
    await play(agent, make_task(tools=["two"], tools_kwargs={"one": {}}))
    assert [tool.times("create") for tool in tools] == [2, 2, 2]
    trajectory = await play(agent, make_task(tools_kwargs={"four": {}}))
    assert trajectory.status == "tool_error"
    assert "offers the tool 'four', which this sidecar lacks" in trajectory.error


async def test_kwargs_for_a_tool_that_is_not_there_are_warned_about_once(tiny_tokenizer, caplog):
    agent = make_agent(tiny_tokenizer, ["#### 2"], CounterTool("one"))
    for kwargs in ({"two": {"create_kwargs": {"a": 1}}, "one": {}}, {"two": {}, "three": None}):
        trajectory = await play(agent, make_task(tools_kwargs=kwargs))
        assert trajectory.status == "completed"
    told = [record.message for record in caplog.records if "tools_kwargs" in record.message]
    assert told == [
        "tasks have tools_kwargs for the tool 'two', which this sidecar lacks; it has ['one']"
    ]


async def test_null_is_absent_at_every_level_of_a_request(tiny_tokenizer):
    tool = CounterTool()
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    for kwargs in ({"counter": None}, {"counter": {"create_kwargs": None}}):
        assert statuses(await play(agent, make_task(tools_kwargs=kwargs)))[0] == ["ok"]


# --- what the policy is told --------------------------------------------------------------------------------------


async def test_a_failure_that_found_its_words_is_told_as_it_stands(tiny_tokenizer):
    class Failing(CounterTool):
        async def answer(self, instance_id, parameters):
            raise ToolFailure("Traceback:\n  line 1\nNameError: x")

    trajectory = await play(make_agent(tiny_tokenizer, [call("counter"), "#### 2"], Failing()))
    assert statuses(trajectory) == [["error"], []]
    assert tool_messages(trajectory) == ["Traceback:\n  line 1\nNameError: x"]


async def test_the_gate_of_a_tool_s_config_holds_over_trajectories(tiny_tokenizer):
    class Unreachable(CounterTool):
        async def answer(self, instance_id, parameters):
            raise ConnectionRefusedError("refused")

    tool = Unreachable()
    tool.config = {"breaker_failures": 2}
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    played = [await play(agent) for _ in range(3)]
    assert [statuses(trajectory)[0] for trajectory in played] == [
        ["error"],
        ["error"],
        ["unavailable"],
    ]
    assert tool_messages(played[2])[0].startswith("Tool 'counter' is unavailable")
    assert tool.times("execute") == 2
    assert agent.metrics.value("tool_calls_total", tool="counter", status="unavailable") == 1
    # The trajectory goes on: that a tool is down is no invalid call.
    assert played[2].status == "completed"


async def test_attempts_waiting_and_metrics_are_recorded(tiny_tokenizer):
    class Flaky(CounterTool):
        idempotent = True

        async def answer(self, instance_id, parameters):
            if self.counts[instance_id] == 1:
                raise OSError("busy")
            return ToolResponse(text="ok"), 0.25, {"rows": 3, "note": "text", "nan": float("nan")}

    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], Flaky())
    record = (await play(agent)).turns[0].calls[0]
    assert (record.status, record.attempts, record.reward) == ("ok", 2, 0.25)
    assert record.metrics == {"rows": 3.0}
    assert record.queue_s >= 0.1  # the pause between the attempts
    assert record.latency_s < record.queue_s
    assert agent.metrics.value("tool_retries_total", tool="counter") == 1


def test_a_bad_limit_names_the_tool(tiny_tokenizer):
    tool = CounterTool()
    tool.config = {"breaker_failures": -1}
    with pytest.raises(
        ValueError, match=r"tool 'counter': breaker_failures=-1 must be a whole number from 0 on"
    ):
        make_agent(tiny_tokenizer, [], tool)


async def test_a_hanging_tool_does_not_hold_its_places_for_ever(tiny_tokenizer):
    """Pain point 13: with one place, each call waits for the one before it to meet its deadline."""
    tool = HangingTool()
    tool.config = {"max_concurrency": 1, "breaker_failures": 0}
    agent = make_agent(tiny_tokenizer, [call("counter") * 3, "#### 2"], tool)
    trajectory = await play(agent, tool_timeout_s=0.2)
    assert statuses(trajectory) == [["timeout"] * 3, []]
    waits = sorted(record.queue_s for record in trajectory.turns[0].calls)
    assert waits == pytest.approx([0.0, 0.2, 0.4], abs=0.15)
