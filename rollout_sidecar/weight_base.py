"""The host copy of the weights being served: what the next delta is added to.

A delta is added in place, so that no second copy is needed, and every tensor is verified before the engine sees any of
them: by its hash, and by holding no inf or NaN. `Applied.undo` brings the old bytes back if the engine refuses.

All tensors lie in one array, so that a thread can work on many of them at once: what matters is how often it asks for
Python, which the engine's events want as well.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.protocol import TensorEntry
from rollout_sidecar.threads import in_threads
from rollout_sidecar.weight_codec import Delta, Deltas, decode, decode_all

_EXPONENT = {
    "float32": (np.uint32, 0x7F80_0000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
"""Bits that are all set in inf and NaN, and in nothing else."""

_LOOKED_AT_ONCE = 2**18
"""Elements, so that they stay in the processor's cache."""

_AT_ONCE = 2**26
"""Bytes of the tensors that a thread takes together."""


class BadTensor(ValueError):
    """A tensor of a push that cannot be served. `name` is the tensor's, `kind` what the sender is told."""

    def __init__(self, name: str, message: str, kind: str = "hash_mismatch"):
        super().__init__(message)
        self.name = name
        self.kind = kind


@dataclass
class Applied:
    """What a push changed in a base."""

    changed: set[str] = field(default_factory=set)
    """Names of the tensors whose bytes are new."""
    _moves: list[Delta] = field(default_factory=list)
    """In the base's one array."""
    _replaced: dict[str, np.ndarray] = field(default_factory=dict)
    """What tensors that came whole had before."""

    def undo(self, base: "Base") -> None:
        """Makes `base` what it was."""
        for moves in self._moves:
            moves.undo(base.bits)
        for name, old in self._replaced.items():
            base.data[name][:] = old
        self._moves, self._replaced, self.changed = [], {}, set()


class Base:
    """The bytes of every tensor, by name."""

    def __init__(self, entries: Sequence[TensorEntry], payload: np.ndarray):
        """Takes over the payload of a full push, flat uint8; nothing is copied, and nothing verified."""
        self.data = {
            entry.name: payload[entry.offset : entry.offset + entry.nbytes] for entry in entries
        }
        self.bits = payload.view(np.uint16)  # every dtype has an even number of bytes
        self._starts = {entry.name: entry.offset // 2 for entry in entries}
        self._entries = {entry.name: entry for entry in entries}

    @property
    def nbytes(self) -> int:
        """Host memory of the copy."""
        return sum(data.nbytes for data in self.data.values())

    def tensors(self) -> dict[str, WeightTensor]:
        """Read-only views, for an engine."""
        return {tensor.name: tensor for tensor in self.named(self._entries)}

    def named(self, names: Iterable[str]) -> list[WeightTensor]:
        """The same, of some."""
        entries = [self._entries[name] for name in names]
        return [
            WeightTensor(e.name, e.dtype, tuple(e.shape), self.data[e.name].data.toreadonly())
            for e in entries
        ]

    def check(self, entries: Sequence[TensorEntry]) -> None:
        """BadTensor unless a delta push names exactly the tensors that are here, with dtype and shape as they are."""
        if missing := set(self._entries) - {entry.name for entry in entries}:
            raise BadTensor(min(missing), f"{min(missing)} is being served, and not in the push")
        for entry in entries:
            here = self._entries.get(entry.name)
            if here is None:
                raise BadTensor(entry.name, f"{entry.name} is not among the tensors being served")
            if (here.dtype, here.shape) != (entry.dtype, entry.shape):
                raise BadTensor(
                    entry.name,
                    f"{entry.name} is {here.dtype} {here.shape} here, not {entry.dtype} {entry.shape}",
                )

    def verify(self) -> None:
        """BadTensor names a tensor that is not what its entry says, or cannot be served."""
        entries = self._largest_first(self._entries.values())
        in_threads(lambda entry: verify(entry, self.data[entry.name]), entries)

    def apply(
        self,
        entries: Sequence[TensorEntry],
        payload: np.ndarray,
        applied_to: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> Applied:
        """Adds a push to the base and verifies every tensor. BadTensor names one that fails; then the base is what it
        was.

        Args:
            applied_to: is told of tensors as soon as they have their new bytes, before these are verified. Called in
                several threads.
        """
        applied = Applied()
        try:
            for entry in entries:
                if entry.encoding == "same" and entry.hash != self._entries[entry.name].hash:
                    raise _mismatch(entry, self._entries[entry.name].hash)
            in_threads(
                lambda some: self._apply_some(some, payload, applied, applied_to),
                self.batches(entries),
            )
        except BaseException:
            applied.undo(self)
            raise
        return applied

    def accept(self, entries: Sequence[TensorEntry]) -> None:
        """The push is being served: its hashes are the base's."""
        self._entries = {entry.name: entry for entry in entries}

    def _largest_first(self, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
        """So that no thread is left with a large one at the end."""
        return sorted(entries, key=lambda entry: self.data[entry.name].nbytes, reverse=True)

    def batches(self, entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
        """What changes, in the order in which `apply` does it: a thread's work each, of one dtype and encoding."""
        batches: list[list[TensorEntry]] = []
        kind, nbytes = None, 0
        for entry in self._largest_first(entries):
            if entry.encoding == "same":
                continue
            if kind != (entry.dtype, entry.encoding) or nbytes >= _AT_ONCE:
                batches.append([])
                kind, nbytes = (entry.dtype, entry.encoding), 0
            batches[-1].append(entry)
            nbytes += self.data[entry.name].nbytes
        return batches

    def _apply_some(
        self,
        entries: Sequence[TensorEntry],
        payload: np.ndarray,
        applied: Applied,
        applied_to: Callable[[Sequence[str]], None],
    ) -> None:
        """A batch. Runs in several threads, for different tensors. What is to be undone is noted before it is
        verified."""
        names = [entry.name for entry in entries]
        coded = [payload[e.offset : e.offset + e.nbytes] for e in entries]
        applied.changed.update(names)
        if entries[0].encoding == "raw":
            for name, new in zip(names, coded, strict=True):
                applied._replaced[name] = self.data[name].copy()
                self.data[name][:] = new
            applied_to(names)
            for entry in entries:
                verify(entry, self.data[entry.name])
            return
        deltas = self._decoded(entries, coded)
        starts = np.array([self._starts[name] for name in names], np.int64)
        moves = Delta(deltas.positions + np.repeat(starts, deltas.counts), deltas.moves)
        new = self.bits[moves.positions] + moves.moves
        self.bits[moves.positions] = new
        applied._moves.append(moves)
        applied_to(names)
        for entry in entries:
            _check_hash(entry, self.data[entry.name])
        # What did not change was finite before.
        if not _finite(entries[0].dtype, new):
            for entry, values in zip(
                entries, np.split(new, np.cumsum(deltas.counts)), strict=False
            ):
                _check_finite(entry, values)

    def _decoded(self, entries: Sequence[TensorEntry], coded: Sequence[np.ndarray]) -> Deltas:
        """BadTensor names the tensor whose delta is none."""
        sizes = [self.data[entry.name].size // 2 for entry in entries]
        pairs = [(data.data, size) for data, size in zip(coded, sizes, strict=True)]
        try:
            return decode_all(pairs)
        except ValueError:
            for entry, pair in zip(entries, pairs, strict=True):
                try:
                    decode(*pair)
                except ValueError as error:
                    raise BadTensor(entry.name, f"{entry.name}: {error}") from error
            raise


def verify(entry: TensorEntry, data: np.ndarray) -> None:
    """BadTensor unless the bytes (flat uint8) hash to what the manifest says, and are all finite numbers."""
    _check_hash(entry, data)
    _check_finite(entry, data.view(_EXPONENT[entry.dtype][0]))


def _check_hash(entry: TensorEntry, data: np.ndarray) -> None:
    digest = xxhash.xxh3_128_hexdigest(data.data)
    if digest != entry.hash:
        raise _mismatch(entry, digest)


def _check_finite(entry: TensorEntry, bits: np.ndarray) -> None:
    if not _finite(entry.dtype, bits):
        raise BadTensor(
            entry.name,
            f"{entry.name} holds inf or NaN; look at the last update's loss and gradient",
            "not_finite",
        )


def _finite(dtype: str, bits: np.ndarray) -> bool:
    mask = bits.dtype.type(_EXPONENT[dtype][1])
    for start in range(0, bits.size, _LOOKED_AT_ONCE):
        exponents = bits[start : start + _LOOKED_AT_ONCE] & mask
        if exponents.max() == mask:
            return False
    return True


def _mismatch(entry: TensorEntry, digest: str) -> BadTensor:
    return BadTensor(
        entry.name,
        f"the bytes of {entry.name} hash to {digest}, not {entry.hash}; nothing was changed, send the whole push again",
    )
