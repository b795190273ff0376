"""Rollout streams over real HTTP: run once, replayed, resumed, aborted."""

import asyncio

import aiohttp
import msgspec
import pytest
from sidecar_cases import (
    CounterTool,
    HangingTool,
    call,
    check_trajectory,
    fault,
    lines,
    make_agent,
    make_request,
    post,
    serving,
)

from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.protocol import (
    JSON,
    MSGPACK,
    EndFrame,
    Frame,
    encode,
)

BINARY = {"Content-Type": MSGPACK}


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


# --- streams ----------------------------------------------------------------------------------------------------


async def test_a_request_returns_a_frame_for_each_trajectory_and_an_end(tiny_tokenizer, http):
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], CounterTool())
    async with serving(agent) as (url, _):
        *frames, end = await post(http, url, make_request(samples=3))
    assert [frame.index for frame in frames] == [0, 1, 2]
    assert end == EndFrame(index=3, trajectories=3, aborted=False)
    assert sorted(frame.trajectory.sample_index for frame in frames) == [0, 1, 2]
    for frame in frames:
        check_trajectory(frame.trajectory)
        assert (frame.trajectory.status, frame.trajectory.reward) == ("completed", 1.0)
    assert sorted(request.ordinal for request in agent.engine.requests) == [0, 0, 1, 1, 2, 2]


async def test_frames_come_as_trajectories_end_not_in_the_order_asked(tiny_tokenizer, http):
    class Backwards(ScriptedEngine):
        async def generate(self, request):
            await asyncio.sleep(0.05 * (2 - request.ordinal))
            return await super().generate(request)

    agent = make_agent(tiny_tokenizer, [])
    agent.engine = Backwards(tiny_tokenizer, ["#### 2"])
    async with serving(agent) as (url, _):
        frames = await post(http, url, make_request(samples=3))
    assert [frame.trajectory.sample_index for frame in frames[:-1]] == [2, 1, 0]


async def test_both_encodings_carry_the_same_frames(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"])) as (url, _):
        text = await post(http, url, make_request())
        async with http.post(
            f"{url}/v1/rollouts", data=encode(make_request(), MSGPACK), headers=BINARY
        ) as response:
            assert response.content_type == MSGPACK
            body = await response.read()
    binary = []
    while body:
        length = int.from_bytes(body[:4], "big")
        binary.append(msgspec.msgpack.decode(body[4 : 4 + length], type=Frame))
        body = body[4 + length :]
    assert binary == text


async def test_a_silent_stream_says_that_it_lives(tiny_tokenizer, http):
    agent = make_agent(tiny_tokenizer, ["#### 2"], delay_s=0.2)
    async with serving(agent, alive_s=0.05) as (url, _):
        async with http.post(f"{url}/v1/rollouts", data=encode(make_request(), JSON)) as response:
            assert await response.content.readline() == b"\n"
            assert len(await lines(response)) == 2


async def test_the_same_request_is_run_once_and_replayed(tiny_tokenizer, http):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    async with serving(agent) as (url, _):
        first = await post(http, url, make_request(samples=2))
        assert await post(http, url, make_request(samples=2)) == first
        async with http.get(f"{url}/v1/rollouts/r?from=1") as response:
            assert await lines(response) == first[1:]
        async with http.get(f"{url}/v1/rollouts/r?from=99") as response:
            assert (response.status, await lines(response)) == (200, [])
    assert len(agent.engine.requests) == 2


async def test_an_id_that_was_used_for_something_else_is_refused(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"])) as (url, _):
        await post(http, url, make_request())
        body = encode(make_request(samples=2), JSON)
        async with http.post(f"{url}/v1/rollouts", data=body) as response:
            error = await fault(response, 409, "request_id_taken")
            assert error.field == "$.request_id"


async def test_an_integer_that_frames_cannot_hold_is_refused(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"])) as (url, _):
        body = encode(make_request(samples=1), JSON).replace(b'"seed":0', b'"seed":1' + b"0" * 30)
        async with http.post(f"{url}/v1/rollouts", data=body) as response:
            assert "64 bits" in (await fault(response, 400, "invalid_request")).message


async def test_a_reader_that_goes_away_loses_nothing(tiny_tokenizer, http):
    agent = make_agent(tiny_tokenizer, ["#### 2"], delay_s=0.1)
    async with serving(agent, max_concurrent=1) as (url, sidecar):
        response = await http.post(f"{url}/v1/rollouts", data=encode(make_request(samples=3), JSON))
        first = msgspec.json.decode(await response.content.readline(), type=Frame)
        response.close()  # cuts the connection in the middle of the stream
        async with http.get(f"{url}/v1/rollouts/r?from=1") as response:
            rest = await lines(response)
    assert [frame.index for frame in [first, *rest]] == [0, 1, 2, 3]
    assert len(agent.engine.requests) == 3


async def test_only_recent_requests_are_kept(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"]), keep_finished=2) as (url, _):
        for name in "abc":
            await post(http, url, make_request(request_id=name))
        async with http.get(f"{url}/v1/rollouts/a") as response:
            assert "'a'" in (await fault(response, 404, "unknown_request")).message
        async with http.get(f"{url}/v1/rollouts/b") as response:
            assert len(await lines(response)) == 2


async def test_memory_for_old_requests_is_bounded_but_the_newest_stays(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"]), keep_bytes=1) as (url, _):
        for name in "ab":
            await post(http, url, make_request(request_id=name))
        async with http.get(f"{url}/v1/rollouts/a") as response:
            await fault(response, 404, "unknown_request")
        async with http.get(f"{url}/v1/rollouts/b") as response:
            assert len(await lines(response)) == 2


async def test_no_more_trajectories_run_at_once_than_allowed(tiny_tokenizer, http):
    running, most = 0, 0

    class Counting(ScriptedEngine):
        async def generate(self, request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return await super().generate(request)

    agent = make_agent(tiny_tokenizer, [])
    agent.engine = Counting(tiny_tokenizer, ["#### 2"])
    async with serving(agent, max_concurrent=2) as (url, _):
        await post(http, url, make_request(samples=6))
    assert most == 2


# --- aborts -----------------------------------------------------------------------------------------------------


async def test_an_abort_releases_tools_and_ends_the_stream(tiny_tokenizer, http):
    """Pain points 15 and 16."""
    tool = HangingTool()
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    async with serving(agent, max_concurrent=2) as (url, _):
        reading = asyncio.create_task(post(http, url, make_request(samples=3)))
        while tool.times("execute") < 2:
            await asyncio.sleep(0.01)
        async with http.delete(f"{url}/v1/rollouts/r") as response:
            assert response.status == 200
            # Released by the time of the answer; the third one, still waiting, never made a tool.
            assert (tool.times("create"), tool.times("release"), tool.counts) == (2, 2, {})
        assert await reading == [EndFrame(index=0, trajectories=0, aborted=True)]
        async with http.delete(f"{url}/v1/rollouts/r") as response:
            assert response.status == 200
        async with http.delete(f"{url}/v1/rollouts/other") as response:
            await fault(response, 404, "unknown_request")
    assert tool.times("release") == 2


async def test_a_second_abort_waits_for_the_release_too(tiny_tokenizer, http):
    class Slow(HangingTool):
        async def release(self, instance_id, **kwargs):
            await asyncio.sleep(0.2)
            await super().release(instance_id)

    tool = Slow()
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    async with serving(agent) as (url, _):
        reading = asyncio.create_task(post(http, url, make_request()))
        while not tool.times("execute"):
            await asyncio.sleep(0.01)

        async def abort(after_s):
            await asyncio.sleep(after_s)
            async with http.delete(f"{url}/v1/rollouts/r"):
                return tool.times("release")

        assert await asyncio.gather(abort(0), abort(0.05)) == [1, 1]
        await reading


async def test_stopping_the_sidecar_releases_tools(tiny_tokenizer, http):
    tool = HangingTool()
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    async with serving(agent) as (url, _):
        reading = asyncio.create_task(post(http, url, make_request(samples=2)))
        while tool.times("execute") < 2:
            await asyncio.sleep(0.01)
    assert await reading == [EndFrame(index=0, trajectories=0, aborted=True)]
    assert (tool.times("release"), tool.counts) == (2, {})
