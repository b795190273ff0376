"""Staging of new weights: all or nothing, resumable, repeatable, and the old version is served until the end."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from sidecar_cases import Push, put_part

from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.errors import RequestError
from rollout_sidecar.protocol import WeightsCommitted, WeightsStatus, content_hash
from rollout_sidecar.weights import WeightStore


class Engine(ScriptedEngine):
    """Keeps the bytes of what is pushed; refuses tensors called bad."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, [])
        self.bytes: dict[str, bytes] = {}
        self.pushes = 0

    async def load_weights(self, tensors, policy_version, changed=None):
        if "bad" in tensors:
            raise ValueError("bad is not in the model")
        await asyncio.sleep(0.01)
        self.pushes += 1
        self.bytes = {name: bytes(tensor.data) for name, tensor in tensors.items()}
        await super().load_weights(tensors, policy_version)


@pytest.fixture
def engine(tiny_tokenizer):
    return Engine(tiny_tokenizer)


@pytest.fixture
def store(engine):
    return WeightStore(engine, max_payload_bytes=1000, max_part_bytes=100)


async def send(store, version, push, skip=()):
    """Begins and sends all parts but some."""
    status = store.begin(version, push.manifest)
    for i, part in enumerate(push.parts):
        if i not in skip:
            status = await put_part(store, version, i, part, push.manifest.push_id)
    return status


async def fails(action, status, kind, message=""):
    """Runs what must fail; message is part of what it must say."""

    async def act():
        result = action()
        return await result if asyncio.iscoroutine(result) else result

    with pytest.raises(RequestError) as caught:
        await act()
    assert (caught.value.status, caught.value.kind) == (status, kind)
    assert message in caught.value.message
    return caught.value


async def test_a_push_in_parts_arrives_byte_for_byte(store, engine):
    push = Push()
    assert store.begin(1, push.manifest).missing_parts == [0, 1, 2]
    # Any order; 28 bytes in parts of 10, 10 and 8.
    assert (await put_part(store, 1, 2, push.payload[20:])).missing_parts == [0, 1]
    assert (await put_part(store, 1, 0, push.payload[:10])).missing_parts == [1]
    assert (await put_part(store, 1, 1, push.payload[10:20])).missing_parts == []
    assert (engine.policy_version, store.staged_bytes) == (0, 28)
    expected = WeightsCommitted(version=1, content_hash=content_hash(push.manifest.tensors))
    assert await store.commit(1) == expected
    assert engine.bytes == {"b": push.payload[:12], "a": push.payload[12:]}
    assert (engine.policy_version, store.content_hash) == (1, expected.content_hash)
    assert store.staged_bytes == 0


async def test_an_interrupted_push_goes_on_where_it_stopped(store, engine):
    push = Push()
    assert (await send(store, 1, push, skip=[1])).missing_parts == [1]
    await fails(
        lambda: store.commit(1), 409, "missing_parts", "1 parts of version 1 have not arrived"
    )
    # The sender was killed and begins again: what had arrived is still there.
    assert store.begin(1, push.manifest).missing_parts == [1]
    await put_part(store, 1, 1, push.parts[1])
    await store.commit(1)
    assert engine.bytes["a"] == push.payload[12:]


async def test_a_part_sent_twice_counts_once_and_the_last_one_counts(store, engine):
    push = Push()
    store.begin(1, push.manifest)
    await put_part(store, 1, 0, b"x" * 10)
    assert (await send(store, 1, push)).missing_parts == []
    await store.commit(1)
    assert engine.bytes["b"] == push.payload[:12]


async def test_a_flipped_bit_is_refused_by_name_and_the_old_version_stays(store, engine):
    await send(store, 1, Push())
    first = await store.commit(1)
    push = Push(seed=5)
    await send(store, 2, push)
    await put_part(store, 2, 2, bytes([push.parts[2][0] ^ 1]) + push.parts[2][1:])
    error = await fails(lambda: store.commit(2), 422, "hash_mismatch", "the bytes of a hash to")
    assert error.field == "a"
    assert (engine.policy_version, engine.pushes, store.content_hash) == (1, 1, first.content_hash)
    # The bad bytes are gone, and the next push starts from nothing.
    await fails(lambda: store.commit(2), 404, "not_begun")
    assert store.begin(2, push.manifest).missing_parts == [0, 1, 2]
    await send(store, 2, push)
    assert (await store.commit(2)).version == 2


async def test_a_repeated_commit_repeats_its_answer(store, engine):
    push = Push()
    await send(store, 1, push)
    # At once, as when the answer to the first was lost, and later.
    answers = await asyncio.gather(store.commit(1), store.commit(1))
    answers.append(await store.commit(1))
    assert len(set(map(repr, answers))) == 1
    assert engine.pushes == 1
    # So does a whole push that is repeated.
    assert store.begin(1, push.manifest) == WeightsStatus(version=1, missing_parts=[])


async def test_versions_only_grow(store):
    push = Push()
    await fails(
        lambda: store.begin(0, push.manifest), 409, "stale_version", "push version 1 or above"
    )
    await send(store, 3, push)
    await store.commit(3)
    for version in (2, 3):
        error = await fails(
            lambda v=version: store.begin(v, Push(seed=9).manifest), 409, "stale_version"
        )
        assert f"version {version} is not newer than 3" in error.message


async def test_a_wrong_base_is_refused(store):
    manifest = replace(Push().manifest, base_version=7)
    error = await fails(
        lambda: store.begin(8, manifest), 409, "wrong_base", "send every tensor whole"
    )
    assert error.field == "$.base_version"
    assert "base_version=7, but 0 is being served" in error.message
    fresh = replace(manifest, base_version=0)
    await fails(lambda: store.begin(8, fresh), 409, "wrong_base", "there is no copy of version 0")


async def test_another_push_replaces_the_one_that_was_staged(store, engine):
    await send(store, 1, Push())
    other = Push(seed=3)
    assert store.begin(1, other.manifest).missing_parts == [0, 1, 2]
    await send(store, 1, other)
    await store.commit(1)
    assert engine.bytes["b"] == other.payload[:12]
    await fails(
        lambda: put_part(store, 2, 0, b""), 404, "not_begun", "begin with POST /v1/weights/2"
    )


async def test_what_the_engine_refuses_changes_nothing(store, engine):
    push = Push(bad=[2])
    await send(store, 1, push)
    await fails(
        lambda: store.commit(1), 422, "rejected_weights", "still serves 0: bad is not in the model"
    )
    assert (engine.policy_version, store.content_hash, store.staged_bytes) == (0, "", 0)


@pytest.mark.parametrize(("index", "data"), [(0, b"123"), (2, b"1234567890"), (3, b""), (9, b"1")])
async def test_parts_of_the_wrong_length_or_place_are_refused(store, index, data):
    store.begin(1, Push().manifest)
    await fails(lambda: put_part(store, 1, index, data), 400, "bad_part", f"part {index} ")


def changed(index, **fields):
    """The manifest with one tensor changed."""
    manifest = Push().manifest
    tensors = list(manifest.tensors)
    tensors[index] = replace(tensors[index], **fields)
    return replace(manifest, tensors=tensors)


@pytest.mark.parametrize(
    ("manifest", "field", "message"),
    [
        (
            changed(1, offset=13),
            "$.tensors[1].offset",
            "a starts at 13, but the tensor before it ends at 12",
        ),
        (changed(0, shape=[4]), "$.tensors[0].nbytes", "b has 12 bytes, but float32 [4] has 16"),
        (changed(0, dtype="bfloat16"), "$.tensors[0].nbytes", "but bfloat16 [3] has 6"),
        (changed(0, shape=[-1, -3]), "$.tensors[0].shape", "b has the shape [-1, -3]"),
        (changed(0, hash="XYZ"), "$.tensors[0].hash", "'XYZ' is not 32 lower-case hexadecimal"),
        (changed(1, name="b"), "$.tensors[1].name", "b is listed twice"),
        (
            replace(Push().manifest, payload_bytes=29),
            "$.payload_bytes",
            "29, but the tensors have 28",
        ),
        (replace(Push().manifest, tensors=[]), "$.tensors", "at least one tensor"),
    ],
)
async def test_manifests_that_do_not_add_up_are_refused(store, manifest, field, message):
    error = await fails(lambda: store.begin(1, manifest), 400, "invalid_manifest", message)
    assert error.field == field


async def test_sizes_are_limited(store):
    await fails(
        lambda: store.begin(1, Push(a=[251]).manifest), 413, "too_large", "payload_bytes=1004"
    )
    manifest = Push(part_bytes=101).manifest
    await fails(lambda: store.begin(1, manifest), 413, "too_large", "part_bytes=101 exceeds")


async def test_rollouts_are_held_back_only_while_the_engine_swaps(engine):
    during = []

    @asynccontextmanager
    async def paused(in_flight):
        during.append(engine.pushes)
        yield
        during.append(engine.pushes)

    store = WeightStore(engine, paused=paused)
    push = Push()
    await send(store, 1, push)
    committing = asyncio.create_task(store.commit(1))
    while not during:
        await asyncio.sleep(0)
    await fails(lambda: put_part(store, 1, 0, push.parts[0]), 409, "committing")
    await fails(lambda: store.begin(2, push.manifest), 409, "committing")
    await committing
    assert during == [0, 1]


async def test_a_failed_swap_lets_rollouts_go_on(engine):
    released = []

    @asynccontextmanager
    async def paused(in_flight):
        try:
            yield
        finally:
            released.append(True)

    store = WeightStore(engine, paused=paused)
    await send(store, 1, Push(bad=[1]))
    await fails(lambda: store.commit(1), 422, "rejected_weights")
    assert released == [True]
