"""Trainer and engine on one device: memory that is released and resumed, over HTTP and in the embedded engine."""

import asyncio

import aiohttp
import numpy as np
import pytest
from sidecar_cases import Push, call, fault, make_agent, make_request, serving
from test_engine_jax import CFG, decoder, make_engine, request, tensors_of

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import EngineMemory
from tooljax.model import hf


async def push(client: SidecarClient, version: int, seed: int = 0) -> None:
    made = Push(seed=seed)
    await client.push_weights(version, made.manifest, made.read)


@pytest.fixture
async def served(tiny_tokenizer):
    """A sidecar whose policy answers at once: its client, and itself."""
    async with (
        serving(make_agent(tiny_tokenizer, ["#### 2"])) as (url, sidecar),
        SidecarClient(url) as client,
    ):
        yield client, sidecar


# --- over HTTP ----------------------------------------------------------------------------------------------------


async def test_released_memory_comes_back_with_the_next_push(served):
    client, sidecar = served
    await push(client, 1)
    released = await client.release_engine()
    assert released.released
    assert "POST /v1/engine/resume, then push weights" in released.fault
    assert not await client.ready()
    resumed = await client.resume_engine()
    assert not resumed.released
    assert "nothing has been pushed since: push them" in resumed.fault
    assert not await client.ready()
    await push(client, 2)
    assert await client.ready(2)
    assert sidecar.agent.engine.fault == ""
    assert [t.status async for t in client.rollouts(make_request())] == ["completed"]


async def test_each_step_can_be_repeated(served):
    client, _ = served
    await push(client, 1)
    assert await client.resume_engine() == EngineMemory(
        released=False, fault=""
    )  # nothing released
    assert await client.ready(1)
    assert await client.release_engine() == await client.release_engine()
    assert await client.resume_engine() == await client.resume_engine()


async def test_a_sidecar_that_was_left_released_says_what_to_do(served):
    """The trainer died between release and push: rollouts and pushes are refused, and a new trainer can go on."""
    client, sidecar = served
    await push(client, 1)
    await client.release_engine()
    async with aiohttp.ClientSession() as http, http.get(f"{client.url}/readyz") as response:
        assert "a training run with" in (await fault(response, 503, "not_ready")).message.lower()
    with pytest.raises(SidecarError, match="cannot generate: its memory is released for a trainer"):
        [t async for t in client.rollouts(make_request())]
    with pytest.raises(SidecarError, match=r"still serves 1: .*POST /v1/engine/resume, then push"):
        await push(client, 2)
    await client.resume_engine()
    with pytest.raises(SidecarError, match="its weights were released and nothing has been pushed"):
        [t async for t in client.rollouts(make_request())]
    await push(client, 2)
    assert await client.ready(2)


async def test_what_is_under_way_waits_and_goes_on_under_the_new_version(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [call("nothing"), "#### 2"], delay_s=0.2)
    async with serving(agent) as (url, _), SidecarClient(url) as client:
        await push(client, 1)

        async def roll_out():
            return [t async for t in client.rollouts(make_request())]

        running = asyncio.create_task(roll_out())
        while not agent.engine.requests:
            await asyncio.sleep(0.01)
        await client.release_engine()
        await asyncio.sleep(0.4)
        assert not running.done()
        await client.resume_engine()
        await push(client, 2)
        (trajectory,) = await running
        assert trajectory.status == "completed"
        assert {span.policy_version for span in trajectory.version_spans} == {2}


async def test_an_engine_that_cannot_is_told(served, monkeypatch):
    client, sidecar = served

    async def refuse():
        raise NotImplementedError("start the sidecar with --memory_saver")

    monkeypatch.setattr(sidecar.agent.engine, "release_memory", refuse)
    with pytest.raises(
        SidecarError, match=r"409 cannot_release\): start the sidecar with --memory"
    ):
        await client.release_engine()
    assert await client.ready()


async def test_a_push_waits_for_a_release_that_is_under_way(served, monkeypatch):
    client, sidecar = served
    await push(client, 1)
    going, go_on = asyncio.Event(), asyncio.Event()

    async def slow():
        going.set()
        await go_on.wait()

    monkeypatch.setattr(sidecar.agent.engine, "release_memory", slow)
    releasing = asyncio.create_task(client.release_engine())
    await going.wait()
    pushing = asyncio.create_task(push(client, 2))
    await asyncio.sleep(0.3)
    assert sidecar.agent.engine.policy_version == 1
    go_on.set()
    await asyncio.gather(releasing, pushing)
    assert await client.ready(2)


async def test_served_weights_are_those_of_the_last_push(served):
    client, _ = served
    with pytest.raises(SidecarError, match="409 no_weights"):
        await client.served_weights()
    made = Push(seed=3)
    await client.push_weights(4, made.manifest, made.read)
    answer = await client.served_weights()
    assert (answer.version, answer.altered) == (4, None)  # this engine keeps no weights
    assert answer.hashes == {entry.name: entry.hash for entry in made.manifest.tensors}


# --- the embedded engine ------------------------------------------------------------------------------------------


@pytest.fixture
async def engine(tmp_path):
    engine = make_engine(hf.save(decoder(), tmp_path / "model"))
    await engine.start()
    yield engine
    await engine.close()


async def test_the_embedded_engine_frees_its_arrays_and_samples_the_same_afterwards(engine):
    first = await engine.generate(request())
    await engine.release("a")
    arrays = [*engine._sampler.weights.layers[0].values(), engine._sampler._cache.keys[0]]
    await engine.release_memory()
    await engine.release_memory()
    assert all(array.is_deleted() for array in arrays)
    with pytest.raises(ValueError, match="POST /v1/engine/resume, then push"):
        await engine.load_weights(tensors_of(0), 1)
    await engine.resume_memory()
    waiting = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert "nothing has been pushed since" in engine.fault
    await engine.load_weights(tensors_of(0), 1)
    again = await waiting
    assert engine.fault == ""
    assert (again.token_ids, again.log_probs) == (first.token_ids, first.log_probs)
    assert again.policy_version == 1
    assert again.cached_tokens == 0


async def test_release_lets_running_turns_end(engine):
    running = asyncio.create_task(engine.generate(request(max_tokens=200)))
    while not engine._sampler.running:
        await asyncio.sleep(0.001)
    await engine.release_memory()
    assert running.done() or (await running).finish == "length"
    assert len((await running).token_ids) == 200


async def test_a_tensor_that_the_embedded_engine_holds_otherwise_is_found(engine):
    tensors = tensors_of(0)
    await engine.load_weights(tensors, 1)
    assert await engine.altered_tensors(tensors) == []
    layers = engine._sampler.weights.layers
    layers[1]["wo"] = layers[1]["wo"].at[0, 0, 0].add(1e-3)
    assert await engine.altered_tensors(tensors) == ["model.layers.1.self_attn.o_proj.weight"]


def test_weights_read_back_are_in_hugging_faces_layout():
    from tooljax.model.sampler import unstack

    expected = {name: np.asarray(tensor) for name, tensor in hf.to_hf(CFG, decoder())}
    for name, array in hf.layers_to_hf(CFG, unstack(decoder())):
        np.testing.assert_array_equal(array, expected.pop(name))
    assert not expected
