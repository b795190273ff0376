"""The host copy of the weights being served: what the next delta is added to.

A delta is added in place, so that no second copy is needed, and every tensor is verified before the engine sees any of
them: by its hash, and by holding no inf or NaN. `Applied.undo` brings the old bytes back if the engine refuses.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.protocol import TensorEntry
from rollout_sidecar.threads import in_threads
from rollout_sidecar.weight_codec import Delta, decode, decode_all

_EXPONENT = {
    "float32": (np.uint32, 0x7F80_0000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
"""Bits that are all set in inf and NaN, and in nothing else."""

_LOOKED_AT_ONCE = 2**18
"""Elements, so that they stay in the processor's cache."""

_AT_ONCE = 2**25
"""Bytes of the tensors whose deltas a thread decodes together."""


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
    _deltas: list[tuple[np.ndarray, Delta]] = field(default_factory=list)
    _replaced: dict[str, np.ndarray] = field(default_factory=dict)

    def undo(self, base: "Base") -> None:
        """Makes `base` what it was."""
        for bits, delta in reversed(self._deltas):
            delta.undo(bits)
        for name, old in self._replaced.items():
            base.data[name] = old
        self._deltas, self._replaced, self.changed = [], {}, set()


class Base:
    """The bytes of every tensor, by name."""

    def __init__(self, entries: Sequence[TensorEntry], payload: np.ndarray):
        """Takes over the payload of a full push, flat uint8; nothing is copied, and nothing verified."""
        self.data = {
            entry.name: payload[entry.offset : entry.offset + entry.nbytes] for entry in entries
        }
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
        """What changes, in the order in which `apply` does it: a thread's work each."""
        batches: list[list[TensorEntry]] = []
        nbytes = _AT_ONCE
        for entry in self._largest_first(entries):
            if entry.encoding == "same":
                continue
            if nbytes >= _AT_ONCE:
                batches.append([])
                nbytes = 0
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
        """Runs in several threads, for different tensors. What is to be undone is noted before it is verified."""
        coded = {e.name: payload[e.offset : e.offset + e.nbytes] for e in entries}
        narrow = [entry for entry in entries if entry.encoding == "delta"]
        deltas = dict(zip((e.name for e in narrow), self._decoded(narrow, coded), strict=True))
        new: dict[str, np.ndarray] = {}
        for name, delta in deltas.items():
            bits = self.data[name].view(np.uint16)
            new[name] = delta.apply(bits)  # what does not change was finite before
            applied._deltas.append((bits, delta))
        for entry in entries:
            applied.changed.add(entry.name)
            if entry.encoding == "raw":
                applied._replaced[entry.name] = self.data[entry.name]
                self.data[entry.name] = coded[entry.name].copy()
                new[entry.name] = self.data[entry.name].view(_EXPONENT[entry.dtype][0])
        applied_to([entry.name for entry in entries])
        for entry in entries:
            _check_hash(entry, self.data[entry.name])
            _check_finite(entry, new[entry.name])

    def _decoded(
        self, entries: Sequence[TensorEntry], coded: Mapping[str, np.ndarray]
    ) -> Iterable[Delta]:
        """BadTensor names the tensor whose delta is none."""
        sizes = [self.data[entry.name].size // 2 for entry in entries]
        pairs = [(coded[e.name].data, size) for e, size in zip(entries, sizes, strict=True)]
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
    mask = bits.dtype.type(_EXPONENT[entry.dtype][1])
    for start in range(0, bits.size, _LOOKED_AT_ONCE):
        exponents = bits[start : start + _LOOKED_AT_ONCE] & mask
        if exponents.max() == mask:
            raise BadTensor(
                entry.name,
                f"{entry.name} holds inf or NaN; look at the last update's loss and gradient",
                "not_finite",
            )


def _mismatch(entry: TensorEntry, digest: str) -> BadTensor:
    return BadTensor(
        entry.name,
        f"the bytes of {entry.name} hash to {digest}, not {entry.hash}; nothing was changed, send the whole push again",
    )
