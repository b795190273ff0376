"""The client against a real sidecar, through connections that break, and against things that are no sidecar."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from sidecar_cases import (
    CounterTool,
    HangingTool,
    Push,
    call,
    make_agent,
    make_request,
    put_part,
    serving,
)

from rollout_sidecar import connection
from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import (
    MSGPACK,
    TrajectoryFrame,
    WeightsCommitted,
    WeightsStatus,
    content_hash,
    encode,
)
from rollout_sidecar.rollout_stream import RolloutRegistry

HEADER_BYTES, CHUNK_BYTES = 160, 12
"""About what HTTP adds to an answer, and to each frame."""


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr(connection, "MAX_BACKOFF_S", 0.02)


async def collect(client, request):
    """All trajectories, by sample."""
    found = [trajectory async for trajectory in client.rollouts(request)]
    return sorted(found, key=lambda trajectory: trajectory.sample_index)


@asynccontextmanager
async def listening(handle):
    """A TCP server that speaks whatever `handle(reader, writer)` does: its URL."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def breaking(url, cut_after):
    """A proxy that cuts the n-th connection after cut_after[n] bytes of the answer: its URL, and the requests."""
    target = url.removeprefix("http://").split(":")
    cuts, requests = list(cut_after), []

    async def handle(reader, writer):
        to_server, from_server = None, None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            requests.append(head.split(b"\r\n")[0].decode())
            left = cuts.pop(0) if cuts else None
            from_server, to_server = await asyncio.open_connection(*target)
            to_server.write(head)
            copying = [
                asyncio.create_task(_copy(reader, to_server, None)),
                asyncio.create_task(_copy(from_server, writer, left)),
            ]
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
            for task in copying:
                task.cancel()
            await asyncio.gather(*copying, return_exceptions=True)
        except ConnectionError:
            pass
        finally:
            for stream in (to_server, writer):
                if stream is not None:
                    stream.transport.abort()

    async with listening(handle) as proxy:
        yield proxy, requests


async def _copy(reader, writer, limit):
    while limit is None or limit > 0:
        data = await reader.read(4096 if limit is None else limit)
        if not data:
            return
        writer.write(data)
        await writer.drain()
        limit = None if limit is None else limit - len(data)


async def answer_bytes(url, frames):
    """About how many bytes an answer has up to some number of frames, headers included."""
    async with SidecarClient(url) as client:
        name = f"measure-{frames}"
        trajectories = await collect(client, make_request(request_id=name))
    frame = encode(TrajectoryFrame(index=0, trajectory=trajectories[0]), MSGPACK)
    return HEADER_BYTES + int(frames * (len(frame) + CHUNK_BYTES))


async def test_rollouts_and_info_of_a_sidecar(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], CounterTool())
    async with serving(agent, model="tiny") as (url, _), SidecarClient(url) as client:
        assert (await client.info()).model == "tiny"
        found = await collect(client, make_request(samples=3))
        assert [trajectory.sample_index for trajectory in found] == [0, 1, 2]
        assert {trajectory.status for trajectory in found} == {"completed"}
        assert await collect(client, make_request(rollouts=[], request_id="none")) == []


async def test_ready_follows_the_version_and_is_false_where_nobody_listens(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [])
    async with serving(agent, start=False) as (url, sidecar), SidecarClient(url) as client:
        assert not await client.ready()
        await sidecar.start()
        assert await client.ready()
        assert await client.ready(0)
        assert not await client.ready(1)
    async with SidecarClient(url) as client:
        assert not await client.ready()


async def test_a_lost_connection_goes_on_at_the_next_frame(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"], delay_s=0.02)
    request = make_request(samples=4)
    async with serving(agent, max_concurrent=1) as (url, _):
        # Cut at once, within the first frame, and within the third: nothing is lost, nothing comes twice.
        cuts = [0, await answer_bytes(url, 0.5), await answer_bytes(url, 2.5)]
        async with breaking(url, cuts) as (proxy, requests), SidecarClient(proxy) as client:
            found = await collect(client, request)
    assert [trajectory.sample_index for trajectory in found] == [0, 1, 2, 3]
    assert requests == ["POST /v1/rollouts HTTP/1.1"] * 3 + ["GET /v1/rollouts/r?from=2 HTTP/1.1"]
    # Two more were for measuring.
    assert len(agent.engine.requests) == 4 + 2


async def test_a_stream_that_ends_without_its_end_frame_is_a_lost_connection(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    async with serving(agent) as (url, _), SidecarClient(url) as whole:
        await collect(whole, make_request())
        async with breaking(url, [600]) as (proxy, requests), SidecarClient(proxy) as client:
            assert len(await collect(client, make_request())) == 1
    assert len(requests) == 2


async def test_a_request_that_the_sidecar_forgot_is_an_error_and_is_not_run_again(tiny_tokenizer):
    # Going on after a restart would mix frames of two runs.
    agent = make_agent(tiny_tokenizer, ["#### 2"], delay_s=0.05)
    request = make_request(samples=3)
    async with serving(agent, max_concurrent=1) as (url, sidecar):
        cut = await answer_bytes(url, 1.5)
        async with breaking(url, [cut]) as (proxy, _), SidecarClient(proxy) as client:
            stream = client.rollouts(request)
            await anext(stream)
            before = sidecar.rollouts
            sidecar.rollouts = RolloutRegistry(sidecar._run)  # as after a restart
            with pytest.raises(SidecarError, match="the sidecar was restarted") as caught:
                [trajectory async for trajectory in stream]
        await before.close()
    assert (caught.value.kind, caught.value.status) == ("unknown_request", 404)


async def test_an_abort_ends_the_stream(tiny_tokenizer):
    tool = HangingTool()
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    async with serving(agent) as (url, _), SidecarClient(url) as client:
        reading = asyncio.create_task(collect(client, make_request()))
        while not tool.times("execute"):
            await asyncio.sleep(0.01)
        await client.abort("r")
        assert await reading == []
        assert tool.times("release") == 1
        await client.abort("unknown")


async def test_a_stream_that_somebody_else_ended_is_an_error(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"], delay_s=30)
    async with SidecarClient("http://127.0.0.1:1") as client:
        async with serving(agent) as (client.url, _):
            reading = asyncio.create_task(collect(client, make_request(samples=2)))
            while not agent.engine.requests:
                await asyncio.sleep(0.01)
        # The sidecar has stopped: two trajectories must not be missed in silence.
        with pytest.raises(SidecarError, match="ended the request r after 0 of 2 trajectories"):
            await reading


async def test_leaving_the_stream_early_leaves_nothing_open(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    async with serving(agent) as (url, _), SidecarClient(url) as client:
        stream = client.rollouts(make_request(samples=5))
        await anext(stream)
        await stream.aclose()
        # And the rest can be had again.
        assert len(await collect(client, make_request(samples=5))) == 5


# --- weights ----------------------------------------------------------------------------------------------------


async def test_weights_arrive_and_are_acknowledged(tiny_tokenizer):
    agent, push = make_agent(tiny_tokenizer, []), Push()
    async with serving(agent) as (url, _), SidecarClient(url) as client:
        done = await client.push_weights(1, push.manifest, push.read)
        assert done == WeightsCommitted(version=1, content_hash=content_hash(push.manifest.tensors))
        assert push.reads == [0, 10, 20]
        assert (await client.info()).content_hash == done.content_hash
        # Repeated as a whole, nothing is sent again.
        assert await client.push_weights(1, push.manifest, push.read) == done
        assert push.reads == [0, 10, 20]
    assert agent.engine.loaded == ["b", "a"]


async def test_a_push_sends_only_what_is_missing(tiny_tokenizer):
    agent, push = make_agent(tiny_tokenizer, []), Push()
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:
        sidecar.weights.begin(1, push.manifest)
        await put_part(sidecar.weights, 1, 1, push.parts[1])
        await client.push_weights(1, push.manifest, push.read)
    assert push.reads == [0, 20]


async def test_a_push_survives_lost_connections(tiny_tokenizer):
    agent, push = make_agent(tiny_tokenizer, []), Push(part_bytes=4)
    async with serving(agent) as (url, _):
        async with breaking(url, [5, 0, 5, 0]) as (proxy, requests), SidecarClient(proxy) as client:
            await client.push_weights(1, push.manifest, push.read)
    assert agent.engine.policy_version == 1
    assert len(requests) > 4


async def test_a_sidecar_that_forgets_a_push_gets_it_from_the_start(tiny_tokenizer):
    agent, push = make_agent(tiny_tokenizer, []), Push()
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:

        def read(offset, nbytes):
            if push.reads == [0]:
                sidecar.weights._staging = None  # what a restart forgets
            return push.read(offset, nbytes)

        await client.push_weights(1, push.manifest, read)
    assert push.reads == [0, 10, 0, 10, 20]


async def test_corrupted_weights_are_an_error_that_names_the_tensor(tiny_tokenizer):
    agent, push = make_agent(tiny_tokenizer, []), Push()
    async with serving(agent) as (url, _), SidecarClient(url) as client:
        with pytest.raises(SidecarError, match="the bytes of a hash to") as caught:
            await client.push_weights(1, push.manifest, lambda offset, nbytes: bytes(nbytes))
        assert (caught.value.kind, caught.value.status) == ("hash_mismatch", 422)
        assert (await client.push_weights(1, push.manifest, push.read)).version == 1


async def test_a_reader_that_gives_too_little_is_the_callers_mistake(tiny_tokenizer):
    agent, push = make_agent(tiny_tokenizer, []), Push()
    async with serving(agent) as (url, _), SidecarClient(url) as client:
        with pytest.raises(ValueError, match=r"read\(0, 10\) gave 3 bytes"):
            await client.push_weights(1, push.manifest, lambda offset, nbytes: b"abc")


# --- errors -----------------------------------------------------------------------------------------------------


async def test_a_sidecar_that_is_down_is_one_clear_sentence(unused_tcp_port):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with SidecarClient(url) as client:
        for ask in (client.info(), collect(client, make_request()), client.abort("r")):
            with pytest.raises(
                SidecarError, match=f"{url} cannot be reached .* start the sidecar"
            ) as caught:
                await ask
            assert (caught.value.kind, caught.value.status) == ("unreachable", 0)


async def test_a_refusal_carries_kind_status_and_message(tiny_tokenizer):
    async with serving(make_agent(tiny_tokenizer, []), token="s3cret") as (url, _):
        async with SidecarClient(url, token="wrong") as client:
            with pytest.raises(
                SidecarError, match=r"refused GET /v1/info \(401 .*token_file"
            ) as caught:
                await client.info()
            assert (caught.value.kind, caught.value.status) == ("unauthorized", 401)
        async with SidecarClient(url, token="s3cret") as client:
            await client.info()
            with pytest.raises(SidecarError, match="min_policy_version=4") as caught:
                await collect(client, make_request(min_policy_version=4))
            assert (caught.value.kind, caught.value.status) == ("policy_version", 409)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: 6\r\n\r\n\x00\x00\x00\x02ab",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: 5\r\n\r\n\xff\xff\xff\xff1",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_what_is_no_sidecar_is_one_clear_sentence(answer):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with listening(handle) as url, SidecarClient(url) as client:
        for ask in (client.info(), collect(client, make_request())):
            with pytest.raises(SidecarError, match=f"{url} .*check the URL") as caught:
                await ask
            assert caught.value.kind == "bad_answer"


async def test_another_protocol_version_is_said_to_be_one():
    async def info(request):
        return web.json_response({"protocol_version": 2, "something": "new"})

    app = web.Application()
    app.router.add_get("/v1/info", info)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with SidecarClient(url) as client:
        with pytest.raises(
            SidecarError, match="it speaks version 2 of the protocol, this trainer version 1"
        ):
            await client.info()
    await runner.cleanup()


async def test_a_sidecar_that_takes_too_long_is_a_timeout(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, ["#### 2"], delay_s=30)
    async with serving(agent) as (url, _), SidecarClient(url, timeout_s=0.2) as client:
        with pytest.raises(SidecarError, match=r"did not finish within 0.2 s") as caught:
            await collect(client, make_request())
        assert caught.value.kind == "timeout"


async def test_a_push_of_something_else_is_noticed(tiny_tokenizer):
    push, other = Push(), Push(seed=1)

    class Lying:
        async def commit(self, version, order):
            return WeightsCommitted(
                version=version, content_hash=content_hash(other.manifest.tensors)
            )

        def begin(self, version, manifest):
            return WeightsStatus(version=version, missing_parts=[])

    agent = make_agent(tiny_tokenizer, [])
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:
        sidecar.weights = Lying()  # type: ignore[assignment]
        with pytest.raises(
            SidecarError, match="after the push of version 1 it serves version 1 with"
        ):
            await client.push_weights(1, push.manifest, push.read)


async def test_it_must_be_entered():
    with pytest.raises(RuntimeError, match="use SidecarClient as `async with"):
        await SidecarClient("http://127.0.0.1:1").info()
