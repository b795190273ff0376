"""The bytes of one push: the tensors coded one after the other, seen as one stream."""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import xxhash

from rollout_sidecar.protocol import TensorEntry, content_hash
from rollout_sidecar.threads import brisk, workers
from rollout_sidecar.weight_codec import Delta, encode_all
from tooljax.weights.changes import Changes, alike, find_changes, in_order
from tooljax.weights.stopwatch import Stopwatch

DTYPES = get_args(TensorEntry.__annotations__["dtype"])

WORTH_A_DELTA = 0.4
"""Above this share of changed elements a tensor is sent whole without trying: its delta would hardly be smaller."""

AHEAD = 4
"""Tensors that are on their way to the host while an earlier one is copied and hashed."""


Coded = tuple[TensorEntry, memoryview]
"""A tensor's entry, and the bytes that it is sent as."""


@dataclass
class Base:
    """A version that every sidecar has acknowledged."""

    version: int
    content_hash: str
    entries: dict[str, TensorEntry]
    arrays: Mapping[str, jax.Array]
    """On the devices, to be compared with."""
    data: dict[str, np.ndarray]
    """On the host: flat uint8."""

    def fits(self, tensors: Mapping[str, jax.Array]) -> bool:
        """Whether those are the same names, shapes and dtypes."""
        return {n: (a.shape, a.dtype) for n, a in self.arrays.items()} == {
            n: (a.shape, a.dtype) for n, a in tensors.items()
        }


@dataclass
class Payload:
    """One push. `entries[i]` is coded in `pieces[i]`."""

    entries: list[TensorEntry]
    pieces: list[memoryview]
    arrays: Mapping[str, jax.Array]
    """On the devices; empty where no delta will be asked for."""
    data: dict[str, np.ndarray]
    """Every tensor whole, on the host."""
    base: Base | None = None
    """What deltas refer to; None in a full push."""
    deltas: dict[str, Delta] = field(default_factory=dict)
    replaced: dict[str, np.ndarray] = field(default_factory=dict)
    elements: int = 0
    changed_elements: int = 0

    def __post_init__(self):
        self._ends = list(itertools.accumulate(piece.nbytes for piece in self.pieces))

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return self._ends[-1] if self._ends else 0

    @property
    def full_bytes(self) -> int:
        """Length of the stream of a full push."""
        return sum(data.nbytes for data in self.data.values())

    def read(self, offset: int, nbytes: int) -> list[memoryview]:
        """Bytes of the stream, from one tensor or several. Nothing is copied."""
        return [
            self.pieces[index][start:stop]
            for index, start, stop in spans(self._ends, offset, nbytes)
        ]

    def whole(self) -> "Payload":
        """The same content as a full push."""
        raw = [msgspec.structs.replace(entry, encoding="raw") for entry in self.entries]
        coded = [(entry, self.data[entry.name].data) for entry in raw]
        return _assemble(coded, self.arrays, self.data)

    def acknowledged(self, version: int) -> Base:
        """What the next push is compared with, once every sidecar serves this one."""
        entries = {entry.name: entry for entry in self.entries}
        return Base(version, content_hash(self.entries), entries, self.arrays, self.data)

    def undo(self, base: Base) -> None:
        """Takes the changes out of the base's host copy again."""
        for name, delta in self.deltas.items():
            delta.undo(base.data[name].view(np.uint16))
        base.data.update(self.replaced)


def full_payload(
    tensors: Iterable[tuple[str, jax.Array]],
    *,
    keep_arrays: bool,
    watch: Stopwatch,
    arrived: Callable[[np.ndarray], None] = lambda data: None,
) -> Payload:
    """Every tensor whole. They come to the host one after the other; the next ones are on their way meanwhile.

    Args:
        keep_arrays: the arrays stay on the devices, for the next push to be compared with.
        arrived: is told of each tensor as soon as it is on the host, before it is hashed.
    """
    coded: list[Coded] = []
    arrays: dict[str, jax.Array] = {}
    data: dict[str, np.ndarray] = {}
    for name, array, detached in _fetched_ahead(tensors):
        with watch.stage("copy"):
            data[name] = _to_host(detached)
        arrived(data[name])
        with watch.stage("hash"):
            coded.append(_raw(name, array, data[name]))
        if keep_arrays:
            arrays[name] = array
    return _assemble(coded, arrays, data)


def delta_payload(
    base: Base,
    tensors: Mapping[str, jax.Array],
    *,
    watch: Stopwatch,
    sizes: dict[int, int] | None = None,
) -> Payload:
    """What changed since `base`, whose host copy is brought up to date in place.

    Tensors of 16-bit elements are sent as deltas where that is smaller, others whole; those without a change are only
    named. While the devices compare some, threads code others.

    Args:
        sizes: what is remembered from push to push, to find changes sooner; empty before the first.
    """
    coder = _Coder(base, tensors, watch)
    narrow = {
        name: array for name, array in tensors.items() if array.dtype.itemsize == 2 and array.ndim
    }
    groups = alike(base.arrays, narrow)
    pairs = [[(base.arrays[name], tensors[name]) for name in names] for names in groups]
    coding: list[Future[list[Coded]]] = []
    with brisk(), workers() as pool:
        for name in tensors:
            if name not in narrow:
                coding.append(pool.submit(lambda name: [coder.replace(name)], name))
        found = find_changes(pairs, share=WORTH_A_DELTA, watch=watch, sizes=sizes)
        for names, several in zip(groups, found, strict=True):
            coding.append(pool.submit(coder.code, names, several))
    coded = {entry.name: (entry, piece) for task in coding for entry, piece in task.result()}
    payload = _assemble([coded[name] for name in tensors], tensors, base.data)
    payload.base, payload.deltas, payload.replaced = base, coder.deltas, coder.replaced
    payload.elements = sum(a.size for a in tensors.values() if a.dtype.itemsize == 2)
    payload.changed_elements = sum(coder.changed.values())
    return payload


class _Coder:
    """Codes tensors against a base, which it brings up to date. Runs in several threads, for different tensors."""

    def __init__(self, base: Base, tensors: Mapping[str, jax.Array], watch: Stopwatch):
        self.deltas: dict[str, Delta] = {}
        self.replaced: dict[str, np.ndarray] = {}
        self.changed: dict[str, int] = {}
        """16-bit elements that differ, by tensor."""
        self._base, self._tensors, self._watch = base, tensors, watch

    def code(self, names: Sequence[str], changes: Sequence[Changes | None]) -> list[Coded]:
        """Tensors by what changed in them, or whole where that is smaller or not known."""
        found = [(n, c) for n, c in zip(names, changes, strict=True) if c is not None]
        with self._watch.stage("encode"):
            deltas = in_order([change for _, change in found])
            pieces = encode_all(deltas)
        coded = [self.replace(n) for n, c in zip(names, changes, strict=True) if c is None]
        for (name, _), delta, piece in zip(found, deltas, pieces, strict=True):
            coded.append(self._apply(name, delta, piece))
        return coded

    def _apply(self, name: str, delta: Delta, piece: bytes) -> Coded:
        """Brings the host copy of a tensor up to date."""
        if not delta.positions.size:
            return _same(self._base.entries[name])
        data = self._base.data[name]
        with self._watch.stage("apply"):
            delta.apply(data.view(np.uint16))
        self.deltas[name], self.changed[name] = delta, delta.positions.size
        smaller = len(piece) < data.nbytes
        with self._watch.stage("hash"):
            entry = _entry(name, self._tensors[name], data, "delta" if smaller else "raw")
        return entry, memoryview(piece) if smaller else data.data

    def replace(self, name: str) -> Coded:
        """A tensor whole, unless nothing changed in it."""
        array, old = self._tensors[name], self._base.data[name]
        with self._watch.stage("copy"):
            new = _to_host(_detached(name, array))
        with self._watch.stage("hash"):
            raw = _raw(name, array, new)
        if raw[0].hash == self._base.entries[name].hash:
            return _same(self._base.entries[name])
        self.replaced[name], self._base.data[name] = old, new
        if array.dtype.itemsize == 2:
            moved = new.view(np.uint16) != old.view(np.uint16)
            self.changed[name] = int(np.count_nonzero(moved))
        return raw


def layout(shapes: Iterable[tuple[str, str, Sequence[int]]]) -> list[TensorEntry]:
    """The entries of a full push of tensors (name, dtype, shape), without their hashes."""
    entries, offset = [], 0
    for name, dtype, shape in shapes:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        entries.append(_new_entry(name, dtype, shape, offset=offset, nbytes=nbytes))
        offset += nbytes
    return entries


def spans(ends: Sequence[int], offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Which pieces hold the bytes of a stream from `offset` on: (index, start, stop) within each. `ends` are where the
    pieces end in the stream."""
    index = bisect.bisect_right(ends, offset)
    while nbytes > 0 and index < len(ends):
        begin = ends[index - 1] if index else 0
        start, stop = offset - begin, min(offset + nbytes, ends[index]) - begin
        yield index, start, stop
        offset, nbytes = offset + stop - start, nbytes - (stop - start)
        index += 1


def _fetched_ahead(
    tensors: Iterable[tuple[str, jax.Array]],
) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """Each tensor, and what to fetch it by, with the next AHEAD ones on their way to the host."""
    waiting: deque[tuple[str, jax.Array, jax.Array]] = deque()
    for name, array in tensors:
        detached = _detached(name, array)
        detached.copy_to_host_async()
        waiting.append((name, array, detached))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting


def _assemble(
    coded: Sequence[Coded], arrays: Mapping[str, jax.Array], data: dict[str, np.ndarray]
) -> Payload:
    """Lays the pieces end to end."""
    entries, pieces, offset = [], [], 0
    for entry, piece in coded:
        entries.append(msgspec.structs.replace(entry, offset=offset, nbytes=piece.nbytes))
        pieces.append(piece)
        offset += piece.nbytes
    return Payload(entries, pieces, arrays, data)


def _same(entry: TensorEntry) -> Coded:
    return msgspec.structs.replace(entry, encoding="same"), memoryview(b"")


def _raw(name: str, array: jax.Array, data: np.ndarray) -> Coded:
    return _entry(name, array, data, "raw"), data.data


def _entry(name: str, array: jax.Array, data: np.ndarray, encoding: str) -> TensorEntry:
    """Offset and length are known when the pieces are laid end to end."""
    digest = xxhash.xxh3_128_hexdigest(data.data)
    return _new_entry(name, str(array.dtype), array.shape, hash=digest, encoding=encoding)


def _new_entry(
    name: str,
    dtype: str,
    shape: Sequence[int],
    *,
    offset: int = 0,
    nbytes: int = 0,
    hash: str = "",
    encoding: str = "raw",
) -> TensorEntry:
    return TensorEntry(
        name=name,
        dtype=dtype,  # type: ignore[arg-type]
        shape=list(shape),
        offset=offset,
        nbytes=nbytes,
        hash=hash,
        encoding=encoding,  # type: ignore[arg-type]
    )


@jax.jit
def _bits(array: jax.Array) -> jax.Array:
    kind = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, kind)


def _detached(name: str, array: jax.Array) -> jax.Array:
    """The same bits in an array of their own, if need be: JAX keeps an array's host copy for as long as it lives."""
    if str(array.dtype) not in DTYPES:
        raise ValueError(f"{name} is {array.dtype}; weights are pushed as {', '.join(DTYPES)}")
    devices = array.sharding.device_set
    here = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return array if here else _bits(array)


def _to_host(detached: jax.Array) -> np.ndarray:
    """The bytes of an array, flat and our own to change.

    JAX runs on little-endian machines only, which is the order on the wire.
    """
    host = np.asarray(detached)
    if host.flags.owndata:  # made for this, and known to nobody else
        host.flags.writeable = True
    else:  # on a CPU, NumPy looks into JAX's own memory
        host = np.array(host, copy=True, order="C")
    return host.reshape(-1).view(np.uint8)
