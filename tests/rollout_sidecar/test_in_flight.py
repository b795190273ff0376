"""Weights that arrive while trajectories are under way: they go on with the new ones, or finish with the old ones.

Either way every token carries the version that sampled it.
"""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file
from sidecar_cases import (
    EchoTool,
    Push,
    call,
    make_agent,
    make_request,
    make_task,
    put_part,
    serving,
)
from test_client import collect
from test_resume_trajectory import Asking

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.engines.jax import JaxEngine
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.protocol import Limits, TensorEntry, Trajectory, WeightsManifest
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.model import tiny

TEXTS = [call("echo", text="one"), call("echo", text="two"), "#### 2"]


def versions(trajectory: Trajectory) -> list[int]:
    """Of each sampled token, in order; and every sampled token has exactly one."""
    covered = [i for s in trajectory.version_spans for i in range(s.start, s.end)]
    assert covered == [i for i, mask in enumerate(trajectory.loss_mask) if mask]
    return [s.policy_version for s in trajectory.version_spans for _ in range(s.start, s.end)]


def with_mode(push: Push, mode: str) -> WeightsManifest:
    return msgspec.structs.replace(push.manifest, in_flight=mode)


async def stage(sidecar, manifest: WeightsManifest, payload: bytes, version: int = 1) -> None:
    """Sends a version, but for its commit."""
    sidecar.weights.begin(version, manifest)
    size = manifest.part_bytes
    for i in range(0, len(payload), size):
        await put_part(sidecar.weights, version, i // size, payload[i : i + size])


@pytest.mark.parametrize("mode", ["continue", "finish"])
async def test_what_is_under_way_goes_on_or_finishes_and_new_ones_get_the_new_weights(
    tiny_tokenizer, mode
):
    agent = make_agent(tiny_tokenizer, TEXTS, EchoTool(), delay_s=0.1)
    push = Push()
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:
        await stage(sidecar, with_mode(push, mode), push.payload)
        early = asyncio.create_task(collect(client, make_request(request_id="a", samples=3)))
        while len(agent.engine.requests) < 3:
            await asyncio.sleep(0.005)
        committing = asyncio.create_task(sidecar.weights.commit(1))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(collect(client, make_request(request_id="b", samples=2)))
        if mode == "finish":
            await asyncio.sleep(0.1)
            # In the middle of their turns: nobody new has begun, and it is not ready.
            assert (agent.engine.policy_version, committing.done()) == (0, False)
            assert "weights are being swapped" in str(await client.unready())
        before, _, after = await asyncio.gather(early, committing, late)
    for trajectory in before:
        seen = versions(trajectory)
        assert trajectory.status == "completed"
        assert set(seen) == ({0} if mode == "finish" else {0, 1} if 0 in seen else {1})
        assert seen[-1] == (0 if mode == "finish" else 1)
    assert [set(versions(trajectory)) for trajectory in after] == [{1}, {1}]


async def test_finishing_is_bounded_by_the_deadline_of_a_trajectory(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, TEXTS, EchoTool(), delay_s=30)
    push = Push()
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:
        await stage(sidecar, with_mode(push, "finish"), push.payload)
        asked = make_request(limits=Limits(trajectory_timeout_s=0.3))
        reading = asyncio.create_task(collect(client, asked))
        while not agent.engine.requests:
            await asyncio.sleep(0.005)
        await asyncio.wait_for(sidecar.weights.commit(1), 5)
        (trajectory,) = await reading
    assert trajectory.status == "timeout"
    assert agent.engine.policy_version == 1


async def test_a_failed_swap_lets_those_that_waited_go_on(tiny_tokenizer):
    class Refusing(ScriptedEngine):
        async def load_weights(self, tensors, policy_version, changed=None):
            raise ValueError("it does not fit")

    agent, push = make_agent(tiny_tokenizer, []), Push()
    agent.engine = Refusing(tiny_tokenizer, ["#### 2"], delay_s=0.1)
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:
        await stage(sidecar, with_mode(push, "finish"), push.payload)
        early = asyncio.create_task(collect(client, make_request(request_id="a")))
        while not agent.engine.requests:
            await asyncio.sleep(0.005)
        committing = asyncio.create_task(sidecar.weights.commit(1))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(collect(client, make_request(request_id="b")))
        with pytest.raises(Exception, match="it does not fit"):
            await committing
        for reading in (early, late):
            (trajectory,) = await reading
            assert set(versions(trajectory)) == {0}
        assert await client.ready(0)


class Slowly(Asking):
    """Thinks for a while."""

    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.sleep(0.1)
        return await super().generate_response(instance_id, messages, **kwargs)


async def test_the_embedded_engine_names_the_version_of_every_token(tmp_path):
    tiny.build(tmp_path, ["Are you sure? Count to two."], vocab=300, embed=64, layers=1, seed=0)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    # A model that knows nothing would hardly ever end a turn: one token in twenty does here.
    tokenizer.stop_ids |= frozenset(range(40, 55))
    agent = make_agent(tokenizer, [])
    agent.engine = JaxEngine(str(tmp_path), dtype="float32", slots=4, max_model_tokens=256)
    agent.interactions = {"user": Slowly()}
    limits = Limits(max_tokens_per_turn=50, max_trajectory_tokens=256)
    asked: dict[str, Any] = {"task": make_task(interaction="user", tools=[]), "limits": limits}
    async with serving(agent) as (url, sidecar), SidecarClient(url) as client:
        assert (await client.info()).max_concurrent == 4
        alone = await collect(client, make_request(request_id="alone", samples=3, **asked))

        async def disturbed(mode: str, version: int) -> list[Trajectory]:
            manifest, payload = weights_of(tmp_path, scale=1.0 + version, mode=mode)
            await stage(sidecar, manifest, payload, version)
            known: set[int] = set()
            request = make_request(request_id=mode, samples=3, progress=True, **asked)
            early = asyncio.create_task(read(client, request, known))
            while not (known or early.done()):  # a turn has ended somewhere
                await asyncio.sleep(0.001)
            await sidecar.weights.commit(version)
            return await early

        finished = await disturbed("finish", 1)
        went_on = await disturbed("continue", 2)
        (after,) = await collect(client, make_request(request_id="after", **asked))
    assert [set(versions(t)) for t in finished] == [{0}] * 3
    assert [t.token_ids for t in finished] == [t.token_ids for t in alone]
    assert {1, 2} in [set(versions(t)) for t in went_on]
    assert all(versions(t) == sorted(versions(t)) for t in went_on)
    assert set(versions(after)) == {2}


async def read(client, request, known: set[int]) -> list[Trajectory]:
    found = [
        trajectory
        async for trajectory in client.rollouts(request, lambda f: known.add(f.sample_index))
    ]
    return sorted(found, key=lambda trajectory: trajectory.sample_index)


def weights_of(folder, *, scale: float, mode: str) -> tuple[WeightsManifest, bytes]:
    """The model's own weights, larger."""
    entries, payload = [], b""
    for name, array in load_file(folder / "model.safetensors").items():
        data = (array * np.float32(scale)).tobytes()
        entries.append(
            TensorEntry(
                name=name,
                dtype="float32",
                shape=list(array.shape),
                offset=len(payload),
                nbytes=len(data),
                hash=xxhash.xxh3_128_hexdigest(data),
            )
        )
        payload += data
    manifest = WeightsManifest(
        tensors=entries,
        payload_bytes=len(payload),
        part_bytes=2**20,
        in_flight=mode,  # type: ignore[arg-type]
    )
    return manifest, payload
