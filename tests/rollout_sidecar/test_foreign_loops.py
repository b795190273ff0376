"""Users' async code that blocks, exits or hangs, on loops of its own: the server's loop notices nothing of it."""

import asyncio
import logging
import threading
import time

import pytest
from sidecar_cases import (
    CounterTool,
    Signal,
    call,
    make_agent,
    make_request,
    make_task,
    play,
    serving,
    statuses,
    until,
)

from rollout_sidecar import foreign_loops
from rollout_sidecar.agent import run_rollout
from rollout_sidecar.errors import DeadlineError, ToolError
from rollout_sidecar.foreign import EndingError, bounded, exhausted, invoke
from rollout_sidecar.foreign_loops import lost_loops
from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.relay import Relay

OWN = __name__.partition(".")[0]


@pytest.fixture
async def quick(monkeypatch):
    """A loop is lost after a tenth of a second; all that were have ended after the test."""
    monkeypatch.setattr(foreign_loops, "GRACE_S", 0.1)
    monkeypatch.setattr(foreign_loops, "_warned", set())
    yield
    await until(lambda: lost_loops() == 0)


@pytest.fixture
def go():
    """Lets go of what blocks, at the latest after the test."""
    go = threading.Event()
    yield go
    go.set()


async def where() -> int:
    """The thread that runs it."""
    return threading.get_ident()


class Blocking(CounterTool):
    """Blocks in an `async def`, as time.sleep and blocking libraries do."""

    def __init__(self, go: threading.Event):
        super().__init__()
        self.go = go

    async def answer(self, instance_id, parameters):
        if self.times("execute") == 1:
            self.go.wait(20)
        return await super().answer(instance_id, parameters)


async def longest_pause(until_done: asyncio.Task) -> float:
    """The longest time for which the running loop did nothing else."""
    longest = 0.0
    while not until_done.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - before)
    return longest


# --- blocking ---------------------------------------------------------------------------------------------------


async def test_a_tool_that_blocks_costs_its_deadline_and_the_next_call_works(
    tiny_tokenizer, quick, go, caplog
):
    agent = make_agent(tiny_tokenizer, [call("counter"), call("counter"), "#### 2"], Blocking(go))
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "rollout_sidecar"):
        playing = asyncio.create_task(play(agent, tool_timeout_s=0.3))
        assert await longest_pause(playing) < 0.2
        trajectory = playing.result()
        await until(lambda: lost_loops() == 1)
    assert time.monotonic() - started < 2
    assert trajectory.status == "completed"
    assert statuses(trajectory)[0] == ["timeout"]
    # The second call came while the loop was silent; it began on the new one, after the grace.
    assert statuses(trajectory)[1:] == [["ok"], []]
    assert trajectory.reward == 1.0
    assert "tooljax_sidecar_lost_threads 1" in agent.metrics.render()
    [warning] = [r.getMessage() for r in caplog.records if "holds up" in r.getMessage()]
    assert "CounterTool.execute holds up its event loop at " in warning
    assert f"{__file__}:" in warning
    go.set()
    await until(lambda: lost_loops() == 0)
    assert "tooljax_sidecar_lost_threads 0" in agent.metrics.render()


async def test_each_blocking_function_is_named_once(quick, caplog):
    async def nap():
        time.sleep(0.4)

    with caplog.at_level(logging.WARNING, "rollout_sidecar"):
        for _ in range(2):
            with pytest.raises(DeadlineError):
                await bounded(invoke(nap), 0.05)
            await until(lambda: lost_loops() > 0)
            await until(lambda: lost_loops() == 0)
    assert len([r for r in caplog.records if "nap holds up" in r.getMessage()]) == 1


async def test_calls_that_had_not_begun_are_made_on_the_new_loop(quick, go):
    async def block():
        go.wait(20)

    async def healthy(x):
        return x, threading.get_ident()

    blocked = asyncio.create_task(bounded(invoke(block), 0.05))
    await asyncio.sleep(0.02)
    answers = await asyncio.gather(*(bounded(invoke(healthy, i), 10.0) for i in range(3)))
    assert not go.is_set()
    assert [x for x, _ in answers] == [0, 1, 2]
    assert len({thread for _, thread in answers}) == 1
    with pytest.raises(DeadlineError):
        await blocked


async def test_what_had_begun_goes_on_when_the_loop_does(quick, go):
    begun = Signal()

    async def sibling():
        begun.set()
        await asyncio.sleep(0.01)
        return "done"

    async def block():
        go.wait(20)

    going = asyncio.create_task(bounded(invoke(sibling), 10.0))
    await begun.wait()
    with pytest.raises(DeadlineError):
        await bounded(invoke(block), 0.05)
    await until(lambda: lost_loops() == 1)
    go.set()
    assert await going == "done"


async def test_a_slow_loop_that_reacts_is_kept(quick):
    async def hang():
        await asyncio.sleep(60)

    before = await invoke(where)
    with pytest.raises(DeadlineError):
        await bounded(invoke(hang), 0.05)
    await asyncio.sleep(0.3)
    assert await invoke(where) == before
    assert lost_loops() == 0


async def test_an_abort_does_not_cost_a_loop_its_life(quick):
    async def nap():
        time.sleep(0.4)
        await asyncio.sleep(60)

    before = await invoke(where)
    task = asyncio.create_task(bounded(invoke(nap), 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await invoke(where) == before


async def test_a_reward_that_blocks_leaves_the_trajectory_unscored(tiny_tokenizer, quick, tmp_path):
    file = tmp_path / "blocking.py"
    file.write_text("import time\nasync def compute_score(**kwargs):\n    time.sleep(0.6)\n")
    agent = make_agent(tiny_tokenizer, ["#### 2"], reward=f"{file}:compute_score")
    playing = asyncio.create_task(play(agent, trajectory_timeout_s=0.2))
    assert await longest_pause(playing) < 0.2
    trajectory = playing.result()
    assert (trajectory.scored, trajectory.error) == (False, "reward: no result within 0.2 s")
    await until(lambda: lost_loops() == 1)


async def test_an_interaction_that_blocks_costs_its_deadline(tiny_tokenizer, quick, go):
    class User(BaseInteraction):
        async def generate_response(self, instance_id, messages, **kwargs):
            go.wait(20)

    agent = make_agent(tiny_tokenizer, ["#### 2"])
    agent.interactions = {"user": User({})}
    trajectory = await play(agent, make_task(interaction="user"), tool_timeout_s=0.1)
    assert trajectory.status == "interaction_error"
    assert trajectory.error == (
        "generate_response of interaction 'user' gave no answer within 0.1 s"
    )
    await until(lambda: lost_loops() == 1)


async def test_beyond_the_bound_no_loop_is_made_and_the_sidecar_says_so(
    tiny_tokenizer, quick, go, monkeypatch
):
    monkeypatch.setattr(foreign_loops, "MAX_LOST_LOOPS", 1)

    async def block():
        go.wait(20)

    async with serving(make_agent(tiny_tokenizer, ["#### 2"])) as (_, sidecar):
        for lost in (1, 2):
            assert sidecar.is_ready()
            with pytest.raises(DeadlineError):
                await bounded(invoke(block), 0.02)
            await until(lambda lost=lost: lost_loops() == lost)
        assert "0 functions and 2 event loops did not end in time" in sidecar.why_not_ready()
        with pytest.raises(ToolError, match=rf"the code of {OWN} cannot run: 2 event loops"):
            await bounded(invoke(where), 5.0)
        go.set()
        await until(lambda: not exhausted())
        assert sidecar.is_ready()
        await bounded(invoke(where), 5.0)


# --- how it ends ------------------------------------------------------------------------------------------------


async def test_an_abort_reaches_the_coroutine(tiny_tokenizer):
    begun, cancelled = Signal(), Signal()

    class Long(CounterTool):
        async def answer(self, instance_id, parameters):
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

    request = make_request()
    agent = make_agent(tiny_tokenizer, [call("counter")] * 2, Long())
    rollout = asyncio.create_task(
        run_rollout(agent, request.tasks[0], request.rollouts[0], request)
    )
    await begun.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    await asyncio.wait_for(cancelled.wait(), 5.0)
    assert agent.tools["counter"].times("release") == 1


async def test_an_answer_is_not_lost_to_a_cancellation_that_comes_too_late():
    """What a create opened, say, is known, and so can be closed."""
    relay = Relay(lambda late: False)
    task = asyncio.create_task(relay.answer())
    await asyncio.sleep(0)
    relay.settle(None, "opened")
    while not relay.done():
        await asyncio.sleep(0)
    assert not task.done()  # it does not know yet
    task.cancel()
    assert await task == "opened"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), GeneratorExit()])
async def test_code_that_would_end_a_loop_ends_none(tiny_tokenizer, error, caplog):
    async def end():
        raise error

    async def end_later():
        asyncio.get_running_loop().call_soon(raise_it)

    def raise_it():
        raise error

    before = await invoke(where)
    with pytest.raises(EndingError, match="it raised "):
        await bounded(invoke(end), 5.0)
    with caplog.at_level(logging.WARNING):
        await bounded(invoke(end_later), 5.0)
        assert await bounded(invoke(where), 5.0) == before


async def test_a_reward_that_raises_keyboard_interrupt_is_unscored(tiny_tokenizer, tmp_path):
    for kind in ("async def", "def"):
        file = tmp_path / f"{kind.replace(' ', '_')}.py"
        file.write_text(f"{kind} compute_score(**kwargs):\n    raise KeyboardInterrupt\n")
        agent = make_agent(tiny_tokenizer, ["#### 2"], reward=str(file))
        trajectory = await play(agent)
        assert (trajectory.status, trajectory.scored) == ("completed", False)
        assert trajectory.error == "reward: it raised KeyboardInterrupt()"


def test_a_waiter_that_is_gone_hurts_nobody(go):
    """An event loop ends while users' code still runs for it."""

    async def hang():
        await asyncio.sleep(0.2)

    async def main():
        tasks = [asyncio.create_task(bounded(invoke(each), 60)) for each in (hang, go.wait)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 5
    time.sleep(0.3)  # until there is an answer that nobody waits for
    go.set()
    assert asyncio.run(invoke(where)) == asyncio.run(invoke(where))
