"""Progress in rollout streams: what is told of trajectories under way, to whom, and for how long."""

import asyncio

import aiohttp
import msgspec
import pytest
from sidecar_cases import EchoTool, call, make_agent, make_request, serving
from test_client import breaking, collect

from rollout_sidecar import connection
from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import (
    INSTANCE_HEADER,
    JSON,
    EndFrame,
    Frame,
    PartialTrajectory,
    ProgressFrame,
    Trajectory,
    TrajectoryFrame,
    Turn,
    encode,
)
from rollout_sidecar.rollout_stream import Reader, RolloutStream

TEXTS = [call("echo", text="one"), call("echo", text="two"), "#### 2"]


class Echo(EchoTool):
    stateless = True


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr(connection, "MAX_BACKOFF_S", 0.02)


def frame(sample: int, known_turns: int, turns: int = 1) -> ProgressFrame:
    turn = Turn(start=0, end=1, policy_version=0, finish="stop")
    partial = PartialTrajectory(
        seed=sample,
        turns=[turn] * turns,
        token_ids=[sample, known_turns],
        prompt_tokens=0,
        loss_mask=[True] * 2,
        rollout_log_probs=[-1.0] * 2,
        version_spans=[],
        messages=[],
        prompt_messages=0,
    )
    return ProgressFrame(
        task_index=0, sample_index=sample, known_turns=known_turns, partial=partial
    )


def ended(sample: int) -> Trajectory:
    return Trajectory(
        task_index=0, sample_index=sample, task_id="t", seed=sample, status="completed"
    )


def decoded(frames: list[bytes]) -> list[Frame]:
    return [msgspec.msgpack.decode(each, type=Frame) for each in frames]


async def test_every_reader_gets_what_is_still_of_use_and_nothing_twice():
    stream = RolloutStream("r", "")
    early = Reader(stream, 0)
    stream.tell(frame(0, 0))
    stream.tell(frame(1, 0))
    assert decoded(await early.read(1.0)) == [frame(0, 0), frame(1, 0)]
    assert await early.read(0.01) == []
    stream.tell(frame(0, 1))
    done = TrajectoryFrame(index=0, trajectory=ended(1))
    stream.add(done)
    assert decoded(await early.read(1.0)) == [frame(0, 1), done]
    # One that comes later, or again, needs all pieces of what runs, and none of what has ended.
    assert decoded(await Reader(stream, 0).read(1.0)) == [frame(0, 0), frame(0, 1), done]
    assert decoded(await Reader(stream, 1).read(1.0)) == [frame(0, 0), frame(0, 1)]
    # A piece that says everything takes the place of those before it.
    stream.tell(frame(0, 0, turns=3))
    assert decoded(await Reader(stream, 1).read(1.0)) == [frame(0, 0, turns=3)]
    end = EndFrame(index=1, trajectories=1, aborted=True)
    stream.add(end)
    late = Reader(stream, 1)
    assert decoded(await late.read(1.0)) == [end]
    assert late.done
    assert decoded(await early.read(1.0)) == [end]  # progress of nobody


async def test_a_reader_that_waits_is_woken_by_progress():
    stream = RolloutStream("r", "")
    reading = asyncio.create_task(Reader(stream, 0).read(10.0))
    await asyncio.sleep(0.01)
    stream.tell(frame(0, 0))
    assert decoded(await asyncio.wait_for(reading, 1.0)) == [frame(0, 0)]


async def test_progress_comes_only_where_it_is_asked_for_and_has_no_number(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, TEXTS, Echo())
    async with serving(agent) as (url, sidecar), aiohttp.ClientSession() as http:
        for progress in (False, True):
            asked = make_request(request_id=f"r{progress}", progress=progress)
            async with http.post(f"{url}/v1/rollouts", data=encode(asked, JSON)) as response:
                assert response.headers[INSTANCE_HEADER] == sidecar.instance
                lines = [line async for line in response.content if line.strip()]
            frames = [msgspec.json.decode(line, type=Frame) for line in lines]
            # Both turns may be told of before the reader looks, or the whole may have ended by then.
            told = [f for f in frames if isinstance(f, ProgressFrame)]
            assert len(told) <= (2 if progress else 0)
            numbered = [f.index for f in frames if not isinstance(f, ProgressFrame)]
            assert numbered == [0, 1]


async def test_the_client_hands_progress_on_through_lost_connections(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, TEXTS, Echo(), delay_s=0.1)
    known: dict[int, PartialTrajectory] = {}

    def note(frame: ProgressFrame) -> None:
        partial = frame.extend(known.get(frame.sample_index))
        assert partial is not None
        known[frame.sample_index] = partial

    async with serving(agent) as (url, _):
        # Cut within the progress of the first turn: it is sent again.
        async with breaking(url, [900]) as (proxy, requests), SidecarClient(proxy) as client:
            stream = client.rollouts(make_request(samples=2, progress=True), note)
            found = [trajectory async for trajectory in stream]
    assert len(requests) == 2
    assert len(found) == 2
    for trajectory in found:
        partial = known[trajectory.sample_index]
        assert len(partial.turns) == 2
        n = len(partial.token_ids)
        assert partial.token_ids == trajectory.token_ids[:n]
        assert partial.rollout_log_probs == trajectory.rollout_log_probs[:n]
        assert partial.messages == trajectory.messages[:-1]


async def test_a_sidecar_that_was_restarted_is_an_error_even_before_its_first_frame(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, TEXTS, Echo(), delay_s=0.1)
    async with serving(agent) as (url, sidecar):
        async with breaking(url, [700]) as (proxy, requests), SidecarClient(proxy) as client:
            asked = make_request(samples=3, progress=True)
            reading = asyncio.create_task(collect(client, asked))
            while not requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(
                0.05
            )  # the first answer has begun, and its first turn has not ended
            sidecar.instance = "another"
            with pytest.raises(
                SidecarError, match="was restarted since it was last asked"
            ) as caught:
                await reading
    assert len(requests) == 2
    assert caught.value.kind == "restarted"


async def test_a_lost_connection_is_told_at_once(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    lost = []
    async with serving(agent) as (url, _):
        async with breaking(url, [0, 0]) as (proxy, _), SidecarClient(proxy) as client:
            client.on_lost = lambda: lost.append(True)
            assert len(await collect(client, make_request())) == 1
    assert lost == [True, True]
