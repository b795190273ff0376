"""Pushes in delta mode: added to the base that is served, verified, undone when refused; one host copy at most."""

import numpy as np
import pytest
import xxhash
from msgspec.structs import replace
from sidecar_cases import put_part

from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.errors import RequestError
from rollout_sidecar.protocol import TensorEntry, WeightsManifest, content_hash
from rollout_sidecar.weight_codec import Delta, encode
from rollout_sidecar.weights import WeightStore

SHAPES = {"a": (40, 10), "b": (7,), "c": (30,)}
PART = 64


class Engine(ScriptedEngine):
    """Keeps what it is given, and which tensors it was told have changed."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, [])
        self.bits: dict[str, list[int]] = {}
        self.changed: list[frozenset[str] | None] = []
        self.refuse = False

    async def load_weights(self, tensors, policy_version, changed=None):
        if self.refuse:
            raise ValueError("not today")
        self.changed.append(changed)
        self.bits = {n: np.frombuffer(t.data, np.uint16).tolist() for n, t in tensors.items()}
        await super().load_weights(tensors, policy_version)


@pytest.fixture
def engine(tiny_tokenizer):
    return Engine(tiny_tokenizer)


@pytest.fixture
def store(engine):
    return WeightStore(engine)


def weights(seed):
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 0x7F00, np.prod(shape)).astype(np.uint16)  # finite as bfloat16
        for name, shape in SHAPES.items()
    }


def step(bits, seed, only=tuple(SHAPES)):
    """The same weights with a few elements moved."""
    rng = np.random.default_rng(seed)
    moved = {name: values.copy() for name, values in bits.items()}
    for name in only:
        moved[name][rng.integers(0, moved[name].size, 3)] += np.uint16(1)
    return moved


def push_of(new, old=None, base_version=None, whole=()):
    """Manifest and payload of a push; a delta push where `old` is given."""
    entries, pieces, offset = [], [], 0
    for name, values in new.items():
        encoding, piece = "raw", values.tobytes()
        if old is not None and name not in whole:
            same = np.array_equal(values, old[name])
            encoding = "same" if same else "delta"
            piece = b"" if same else encode(Delta.between(old[name], values))
        entries.append(
            TensorEntry(
                name=name,
                dtype="bfloat16",
                shape=list(SHAPES[name]),
                offset=offset,
                nbytes=len(piece),
                hash=xxhash.xxh3_128_hexdigest(values.tobytes()),
                encoding=encoding,
            )
        )
        pieces.append(piece)
        offset += len(piece)
    manifest = WeightsManifest(
        tensors=entries,
        payload_bytes=offset,
        part_bytes=PART,
        base_version=base_version,
        base_hash="" if old is None else content_hash(full_entries(old)),
    )
    return manifest, b"".join(pieces)


def full_entries(bits):
    return push_of(bits)[0].tensors


async def send(store, version, manifest, payload):
    status = store.begin(version, manifest)
    for i in status.missing_parts:
        await put_part(store, version, i, payload[i * PART : (i + 1) * PART])
    return await store.commit(version)


def served(bits):
    return {name: values.tolist() for name, values in bits.items()}


async def test_deltas_add_up_over_many_versions(store, engine):
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    for version in range(2, 12):
        new = step(bits, version)
        done = await send(store, version, *push_of(new, bits, version - 1))
        assert engine.bits == served(new)
        # The content hash is that of a full push of the same weights: a cold start would agree.
        assert done.content_hash == content_hash(full_entries(new))
        bits = new
    assert engine.policy_version == 11


async def test_the_engine_is_told_what_changed(store, engine):
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    new = step(bits, 5, only=("b",))
    await send(store, 2, *push_of(new, bits, 1))
    assert engine.changed == [None, frozenset({"b"})]
    assert engine.bits == served(new)


async def test_a_tensor_may_come_whole_among_deltas(store, engine):
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    new = step(bits, 5) | {"a": weights(9)["a"]}
    await send(store, 2, *push_of(new, bits, 1, whole=("a",)))
    assert engine.bits == served(new)
    newer = step(new, 6)
    await send(store, 3, *push_of(newer, new, 2))
    assert engine.bits == served(newer)


@pytest.mark.parametrize("fault", ["bit", "hash", "other base bytes"])
async def test_a_damaged_delta_is_refused_and_undone(store, engine, fault):
    bits = weights(0)
    first = await send(store, 1, *push_of(bits))
    new = step(bits, 5)
    manifest, payload = push_of(new, bits, 1)
    if fault == "bit":
        payload = payload[:-1] + bytes([payload[-1] ^ 1])
    elif fault == "hash":
        *others, last = manifest.tensors
        manifest = replace(manifest, tensors=[*others, replace(last, hash="0" * 32)])
    else:
        manifest, payload = push_of(new, step(bits, 77), 1)
        manifest = replace(manifest, base_hash="")
    with pytest.raises(RequestError) as caught:
        await send(store, 2, manifest, payload)
    assert (caught.value.status, caught.value.kind) == (422, "hash_mismatch")
    assert engine.bits == served(bits)
    assert store.content_hash == first.content_hash
    # Nothing of the bad push stayed in the base: a good delta still fits.
    await send(store, 2, *push_of(new, bits, 1))
    assert engine.bits == served(new)


async def test_what_the_engine_refuses_is_undone(store, engine):
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    new = step(bits, 5) | {"a": weights(9)["a"]}
    engine.refuse = True
    with pytest.raises(RequestError, match="the engine refused version 2 and still serves 1"):
        await send(store, 2, *push_of(new, bits, 1, whole=("a",)))
    engine.refuse = False
    new = step(bits, 6)
    await send(store, 2, *push_of(new, bits, 1))
    assert engine.bits == served(new)


async def test_a_base_with_other_content_is_refused(store):
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    other = weights(1)
    with pytest.raises(RequestError, match="version 1 has the content .* here, not ") as caught:
        await send(store, 2, *push_of(step(other, 5), other, 1))
    assert (caught.value.status, caught.value.kind) == (409, "wrong_base")


async def test_a_restarted_sidecar_has_no_base(tiny_tokenizer):
    engine = Engine(tiny_tokenizer)
    engine.policy_version = 1
    bits = weights(0)
    manifest, payload = push_of(step(bits, 5), bits, 1)
    with pytest.raises(RequestError, match="there is no copy of version 1 to add a delta to"):
        await send(WeightStore(engine), 2, manifest, payload)


async def test_there_is_never_a_second_copy(store):
    bits = weights(0)
    whole = sum(values.nbytes for values in bits.values())
    await send(store, 1, *push_of(bits))
    assert (store.base_bytes, store.staged_bytes) == (whole, 0)
    manifest, payload = push_of(step(bits, 5), bits, 1)
    store.begin(2, manifest)
    assert (store.base_bytes, store.staged_bytes) == (whole, len(payload))
    # A push of everything drops the base as soon as it begins.
    store.begin(2, push_of(weights(3))[0])
    assert (store.base_bytes, store.staged_bytes) == (0, whole)
    with pytest.raises(RequestError, match="there is no copy of version 1"):
        store.begin(3, manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoding": "delta"}, "a is coded as 'delta', and there is no base_version"),
        ({"encoding": "same", "nbytes": 0}, "a is coded as 'same', and there is no base_version"),
    ],
)
async def test_codes_need_a_base(store, change, message):
    manifest, _ = push_of(weights(0))
    first, *others = manifest.tensors
    bad = replace(manifest, tensors=[replace(first, **change), *others])
    with pytest.raises(RequestError, match=message):
        store.begin(1, bad)


async def test_a_delta_names_every_tensor(store):
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    manifest, _ = push_of(step(bits, 5), bits, 1)
    fewer = replace(
        manifest,
        tensors=manifest.tensors[:2],
        payload_bytes=sum(entry.nbytes for entry in manifest.tensors[:2]),
    )
    with pytest.raises(RequestError, match="c is being served, and not in the push"):
        store.begin(2, fewer)


# --- on their way while they are verified ---------------------------------------------------------------------------


class Shelf:
    """Where an engine puts what it is given early."""

    def __init__(self, sizes):
        self.sizes, self.bits, self.dropped = sizes, {}, False

    def add(self, tensors):
        assert not self.dropped
        for tensor in tensors:
            assert tensor.name not in self.bits
            assert self.sizes[tensor.name] == tensor.data.nbytes
            self.bits[tensor.name] = np.frombuffer(tensor.data, np.uint16).tolist()

    def drop(self):
        self.dropped = True


class EarlyEngine(Engine):
    """Loads what was staged early, and nothing else."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.shelves: list[tuple[int, Shelf]] = []

    def begin_staging(self, tensors, policy_version):
        self.shelves.append((policy_version, Shelf({t.name: t.data.nbytes for t in tensors})))
        return self.shelves[-1][1]

    async def load_weights(self, tensors, policy_version, changed=None):
        before = self.bits
        await super().load_weights(tensors, policy_version, changed)
        version, shelf = self.shelves[-1]
        assert (version, shelf.dropped) == (policy_version, False)
        assert set(shelf.bits) == set(shelf.sizes) == (set(tensors) if changed is None else changed)
        self.bits = before | shelf.bits


async def test_what_changes_is_staged_while_it_is_verified(tiny_tokenizer):
    engine = EarlyEngine(tiny_tokenizer)
    store = WeightStore(engine)
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    assert engine.bits == served(bits)
    new = step(bits, 5, only=("b",)) | {"a": weights(9)["a"]}
    await send(store, 2, *push_of(new, bits, 1, whole=("a",)))
    assert engine.bits == served(new)
    assert set(engine.shelves[-1][1].sizes) == {"a", "b"}


async def test_what_was_staged_is_dropped_when_it_is_refused(tiny_tokenizer):
    engine = EarlyEngine(tiny_tokenizer)
    store = WeightStore(engine)
    bits = weights(0)
    await send(store, 1, *push_of(bits))
    new = step(bits, 5)
    manifest, payload = push_of(new, bits, 1)
    with pytest.raises(RequestError, match="hash to"):
        await send(store, 2, manifest, payload[:-1] + bytes([payload[-1] ^ 1]))
    engine.refuse = True
    with pytest.raises(RequestError, match="the engine refused version 2"):
        await send(store, 2, manifest, payload)
    assert [shelf.dropped for _, shelf in engine.shelves] == [False, True, True]
    engine.refuse = False
    await send(store, 2, manifest, payload)
    assert engine.bits == served(new)
