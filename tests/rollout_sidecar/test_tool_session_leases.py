"""What a trajectory cannot release is reaped, and tools start and stop with the sidecar."""

import asyncio
import gc
import logging

import pytest
from sidecar_cases import CounterTool, Signal, call, make_agent, make_request, play, serving, until

from rollout_sidecar.agent import Agent
from rollout_sidecar.leases import REAP_ATTEMPTS
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.sidecar import ServerOptions, Sidecar
from rollout_sidecar.tool_session import ToolSession

# --- leaked instances ---------------------------------------------------------------------------------------------


class LateTool(CounterTool):
    """Ignores being cancelled while it is made; can be let go later."""

    def __init__(self):
        super().__init__()
        self.go = Signal()

    async def create(self, instance_id=None, **kwargs):
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                pass
        return await super().create(instance_id, **kwargs)


async def test_an_instance_that_comes_after_its_trajectory_is_gone_is_reaped(tiny_tokenizer):
    tool = LateTool()
    agent = make_agent(tiny_tokenizer, ["#### 2"], tool)
    assert (await play(agent, tool_timeout_s=0.05)).status == "tool_error"
    assert agent.leases.live == 1
    assert await agent.leases.sweep() == 0  # nothing there to release yet
    tool.go.set()
    await until(lambda: tool.counts)
    assert list(tool.counts) == ["r:0"]
    await asyncio.sleep(0.05)  # until it is known here
    assert await agent.leases.sweep() == 1
    assert (tool.counts, tool.times("release"), agent.leases.live) == ({}, 1, 0)
    assert "tooljax_sidecar_reaped_instances 1" in agent.metrics.render()


async def test_a_release_that_hangs_is_tried_again_and_then_given_up(
    tiny_tokenizer, monkeypatch, caplog
):
    monkeypatch.setattr("rollout_sidecar.leases.END_TIMEOUT_S", 0.02)

    class Stuck(CounterTool):
        async def release(self, instance_id, **kwargs):
            self.note("release", instance_id, kwargs)
            await asyncio.sleep(60)

    tool = Stuck()
    agent = make_agent(tiny_tokenizer, ["#### 2"], tool)
    assert (await play(agent)).status == "completed"
    with caplog.at_level(logging.ERROR):
        for _ in range(REAP_ATTEMPTS + 2):
            await agent.leases.sweep()
    assert tool.times("release") == 1 + REAP_ATTEMPTS
    assert (agent.leases.live, agent.leases.reaped, agent.leases.leaked) == (0, 0, 1)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"an instance could not be closed in {REAP_ATTEMPTS} attempts, and is left"
    ]


async def test_instances_whose_session_vanished_are_reaped(tiny_tokenizer):
    tool = CounterTool()
    agent: Agent = make_agent(tiny_tokenizer, [], tool)
    session = ToolSession(
        agent.tools, "lost", {}, timeout_s=1.0, metrics=Metrics(), leases=agent.leases
    )
    await session.open()
    assert await agent.leases.sweep() == 0  # somebody has it
    del session
    gc.collect()
    assert await agent.leases.sweep() == 1
    assert (tool.counts, agent.leases.live) == ({}, 0)


async def test_the_sidecar_reaps_at_a_period_and_when_it_stops(tiny_tokenizer):
    for period_s in (0.02, 60.0):
        tool = LateTool()
        agent = make_agent(tiny_tokenizer, ["#### 2"], tool)
        async with serving(agent, reap_period_s=period_s):
            await play(agent, tool_timeout_s=0.05)
            tool.go.set()
            if period_s < 1:
                async with asyncio.timeout(5):
                    while tool.times("release") == 0:
                        await asyncio.sleep(0.01)
            else:
                await until(lambda tool=tool: tool.counts)
                await asyncio.sleep(0.05)  # until it is known here
        assert (tool.times("release"), tool.counts, agent.leases.live) == (1, {}, 0)


# --- startup and shutdown -------------------------------------------------------------------------------------------


class Started(CounterTool):
    """Logs its startup and shutdown, and fails them as told."""

    def __init__(self, name="counter", fails="", order=None):
        super().__init__(name)
        self.fails = fails
        self.order: list[str] = [] if order is None else order

    async def startup(self):
        self.order.append(f"start {self.name}")
        if self.fails == "startup":
            raise OSError("bwrap: no such file")
        if self.fails == "hang":
            await asyncio.sleep(60)

    async def shutdown(self):
        self.order.append(f"stop {self.name}")
        if self.fails == "shutdown":
            raise OSError("gone")


async def test_tools_start_before_the_first_rollout_and_stop_after_the_last(tiny_tokenizer, caplog):
    order: list[str] = []

    class Ordered(Started):
        async def release(self, instance_id, **kwargs):
            await super().release(instance_id)
            self.order.append("release")

        async def answer(self, instance_id, parameters):
            await asyncio.sleep(60)

    class Plain(CounterTool):
        startup = shutdown = None  # type: ignore[assignment]

    tools = [Ordered("a", order=order), Started("b", "shutdown", order=order), Plain("c")]
    agent = make_agent(tiny_tokenizer, [call("a")], *tools)
    sidecar = Sidecar(agent, ServerOptions())
    await sidecar.start()
    assert sorted(order) == ["start a", "start b"]
    sidecar.rollouts.submit(make_request(), sidecar.admit)
    async with asyncio.timeout(5):
        while tools[0].times("execute") == 0:
            await asyncio.sleep(0.01)
    with caplog.at_level(logging.WARNING):
        await sidecar.stop()
    assert sorted(order[:2]) == ["start a", "start b"]
    assert order[2] == "release"
    assert sorted(order[3:]) == ["stop a", "stop b"]
    assert [r.message for r in caplog.records] == ["shutdown of tool 'b' failed: gone"]


async def test_tools_that_cannot_start_end_the_start_and_are_all_named(tiny_tokenizer):
    order: list[str] = []
    tools = [
        Started("a", order=order),
        Started("b", "startup", order=order),
        Started("c", "hang", order=order),
    ]
    agent = make_agent(tiny_tokenizer, [], *tools)
    sidecar = Sidecar(agent, ServerOptions(tool_start_timeout_s=0.05))
    problem = (
        r"startup failed of tool 'b': bwrap: no such file; of tool 'c': no result within 0.05 s"
    )
    with pytest.raises(ValueError, match=problem):
        await sidecar.start()
    assert not sidecar.is_ready()
    assert sorted(order) == ["start a", "start b", "start c", "stop a", "stop b", "stop c"]
    await sidecar.stop()
    assert len(order) == 6


async def test_an_engine_that_cannot_start_stops_the_tools(tiny_tokenizer):
    tool = Started()
    agent = make_agent(tiny_tokenizer, [], tool)

    async def fail():
        raise ValueError("no model")

    agent.engine.start = fail
    with pytest.raises(ValueError, match="no model"):
        await Sidecar(agent, ServerOptions()).start()
    assert tool.order == ["start counter", "stop counter"]
