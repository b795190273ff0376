"""Calls of foreign code: what they raise, how long they take, and what is left of them."""

import asyncio
import gc
import logging
import sys
import time

import pytest
from sidecar_cases import CounterTool, call, make_agent, play, statuses, tool_messages

from rollout_sidecar.errors import DeadlineError, ToolError, describe
from rollout_sidecar.foreign import (
    EndingError,
    begin,
    bounded,
    invoke,
    takes_keyword,
    takes_positional,
)


async def test_a_deadline_holds_and_the_call_is_cancelled():
    ended = asyncio.Event()

    async def hang():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    started = time.monotonic()
    with pytest.raises(DeadlineError, match="no result within 0.05 s"):
        await bounded(hang(), 0.05)
    assert time.monotonic() - started < 1
    await asyncio.wait_for(ended.wait(), 1)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a call begins at once there")
async def test_a_call_that_is_cancelled_before_it_began_warns_of_nothing():
    async def never():
        raise AssertionError("began")

    task = begin(never())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()  # a coroutine that was never awaited would warn here


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), BaseException("odd")])
@pytest.mark.parametrize("plain", [True, False])
async def test_what_would_end_the_process_is_a_failure_of_the_call(error, plain):
    def end():
        raise error

    async def end_later():
        raise error

    with pytest.raises(EndingError, match="it raised "):
        await bounded(invoke(end if plain else end_later), 5.0)


async def test_a_tool_that_calls_exit_is_told_and_the_sidecar_lives(tiny_tokenizer):
    class Quitting(CounterTool):
        async def answer(self, instance_id, parameters):
            raise SystemExit(1)

    trajectory = await play(make_agent(tiny_tokenizer, [call("counter"), "#### 2"], Quitting()))
    assert (trajectory.status, statuses(trajectory)) == ("completed", [["error"], []])
    assert tool_messages(trajectory) == ["Error executing tool 'counter': it raised SystemExit(1)"]


async def test_a_create_that_calls_exit_is_a_tool_error(tiny_tokenizer):
    class Quitting(CounterTool):
        async def create(self, instance_id=None, **kwargs):
            raise SystemExit(1)

    trajectory = await play(make_agent(tiny_tokenizer, ["#### 2"], Quitting()))
    assert trajectory.status == "tool_error"
    assert trajectory.error == "create of tool 'counter': it raised SystemExit(1)"


async def test_a_call_that_cancels_itself_is_no_cancellation_of_ours():
    async def cancel():
        raise asyncio.CancelledError

    with pytest.raises(ToolError, match="it was cancelled"):
        await bounded(cancel(), 5.0)


async def test_a_failure_at_the_moment_of_cancellation_is_not_complained_about(caplog):
    go = asyncio.Event()

    async def fail():
        await go.wait()
        raise OSError("crashed")

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        waiter = asyncio.create_task(bounded(fail(), 5.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        go.set()
        await asyncio.sleep(0)  # it has failed, and the waiter does not know yet
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        del waiter
        gc.collect()
        await asyncio.sleep(0)
    assert caplog.records == []


def test_an_exception_that_cannot_be_shown_is_named():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    assert describe(Unprintable()) == "Unprintable"


def test_what_a_method_takes():
    class Methods:
        def none(self): ...
        def one(self, instance_id): ...
        def named(self, instance_id=None, *, agent_data=None): ...
        def rest(self, **kwargs): ...
        def places(self, *args): ...
        def only(self, agent_data, /): ...

    m = Methods()
    of = (m.none, m.one, m.named, m.rest, m.places, m.only)
    assert [takes_positional(method) for method in of] == [False, True, True, False, True, True]
    assert [takes_keyword(method, "agent_data") for method in of] == [
        *(False, False, True, True, False, False),
    ]
