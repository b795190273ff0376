"""Aborting some rollouts of a request: the others go on, and the stream ends with those that are there."""

import asyncio

import aiohttp
import pytest
from sidecar_cases import HangingTool, call, fault, lines, make_agent, make_request, serving

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import JSON, encode


def waiting_agent(tokenizer):
    """Samples 1 and 3 call a tool that never answers; the others answer at once."""
    tool = HangingTool()
    agent = make_agent(tokenizer, [], tool)
    agent.engine._script = lambda request, turn: (
        call("counter") if request.ordinal % 2 else "#### 2"
    )
    return agent, tool


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_others_go_on_and_tools_are_released_before_the_answer(tiny_tokenizer):
    agent, tool = waiting_agent(tiny_tokenizer)
    request = make_request(samples=4)
    async with serving(agent) as (url, _), aiohttp.ClientSession() as http:
        async with http.post(f"{url}/v1/rollouts", data=encode(request, JSON)) as stream:
            await until(lambda: (tool.times("execute"), len(agent.engine.released)) == (2, 2))
            for _ in range(2):  # the second time changes nothing
                async with http.delete(f"{url}/v1/rollouts/r?rollouts=1,2,99") as answer:
                    assert answer.status == 200
                # 2 had ended long ago, and there is no 99.
                assert len(tool.counts) == 1
            async with http.delete(f"{url}/v1/rollouts/r?rollouts=3") as answer:
                assert (answer.status, tool.counts) == (200, {})
            frames = await lines(stream)
    ended = sorted(frame.trajectory.sample_index for frame in frames[:-1])
    assert ended == [0, 2]
    assert (frames[-1].trajectories, frames[-1].aborted) == (2, True)
    assert tool.times("release") == 4


@pytest.mark.parametrize("text", ["", "1,", "-1", "x"])
async def test_a_position_that_is_none_is_named(tiny_tokenizer, text):
    agent, tool = waiting_agent(tiny_tokenizer)
    async with serving(agent) as (url, _), aiohttp.ClientSession() as http:
        async with http.delete(f"{url}/v1/rollouts/r?rollouts={text}") as answer:
            error = await fault(answer, 400, "invalid_request")
    assert error.field == "rollouts"
    assert "rollouts must be a whole number" in error.message


async def test_a_client_that_dropped_some_gets_the_others_and_no_error(tiny_tokenizer):
    agent, tool = waiting_agent(tiny_tokenizer)
    async with serving(agent) as (url, _), SidecarClient(url) as sidecar:

        async def drop() -> None:
            await until(lambda: tool.times("execute") == 2)
            await sidecar.abort("r", [1, 3])

        dropping = asyncio.create_task(drop())
        made = [t.sample_index async for t in sidecar.rollouts(make_request(samples=4))]
        await dropping
    assert sorted(made) == [0, 2]


async def test_what_somebody_else_aborts_is_still_an_error(tiny_tokenizer):
    agent, tool = waiting_agent(tiny_tokenizer)
    async with (
        serving(agent) as (url, _),
        SidecarClient(url) as sidecar,
        SidecarClient(url) as other,
    ):

        async def drop() -> None:
            await until(lambda: tool.times("execute") == 2)
            await sidecar.abort("r", [1])
            await other.abort("r", [3])

        dropping = asyncio.create_task(drop())
        with pytest.raises(SidecarError, match="ended the request r after 2 of 4 trajectories"):
            async for _ in sidecar.rollouts(make_request(samples=4)):
                pass
        await dropping
