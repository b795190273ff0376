"""Weights travel from JAX arrays to the engines of real sidecars, and every failure is told."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scripted_sidecar import KeepingEngine, serving, write_tokenizer

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.model import hf
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.weights.push import PushError, WeightSender


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ChatTokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def sidecars(tokenizer):
    """Two sidecars: their engines, and clients of them."""
    engines = [KeepingEngine(tokenizer), KeepingEngine(tokenizer)]
    async with (
        serving(engines[0], tokenizer) as first,
        serving(engines[1], tokenizer) as second,
        SidecarClient(first) as client,
        SidecarClient(second) as other,
    ):
        yield engines, [client, other]


def decoder(dtype, seed=0):
    """A decoder of 2 layers with an untied head."""
    cfg = DecoderConfig(
        family="qwen2",
        vocab=40,
        embed=16,
        layers=2,
        q_heads=2,
        kv_heads=1,
        head_dim=8,
        ffw=24,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied_head=False,
        max_positions=64,
        qkv_bias=True,
        dtype=dtype,
    )
    return cfg, Decoder(cfg, rngs=nnx.Rngs(seed))


async def push(clients, tensors, version=1, part_bytes=1024, timeout_s=30.0):
    sender = WeightSender(clients, mode="full", part_bytes=part_bytes)
    return await sender.push(tensors, version=version, timeout_s=timeout_s)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part_bytes", [1000, 10_000_000])
async def test_every_sidecar_gets_exactly_the_weights(sidecars, dtype, part_bytes):
    engines, clients = sidecars
    cfg, policy = decoder(dtype)
    report = await push(clients, hf.to_hf(cfg, policy), part_bytes=part_bytes)
    expected = {name: np.asarray(x).tobytes() for name, x in hf.to_hf(cfg, policy)}
    assert set(expected) == set(hf.tensor_names(cfg))
    assert report.bytes == sum(map(len, expected.values()))
    assert report.version == 1
    assert report.seconds > 0
    for engine, client in zip(engines, clients, strict=True):
        assert engine.weights == expected
        info = await client.info()
        assert (info.policy_version, info.content_hash) == (1, report.content_hash)


async def test_other_weights_have_another_hash(sidecars):
    _, clients = sidecars
    hashes = []
    for version, seed in ((1, 0), (2, 1), (3, 0)):
        cfg, policy = decoder("float32", seed)
        report = await push(clients, hf.to_hf(cfg, policy), version=version)
        hashes.append(report.content_hash)
    assert hashes[0] == hashes[2] != hashes[1]


async def test_a_push_can_be_repeated(sidecars):
    engines, clients = sidecars
    tensors = [("w", jnp.arange(300, dtype=jnp.float32)), ("empty", jnp.zeros((0, 4)))]
    first = await push(clients, tensors)
    again = await push(clients, tensors)
    assert (again.content_hash, again.version) == (first.content_hash, 1)
    assert [engine.pushes for engine in engines] == [1, 1]


async def test_a_sidecar_that_refuses_is_named_and_can_catch_up(sidecars):
    engines, clients = sidecars
    tensors = [("w", jnp.ones((3, 100)))]
    engines[1].refuse = True
    with pytest.raises(PushError, match=r"version 4 .* reached 1 of 2 sidecars: ") as caught:
        await push(clients, tensors, version=4)
    assert clients[1].url in str(caught.value)
    assert clients[0].url not in str(caught.value)
    assert "the head does not fit" in str(caught.value)
    assert isinstance(caught.value, SidecarError)  # what the entry points catch
    assert [engine.policy_version for engine in engines] == [4, 0]
    engines[1].refuse = False
    await push(clients, tensors, version=4)
    assert [engine.policy_version for engine in engines] == [4, 4]
    assert [engine.pushes for engine in engines] == [1, 1]


async def test_an_old_version_is_refused_everywhere(sidecars):
    _, clients = sidecars
    await push(clients, [("w", jnp.ones(4))], version=5)
    with pytest.raises(PushError, match="reached 0 of 2 sidecars.*version 5 is not newer than 5"):
        await push(clients, [("w", jnp.zeros(4))], version=5)


async def test_a_slow_sidecar_is_named(sidecars, monkeypatch):
    engines, clients = sidecars
    monkeypatch.setattr(engines[0], "load_weights", lambda *_: asyncio.sleep(60))
    with pytest.raises(PushError, match=r"was not done within 0\.3 s \(weights\.timeout_s\)") as e:
        await push(clients, [("w", jnp.ones(4))], timeout_s=0.3)
    assert clients[0].url in str(e.value)
    assert engines[1].policy_version == 1


async def test_a_cancelled_push_ends_at_once(sidecars, monkeypatch):
    engines, clients = sidecars
    monkeypatch.setattr(engines[0], "load_weights", lambda *_: asyncio.sleep(60))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(push(clients, [("w", jnp.ones(4))]), 0.3)


async def test_integers_are_no_weights():
    with pytest.raises(ValueError, match="w is int32; weights are pushed as float32, bfloat16"):
        await push([], [("w", jnp.ones(4, jnp.int32))])
