"""Weights travel from JAX arrays to the engines of real sidecars, and every failure is told."""

import asyncio
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scripted_sidecar import KeepingEngine, serving, write_tokenizer

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.model import hf
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.weights.payload import AHEAD
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


# --- sent while it comes to the host ------------------------------------------------------------------------------


class Slow:
    """Tensors of which all but the first wait until somebody lets them go."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.go_on = threading.Event()

    def __iter__(self):
        for number, item in enumerate(self.tensors):
            # As many are asked for ahead as are on their way to the host at once.
            if number > AHEAD + 1:
                assert self.go_on.wait(30)
            yield item


def many(value, count=AHEAD + 4):
    return [(f"w{i}", jnp.full((100,), value + i, jnp.float32)) for i in range(count)]


async def test_a_push_in_full_mode_is_sent_before_the_last_tensor_is_there(sidecars, monkeypatch):
    engines, clients = sidecars
    sender = WeightSender(clients[:1], mode="full", part_bytes=400)
    await sender.push(many(0.0), version=1, timeout_s=30.0)
    sent = asyncio.Event()
    call = clients[0]._call

    async def noticed(method, path, **kwargs):
        answer = await call(method, path, **kwargs)
        if method == "PUT":
            sent.set()
        return answer

    monkeypatch.setattr(clients[0], "_call", noticed)
    slow = Slow(many(5.0))
    pushing = asyncio.create_task(sender.push(slow, version=2, timeout_s=30.0))
    await sent.wait()  # part 0, while most of the tensors have not been made
    assert not slow.go_on.is_set()
    slow.go_on.set()
    report = await pushing
    assert engines[0].weights == {name: np.asarray(x).tobytes() for name, x in many(5.0)}
    again = await push(clients[1:], many(5.0), version=2)
    assert report.content_hash == again.content_hash


@pytest.mark.parametrize(
    "others", [many(1.0)[:-1], [*many(1.0), ("more", jnp.ones(3))], [("x", many(1.0)[0][1])]]
)
async def test_other_tensors_than_before_are_refused_and_then_start_over(sidecars, others):
    engines, clients = sidecars
    sender = WeightSender(clients, mode="full", part_bytes=400)
    await sender.push(many(0.0), version=1, timeout_s=30.0)
    with pytest.raises(ValueError, match="the tensors differ from those of the push before"):
        await sender.push(iter(others), version=2, timeout_s=30.0)
    assert [engine.policy_version for engine in engines] == [1, 1]
    await sender.push(iter(others), version=2, timeout_s=30.0)
    assert set(engines[1].weights) == {name for name, _ in others}


async def test_a_byte_flipped_in_a_full_push_is_sent_again(sidecars, monkeypatch):
    engines, clients = sidecars
    call = clients[0]._call
    flipped = []

    async def flip(method, path, *, data=b"", **kwargs):
        if method == "PUT" and not flipped:
            flipped.append(path)
            data = bytes([data[0] ^ 1]) + data[1:]
        return await call(method, path, data=data, **kwargs)

    monkeypatch.setattr(clients[0], "_call", flip)
    report = await push(clients[:1], many(3.0))
    assert flipped
    assert report.full_resends == 0  # no delta was meant for it
    assert engines[0].weights == {name: np.asarray(x).tobytes() for name, x in many(3.0)}


async def test_weights_that_are_no_numbers_are_refused_with_the_reason(sidecars):
    engines, clients = sidecars
    await push(clients, many(0.0))
    with pytest.raises(PushError, match="w1 holds inf or NaN; look at the last update's loss"):
        await push(clients, [many(1.0)[0], ("w1", jnp.full((100,), jnp.nan))], version=2)
    assert [engine.policy_version for engine in engines] == [1, 1]


async def test_large_parts_stream(sidecars):
    """Larger than what is written to a socket at once, and refused or sent again as others are."""
    engines, clients = sidecars
    tensors = [(f"w{i}", jnp.full((700_000,), float(i))) for i in range(3)]
    await push(clients, tensors, part_bytes=5_000_000)
    assert engines[0].weights == {name: np.asarray(x).tobytes() for name, x in tensors}
    with pytest.raises(PushError, match="version 1 is not newer than 1"):
        await push(clients, [("w0", jnp.ones((700_000,)))], part_bytes=5_000_000)
