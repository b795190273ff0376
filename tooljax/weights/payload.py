"""The bytes of one push: the tensors coded one after the other, seen as one stream."""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import jax
import msgspec
import numpy as np
import xxhash

from rollout_sidecar.protocol import TensorEntry, content_hash
from rollout_sidecar.weight_codec import Delta, encode
from tooljax.weights.changes import find_changes

DTYPES = get_args(TensorEntry.__annotations__["dtype"])

WORTH_A_DELTA = 0.4
"""Above this share of changed elements a tensor is sent whole without trying: its delta would hardly be smaller."""

AHEAD = 4
"""Tensors that are on their way to the host while an earlier one is hashed."""


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

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the stream, from one tensor or several."""
        pieces = []
        index = bisect.bisect_right(self._ends, offset)
        while nbytes > 0:
            start = offset - self.entries[index].offset
            piece = self.pieces[index][start : start + nbytes]
            pieces.append(piece)
            offset += piece.nbytes
            nbytes -= piece.nbytes
            index += 1
        return b"".join(pieces)

    def whole(self) -> "Payload":
        """The same content as a full push."""
        raw = [msgspec.structs.replace(entry, encoding="raw") for entry in self.entries]
        coded = {entry.name: (entry, self.data[entry.name].data) for entry in raw}
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


def full_payload(tensors: Iterable[tuple[str, jax.Array]], *, keep_arrays: bool) -> Payload:
    """Every tensor whole. They come to the host one after the other; the next ones are on their way meanwhile.

    Args:
        keep_arrays: the arrays stay on the devices, for the next push to be compared with.
    """
    coded: dict[str, Coded] = {}
    arrays: dict[str, jax.Array] = {}
    data: dict[str, np.ndarray] = {}
    for name, array in _fetched_ahead(tensors):
        data[name] = _to_host(name, array)
        coded[name] = _raw(name, array, data[name])
        if keep_arrays:
            arrays[name] = array
    return _assemble(coded, arrays, data)


def delta_payload(base: Base, tensors: Mapping[str, jax.Array]) -> Payload:
    """What changed since `base`, whose host copy is brought up to date in place.

    Tensors of 16-bit elements are sent as deltas where that is smaller, others whole; those without a change are only
    named.
    """
    coded: dict[str, Coded] = {}
    deltas: dict[str, Delta] = {}
    replaced: dict[str, np.ndarray] = {}
    elements = changed = 0
    for name, array in tensors.items():
        old = base.data[name]
        delta = None
        if array.dtype.itemsize == 2:
            elements += array.size
            delta = find_changes(base.arrays[name], array, at_most=int(WORTH_A_DELTA * array.size))
        code = b"" if delta is None or not delta.positions.size else encode(delta)
        if delta is not None and not code:
            coded[name] = _same(base.entries[name])
        elif delta is not None and len(code) < old.nbytes:
            delta.apply(old.view(np.uint16))
            deltas[name] = delta
            changed += delta.positions.size
            coded[name] = _entry(name, array, old, "delta"), memoryview(code)
        else:
            new = _to_host(name, array)
            if array.dtype.itemsize == 2:
                changed += int(np.count_nonzero(new.view(np.uint16) != old.view(np.uint16)))
            coded[name] = _raw(name, array, new)
            if coded[name][0].hash == base.entries[name].hash:
                coded[name] = _same(base.entries[name])
            else:
                replaced[name], base.data[name] = old, new
    payload = _assemble(coded, tensors, base.data)
    payload.base, payload.deltas, payload.replaced = base, deltas, replaced
    payload.elements, payload.changed_elements = elements, changed
    return payload


def _fetched_ahead(
    tensors: Iterable[tuple[str, jax.Array]],
) -> Iterator[tuple[str, jax.Array]]:
    """The same tensors, each with the next AHEAD ones on their way to the host."""
    waiting: deque[tuple[str, jax.Array]] = deque()
    for name, array in tensors:
        array.copy_to_host_async()
        waiting.append((name, array))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting


def _assemble(
    coded: Mapping[str, Coded], arrays: Mapping[str, jax.Array], data: dict[str, np.ndarray]
) -> Payload:
    """Lays the pieces end to end."""
    entries, pieces, offset = [], [], 0
    for entry, piece in coded.values():
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
    return TensorEntry(
        name=name,
        dtype=str(array.dtype),  # type: ignore[arg-type]
        shape=list(array.shape),
        offset=0,
        nbytes=0,
        hash=xxhash.xxh3_128_hexdigest(data.data),
        encoding=encoding,  # type: ignore[arg-type]
    )


def _to_host(name: str, array: jax.Array) -> np.ndarray:
    """The bytes of an array, flat and our own to change.

    JAX runs on little-endian machines only, which is the order on the wire.
    """
    if str(array.dtype) not in DTYPES:
        raise ValueError(f"{name} is {array.dtype}; weights are pushed as {', '.join(DTYPES)}")
    # A copy: on a CPU, NumPy would look into JAX's own memory.
    return np.array(array, copy=True, order="C").reshape(-1).view(np.uint8)
