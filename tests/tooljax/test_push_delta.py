"""Pushes in delta mode to real sidecars: the bytes of a full push, fewer of them sent, and lost bases made good."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_sidecar import KeepingEngine, serving, write_tokenizer

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.weights.push import PushError, WeightSender

SHAPES = {"embedding": (64, 32), "norm": (32,), "head": (64, 32), "scale": (5,)}


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


def weights(seed=0):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    arrays = {
        name: jax.random.normal(key, shape, jnp.bfloat16)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    return arrays | {"scale": arrays["scale"].astype(jnp.float32)}


def step(arrays, seed, only=("embedding", "head", "scale")):
    """A small step: few bfloat16 elements move, all float32 ones do."""
    moved = dict(arrays)
    for name in only:
        noise = jax.random.normal(jax.random.key(seed), arrays[name].shape) * 1e-4
        moved[name] = (arrays[name].astype(jnp.float32) + noise).astype(arrays[name].dtype)
    return moved


def sender(clients):
    return WeightSender(clients, mode="delta", part_bytes=1024)


async def push(sender, arrays, version):
    return await sender.push(arrays.items(), version=version, timeout_s=30.0)


def assert_serve(engines, arrays):
    expected = {name: np.asarray(array).tobytes() for name, array in arrays.items()}
    for engine in engines:
        assert engine.weights == expected


async def test_every_version_arrives_to_the_bit(sidecars):
    engines, clients = sidecars
    pushes, arrays = sender(clients), weights()
    first = await push(pushes, arrays, 1)
    assert (first.elements, first.bytes) == (0, first.full_bytes)
    for version in range(2, 8):
        new = step(arrays, version)
        report = await push(pushes, new, version)
        assert_serve(engines, new)
        moved = sum(
            int(np.sum(np.asarray(new[n]).view(np.uint16) != np.asarray(arrays[n]).view(np.uint16)))
            for n in ("embedding", "norm", "head")
        )
        assert (report.changed_elements, report.elements) == (moved, 2 * 64 * 32 + 32)
        assert 0 < report.bytes < report.full_bytes / 3
        # As a sender without a past would have it.
        full = WeightSender(clients, mode="full", part_bytes=1024)
        again = await full.push(new.items(), version=version, timeout_s=30.0)
        assert again.content_hash == report.content_hash
        arrays = new
    assert report.metrics()["weights/changed_frac"] == moved / (2 * 64 * 32 + 32)


async def test_what_did_not_change_is_not_sent(sidecars):
    engines, clients = sidecars
    pushes, arrays = sender(clients), weights()
    await push(pushes, arrays, 1)
    report = await push(pushes, arrays, 2)
    assert (report.bytes, report.changed_elements) == (0, 0)
    assert_serve(engines, arrays)
    assert [engine.policy_version for engine in engines] == [2, 2]


async def test_a_tensor_that_changed_throughout_is_sent_whole(sidecars):
    engines, clients = sidecars
    pushes, arrays = sender(clients), weights()
    await push(pushes, arrays, 1)
    new = arrays | {"head": weights(9)["head"]}
    report = await push(pushes, new, 2)
    assert_serve(engines, new)
    assert report.bytes == 64 * 32 * 2
    newer = step(new, 5)
    await push(pushes, newer, 3)
    assert_serve(engines, newer)


async def test_the_base_moves_only_when_every_sidecar_has_acknowledged(sidecars):
    engines, clients = sidecars
    pushes, arrays = sender(clients), weights()
    await push(pushes, arrays, 1)
    engines[1].refuse = True
    new = step(arrays, 2)
    with pytest.raises(PushError, match="reached 1 of 2 sidecars"):
        await push(pushes, new, 2)
    engines[1].refuse = False
    # The one that has it is not bothered again, the other gets the same delta.
    report = await push(pushes, new, 2)
    assert report.full_resends == 0
    assert [engine.pushes for engine in engines] == [2, 2]
    assert_serve(engines, new)


async def test_a_skipped_version_costs_the_one_that_had_it_a_full_resend(sidecars):
    engines, clients = sidecars
    pushes, arrays = sender(clients), weights()
    await push(pushes, arrays, 1)
    engines[1].refuse = True
    with pytest.raises(PushError):
        await push(pushes, step(arrays, 2), 2)
    engines[1].refuse = False
    newer = step(arrays, 3)
    report = await push(pushes, newer, 3)  # sidecar 0 serves 2, sidecar 1 serves 1
    assert report.full_resends == 1
    assert_serve(engines, newer)


async def test_a_restarted_sidecar_gets_everything_by_itself(tokenizer):
    engine = KeepingEngine(tokenizer)
    async with serving(engine, tokenizer) as url, SidecarClient(url) as client:
        pushes, arrays = sender([client]), weights()
        await push(pushes, arrays, 1)
        fresh = KeepingEngine(tokenizer)
        async with serving(fresh, tokenizer) as other, SidecarClient(other) as restarted:
            pushes._clients = [restarted]
            new = step(arrays, 2)
            report = await push(pushes, new, 2)
        assert report.full_resends == 1
        assert_serve([fresh], new)


async def test_a_byte_flipped_on_the_way_is_sent_again_whole(sidecars):
    engines, clients = sidecars
    pushes, arrays = sender(clients[:1]), weights()
    await push(pushes, arrays, 1)
    new = step(arrays, 2)
    call = clients[0]._call
    flipped = []

    async def flip(method, path, *, data=None, **kwargs):
        if method == "PUT" and data is not None and not flipped:
            flipped.append(path)
            data = data[:-1] + bytes([data[-1] ^ 0x10])
        return await call(method, path, data=data, **kwargs)

    clients[0]._call = flip
    report = await push(pushes, new, 2)
    assert flipped
    assert report.full_resends == 1
    assert_serve(engines[:1], new)


async def test_other_tensors_start_over(sidecars):
    engines, clients = sidecars
    pushes, arrays = sender(clients), weights()
    await push(pushes, arrays, 1)
    other = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    report = await push(pushes, other, 2)
    assert report.elements == 0
    assert_serve(engines, other)


@pytest.mark.parametrize("when", ["while coding", "while swapping"])
async def test_an_interrupted_push_can_be_repeated(sidecars, when):
    engines, clients = sidecars
    pushes, arrays = sender(clients), weights()
    await push(pushes, arrays, 1)
    new = step(arrays, 2)
    swapping, go_on = asyncio.Event(), asyncio.Event()
    load_weights = engines[0].load_weights

    async def slow(*args):
        swapping.set()
        await go_on.wait()
        await load_weights(*args)

    engines[0].load_weights = slow
    task = asyncio.create_task(push(pushes, new, 2))
    await (asyncio.sleep(0) if when == "while coding" else swapping.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await push(pushes, new, 2)
    assert_serve(engines, new)
