"""Several senders, late parts and late hashes: nothing of one push ever reaches another, and bytes that are being
verified do not change any more."""

import asyncio
import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from msgspec.structs import replace
from sidecar_cases import Push, put_part

from rollout_sidecar import host_memory, weights
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.errors import RequestError
from rollout_sidecar.protocol import WeightsCommit, WeightsCommitted, content_hash
from rollout_sidecar.weights import WeightStore


class Engine(ScriptedEngine):
    """Keeps the bytes of what is pushed, and can be held up while it takes them."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, [])
        self.bytes: dict[str, bytes] = {}
        self.swapping = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def load_weights(self, tensors, policy_version, changed=None):
        self.swapping.set()
        await self.go_on.wait()
        self.bytes = {name: bytes(tensor.data) for name, tensor in tensors.items()}
        await super().load_weights(tensors, policy_version, changed)


@pytest.fixture
async def engine(tiny_tokenizer):
    return Engine(tiny_tokenizer)


@pytest.fixture
async def store(engine):
    return WeightStore(engine)


class Sent(Push):
    """A push with an identity, perhaps begun without its hashes."""

    def __init__(self, push_id, seed, late_hashes):
        super().__init__(seed=seed)
        self.complete = self.manifest
        tensors = self.manifest.tensors
        if late_hashes:
            tensors = [replace(entry, hash="") for entry in tensors]
        self.manifest = replace(self.manifest, push_id=push_id, tensors=tensors)


def sent_by(push_id, seed=0, *, late_hashes=False):
    return Sent(push_id, seed, late_hashes)


def order(push):
    """The commit of a push."""
    entries = push.complete.tensors
    late = not push.manifest.tensors[0].hash
    return WeightsCommit(
        push_id=push.manifest.push_id,
        content_hash=content_hash(entries),
        hashes=[entry.hash for entry in entries] if late else [],
    )


async def put(store, version, push, *parts):
    for i in parts:
        await put_part(store, version, i, push.parts[i], push.manifest.push_id)


async def refused(call, kind, message, status=409):
    with pytest.raises(RequestError, match=message) as caught:
        await call
    assert (caught.value.status, caught.value.kind) == (status, kind)


def bytes_of(push):
    return {"b": push.payload[:12], "a": push.payload[12:]}


# --- two trainers -------------------------------------------------------------------------------------------------


async def test_the_one_that_begins_last_wins_and_the_other_is_told(store, engine):
    mine, other = sent_by("mine"), sent_by("other", seed=7)
    store.begin(1, mine.manifest)
    await put(store, 1, mine, 0, 1)
    assert store.begin(1, other.manifest).missing_parts == [0, 1, 2]
    told = "another push, of version 1, began after this one and replaced it; only one trainer"
    await refused(put(store, 1, mine, 2), "another_push", told)
    await refused(store.commit(1, order(mine)), "another_push", told)
    await put(store, 1, other, 0, 1, 2)
    await store.commit(1, order(other))
    assert engine.bytes == bytes_of(other)
    # Too late for the first one: the same version with other content is refused at every step.
    await refused(store.commit(1, order(mine)), "stale_version", "version 1 is not newer than 1")


async def test_the_same_holds_of_another_version(store, engine):
    mine, other = sent_by("mine"), sent_by("other", seed=7)
    store.begin(1, mine.manifest)
    store.begin(2, other.manifest)
    await refused(put(store, 1, mine, 0), "another_push", "another push, of version 2, began")
    await put(store, 2, other, 0, 1, 2)
    await store.commit(2, order(other))
    await refused(put(store, 1, mine, 0), "not_begun", "no push of version 1", status=404)
    assert engine.bytes == bytes_of(other)


async def test_the_same_content_may_be_gone_on_with_by_a_sender_that_was_started_again(store):
    before, after = sent_by("before"), sent_by("after")
    store.begin(1, before.manifest)
    await put(store, 1, before, 0, 2)
    assert store.begin(1, after.manifest).missing_parts == [1]
    # The one before must not write any more, alive or not.
    await refused(put(store, 1, before, 1), "another_push", "began after this one")
    await put(store, 1, after, 1)
    assert (await store.commit(1, order(after))).version == 1


async def test_a_part_under_way_is_not_written_into_the_push_that_replaces_it(store, engine):
    mine, other = sent_by("mine"), sent_by("other", seed=7)
    store.begin(1, mine.manifest)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly():
        yield mine.parts[0][:4]
        begun.set()
        await go_on.wait()
        yield mine.parts[0][4:]

    sending = asyncio.create_task(store.receive(1, 0, slowly(), "mine"))
    await begun.wait()
    store.begin(1, other.manifest)
    await put(store, 1, other, 0, 1, 2)
    go_on.set()
    await refused(sending, "another_push", "began after this one")
    await store.commit(1, order(other))
    assert engine.bytes == bytes_of(other)


@pytest.mark.parametrize("when", ["while it is verified and swapped", "after it is served"])
async def test_a_late_copy_of_a_part_changes_nothing(store, engine, when):
    push = sent_by("mine")
    store.begin(1, push.manifest)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly():
        yield b"xxxx"
        begun.set()
        await go_on.wait()
        yield b"yyyyyy"

    late = asyncio.create_task(store.receive(1, 0, slowly(), "mine"))
    await begun.wait()
    await put(store, 1, push, 0, 1, 2)
    engine.go_on.clear()
    committing = asyncio.create_task(store.commit(1, order(push)))
    await engine.swapping.wait()
    if when.startswith("after"):
        engine.go_on.set()
        await committing
    go_on.set()
    with pytest.raises(RequestError) as caught:
        await late
    assert caught.value.kind == ("not_begun" if when.startswith("after") else "committing")
    engine.go_on.set()
    await committing
    assert engine.bytes == bytes_of(push)
    assert store.tensors() is not None
    assert bytes(store.tensors()["b"].data) == push.payload[:12]


async def test_half_a_part_is_no_part(store):
    push = sent_by("mine")
    store.begin(1, push.manifest)
    await put(store, 1, push, 0, 1, 2)

    async def breaks_off():
        yield push.parts[1][:3]
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        await store.receive(1, 1, breaks_off(), "mine")
    await refused(store.commit(1, order(push)), "missing_parts", "1 parts of version 1")
    assert store.begin(1, push.manifest).missing_parts == [1]
    await put(store, 1, push, 1)
    await store.commit(1, order(push))


# --- hashes that come with the commit ---------------------------------------------------------------------------


async def test_hashes_may_come_with_the_commit(store, engine):
    push = sent_by("mine", late_hashes=True)
    assert store.begin(1, push.manifest).missing_parts == [0, 1, 2]
    await put(store, 1, push, 0, 1, 2)
    expected = WeightsCommitted(version=1, content_hash=content_hash(push.complete.tensors))
    assert await store.commit(1, order(push)) == expected
    assert engine.bytes == bytes_of(push)
    assert await store.commit(1, order(push)) == expected
    # Begun again without hashes, nobody can tell that it is the same; with them, it is.
    with pytest.raises(RequestError, match="version 1 is not newer than 1"):
        store.begin(1, push.manifest)
    assert store.begin(1, replace(push.complete, push_id="mine")).missing_parts == []


async def test_late_hashes_are_verified_like_others(store, engine):
    push = sent_by("mine", late_hashes=True)
    store.begin(1, push.manifest)
    await put(store, 1, push, 0, 1, 2)
    await put_part(store, 1, 2, bytes([push.parts[2][0] ^ 1]) + push.parts[2][1:], "mine")
    await refused(store.commit(1, order(push)), "hash_mismatch", "the bytes of a hash to", 422)
    assert (engine.policy_version, engine.bytes) == (0, {})


async def test_without_hashes_only_the_same_sender_goes_on_where_it_stopped(store):
    push = sent_by("mine", late_hashes=True)
    store.begin(1, push.manifest)
    await put(store, 1, push, 0)
    assert store.begin(1, push.manifest).missing_parts == [1, 2]
    other = sent_by("other", late_hashes=True)
    assert store.begin(1, other.manifest).missing_parts == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"hashes": []}, "invalid_commit", "0 hashes for 2 tensors; the manifest left them out"),
        ({"hashes": ["0" * 32]}, "invalid_commit", "1 hashes for 2 tensors"),
        ({"hashes": ["0" * 32, "x"]}, "invalid_manifest", "'x' is not 32 lower-case hexa"),
    ],
)
async def test_commits_without_the_hashes_are_refused_and_may_be_mended(
    store, change, kind, message
):
    push = sent_by("mine", late_hashes=True)
    store.begin(1, push.manifest)
    await put(store, 1, push, 0, 1, 2)
    await refused(store.commit(1, replace(order(push), **change)), kind, message, 400)
    await store.commit(1, order(push))


async def test_hashes_come_once(store):
    push = sent_by("mine")
    store.begin(1, push.manifest)
    await put(store, 1, push, 0, 1, 2)
    twice = replace(order(push), hashes=["0" * 32, "0" * 32])
    await refused(store.commit(1, twice), "invalid_commit", "has the hashes already", 400)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace(m, push_id=""), "needs a push_id"),
        (lambda m: replace(m, base_version=0), "only a push of whole tensors may leave out"),
        (
            lambda m: replace(m, tensors=[m.tensors[0], replace(m.tensors[1], hash="0" * 32)]),
            "either every tensor has its hash, or none",
        ),
    ],
)
async def test_hashes_are_left_out_by_all_of_a_full_push_or_none(store, change, message):
    manifest = change(sent_by("mine", late_hashes=True).manifest)
    with pytest.raises(RequestError, match=message):
        store.begin(1, manifest)


# --- what cannot be served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
async def test_weights_that_are_no_numbers_are_refused_by_name(store, engine, value):
    good = sent_by("good")
    store.begin(1, good.manifest)
    await put(store, 1, good, 0, 1, 2)
    await store.commit(1, order(good))
    bad = Push()
    bad.payload = bad.payload[:-4] + np.float32(value).tobytes()  # the last element of a
    *others, last = bad.manifest.tensors
    last = replace(last, hash=xxhash.xxh3_128_hexdigest(bad.payload[12:]))
    store.begin(2, replace(bad.manifest, tensors=[*others, last]))
    for i, part in enumerate(bad.parts):
        await put_part(store, 2, i, part)
    await refused(store.commit(2), "not_finite", "a holds inf or NaN; look at the last", 422)
    assert (engine.policy_version, engine.bytes) == (1, bytes_of(good))


async def test_a_payload_that_does_not_fit_into_memory_is_refused_before_anything_is_dropped(
    store, monkeypatch
):
    first = sent_by("first")
    store.begin(1, first.manifest)
    await put(store, 1, first, 0)
    monkeypatch.setattr(weights, "available_bytes", lambda: 27)
    # What it would replace counts as free: 27 + 28.
    with pytest.raises(RequestError, match="payload_bytes=56 exceeds the 55 bytes of memory") as e:
        store.begin(2, Push(b=[6], a=[8]).manifest)
    assert (e.value.status, e.value.kind) == (413, "too_large")
    assert store.begin(1, first.manifest).missing_parts == [1, 2]


def test_memory_is_what_the_machine_and_the_group_have_left(tmp_path, monkeypatch):
    group = tmp_path / "groups" / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    assert host_memory.available_bytes() == 50 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("30000\n")
    assert host_memory.available_bytes() == 50 * 1024
    (group / "memory.max").write_text("40000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    assert host_memory.available_bytes() == 40_000 - 30_000 + 500
    for name in ("meminfo", "cgroup"):
        (tmp_path / name).unlink()
    assert host_memory.available_bytes() is None


def test_freed_memory_goes_back_to_the_system():
    """Blocks too small for maps of their own, whose neighbours stay: glibc alone would keep them all."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("only glibc keeps freed blocks like that")
    blocks = [bytearray(b"x" * 100_000) for _ in range(1600)]
    kept = blocks[::16]
    before = resident()
    del blocks
    host_memory.give_back()
    assert before - resident() > 100e6
    assert sum(map(len, kept)) == 10_000_000


def resident() -> int:
    """Memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
