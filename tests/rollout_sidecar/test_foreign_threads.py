"""Plain functions of the user's: those that hang cost their own call, and no capacity."""

import asyncio
import logging
import threading
import time

import pytest
from sidecar_cases import (
    CounterTool,
    call,
    make_agent,
    make_request,
    make_task,
    play,
    serving,
    statuses,
    until,
)

from rollout_sidecar import foreign, foreign_threads
from rollout_sidecar.agent import run_rollout
from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.errors import DeadlineError
from rollout_sidecar.foreign import bounded, exhausted, invoke, lost_threads
from rollout_sidecar.foreign_threads import LoopExecutor, Threads
from rollout_sidecar.protocol import Limits
from rollout_sidecar.rewards.registry import get_reward

HEALTHY = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "


@pytest.fixture
def threads(monkeypatch) -> Threads:
    """Four at once, of which as many may be lost."""
    monkeypatch.setattr(foreign_threads, "MAX_THREADS", 4)
    monkeypatch.setattr(foreign_threads, "MAX_LOST_THREADS", 4)
    threads = Threads()
    monkeypatch.setattr(foreign_threads, "THREADS", threads)
    monkeypatch.setattr(foreign, "THREADS", threads)
    return threads


@pytest.fixture
def go():
    """Lets go of what hangs, at the latest after the test."""
    go = threading.Event()
    yield go
    go.set()


def alive() -> int:
    return sum(thread.name == "foreign" for thread in threading.enumerate())


async def test_functions_that_hang_use_up_no_threads(threads, go, caplog):
    before = alive()

    def hang():
        go.wait()

    def healthy(x):
        return x + 1

    with caplog.at_level(logging.WARNING):
        late = await asyncio.gather(
            *(bounded(invoke(hang), 0.05) for _ in range(4)), return_exceptions=True
        )
    assert all(isinstance(error, DeadlineError) for error in late)
    assert (threads.lost, lost_threads(), exhausted()) == (4, 4, "")
    # Told once, with the name of the function.
    [warning] = [r.getMessage() for r in caplog.records]
    assert "hang did not end in time, and cannot be stopped: its thread is lost" in warning
    answers = await asyncio.gather(*(bounded(invoke(healthy, i), 5.0) for i in range(20)))
    assert answers == list(range(1, 21))
    go.set()
    await until(lambda: threads.lost == 0 and alive() - before <= 4)


async def test_functions_that_wait_for_a_thread_get_that_of_one_that_is_given_up_on(threads, go):
    hanging = [asyncio.create_task(bounded(invoke(go.wait), 0.1)) for _ in range(4)]
    await asyncio.sleep(0.02)
    assert await bounded(invoke(lambda: 7), 5.0) == 7
    await asyncio.wait(hanging)
    assert not go.is_set()


async def test_beyond_the_bound_none_is_replaced_and_the_sidecar_says_so(
    threads, go, tiny_tokenizer
):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:
        assert sidecar.is_ready()
        for _ in range(2):
            calls = [bounded(invoke(go.wait), 0.05) for _ in range(4)]
            await asyncio.gather(*calls, return_exceptions=True)
        assert threads.lost == 8
        assert "tooljax_sidecar_lost_threads 8" in agent.metrics.render()
        assert not sidecar.is_ready()
        why = "hang: 8 functions and 0 event loops did not end in time"
        assert why in sidecar.why_not_ready()
        with pytest.raises(SidecarError, match=why):
            [trajectory async for trajectory in client.rollouts(make_request())]
        with pytest.raises(DeadlineError):
            await bounded(invoke(lambda: 7), 0.05)
        go.set()
        await until(sidecar.is_ready)
        assert await bounded(invoke(lambda: 7), 5.0) == 7


async def test_a_function_that_is_given_up_on_before_its_turn_never_runs(threads, go):
    ran = []
    hanging = [asyncio.create_task(bounded(invoke(go.wait), 5.0)) for _ in range(4)]
    await asyncio.sleep(0.02)
    with pytest.raises(DeadlineError):
        await bounded(invoke(ran.append, 1), 0.05)
    assert threads.lost == 0
    go.set()
    await asyncio.wait(hanging)
    await bounded(invoke(ran.append, 2), 5.0)
    assert ran == [2]


async def test_to_thread_uses_the_same_threads(threads, go):
    asyncio.get_running_loop().set_default_executor(LoopExecutor())
    for _ in range(4):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(go.wait), 0.02)
    assert threads.lost == 4
    assert await asyncio.to_thread(threading.current_thread) is not threading.current_thread()


async def test_an_error_that_no_future_can_hold_is_told(threads):
    with pytest.raises(foreign.EndingError, match="it raised StopIteration"):
        await bounded(invoke(lambda: next(iter(()))), 5.0)


async def test_healthy_rewards_are_given_after_hanging_ones(tmp_path, threads, tiny_tokenizer):
    """Every thread hangs in a reward; what comes later is scored."""
    (tmp_path / "reward.py").write_text(
        "import threading\ngo = threading.Event()\n"
        f"{HEALTHY}return go.wait() if extra_info['hang'] else 1.0\n"
    )
    agent = make_agent(tiny_tokenizer, ["#### 2"], reward=str(tmp_path / "reward.py"))
    hang, fine = (make_task(extra_info={"hang": hang}) for hang in (True, False))

    async def play_four(task, timeout_s):
        limits = Limits(trajectory_timeout_s=timeout_s, max_tokens_per_turn=1024)
        request = make_request(task, samples=4, limits=limits)
        specs = enumerate(request.rollouts)
        return await asyncio.gather(*(run_rollout(agent, task, s, request, i) for i, s in specs))

    late = await play_four(hang, 0.1)
    assert [one.error for one in late] == ["reward: no result within 0.1 s"] * 4
    healthy = await play_four(fine, 5.0)
    assert [(one.scored, one.reward) for one in healthy] == [(True, 1.0)] * 4
    get_reward(str(tmp_path / "reward.py")).__globals__["go"].set()
    await until(lambda: threads.lost == 0)


async def test_an_instance_that_a_plain_create_makes_too_late_is_reaped(tiny_tokenizer):
    class Late(CounterTool):
        def create(self, instance_id=None, **kwargs):  # type: ignore[override]
            time.sleep(0.3)
            self.note("create", instance_id, kwargs)
            self.counts[instance_id or ""] = 0
            return instance_id

    tool = Late()
    agent = make_agent(tiny_tokenizer, ["#### 2"], tool)
    assert (await play(agent, tool_timeout_s=0.05)).status == "tool_error"
    await until(lambda: tool.counts)
    await asyncio.sleep(0.05)  # until it is known here
    assert await agent.leases.sweep() == 1
    assert (tool.counts, tool.times("release")) == ({}, 1)


async def test_a_plain_tool_that_hangs_costs_its_deadline(tiny_tokenizer, go):
    class Hanging(CounterTool):
        def execute(self, instance_id, parameters, **kwargs):  # type: ignore[override]
            go.wait()

    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], Hanging())
    started = time.monotonic()
    trajectory = await play(agent, tool_timeout_s=0.1)
    assert time.monotonic() - started < 1
    assert (trajectory.status, statuses(trajectory)) == ("completed", [["timeout"], []])
    assert trajectory.scored
