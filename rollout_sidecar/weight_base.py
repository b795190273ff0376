"""The host copy of the weights being served: what the next delta is added to.

A delta is added in place, so that no second copy is needed, and every tensor is verified by its hash before the engine
sees any of them. `Applied.undo` brings the old bytes back if the engine refuses.
"""

from dataclasses import dataclass, field

import numpy as np
import xxhash

from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.protocol import TensorEntry
from rollout_sidecar.weight_codec import Delta, decode


class BadTensor(ValueError):
    """A tensor of a push that is not what the manifest says. `name` is the tensor's."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


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

    def __init__(self, entries: list[TensorEntry], payload: bytearray):
        """Takes over the payload of a full push, which has been verified; nothing is copied."""
        whole = np.frombuffer(payload, np.uint8)
        self.data = {
            entry.name: whole[entry.offset : entry.offset + entry.nbytes] for entry in entries
        }
        self._entries = {entry.name: entry for entry in entries}

    @property
    def nbytes(self) -> int:
        """Host memory of the copy."""
        return sum(data.nbytes for data in self.data.values())

    def tensors(self) -> dict[str, WeightTensor]:
        """Read-only views, for an engine."""
        return {
            name: WeightTensor(
                name, entry.dtype, tuple(entry.shape), self.data[name].data.toreadonly()
            )
            for name, entry in self._entries.items()
        }

    def check(self, entries: list[TensorEntry]) -> None:
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

    def apply(self, entries: list[TensorEntry], payload: memoryview) -> Applied:
        """Adds a push to the base and verifies every tensor. BadTensor names the first that fails; then the base is
        what it was."""
        applied = Applied()
        try:
            for entry in entries:
                self._apply_one(entry, payload[entry.offset : entry.offset + entry.nbytes], applied)
        except BaseException:
            applied.undo(self)
            raise
        return applied

    def accept(self, entries: list[TensorEntry]) -> None:
        """The push is being served: its hashes are the base's."""
        self._entries = {entry.name: entry for entry in entries}

    def _apply_one(self, entry: TensorEntry, data: memoryview, applied: Applied) -> None:
        if entry.encoding == "same":
            if entry.hash != self._entries[entry.name].hash:
                raise _mismatch(entry, self._entries[entry.name].hash)
            return
        applied.changed.add(entry.name)
        if entry.encoding == "raw":
            applied._replaced[entry.name] = self.data[entry.name]
            self.data[entry.name] = np.frombuffer(bytearray(data), np.uint8)
        else:
            bits = self.data[entry.name].view(np.uint16)
            try:
                delta = decode(data, bits.size)
            except ValueError as error:
                raise BadTensor(entry.name, f"{entry.name}: {error}") from error
            delta.apply(bits)
            applied._deltas.append((bits, delta))
        verify(entry, self.data[entry.name].data)


def verify(entry: TensorEntry, data: memoryview) -> None:
    """BadTensor unless the bytes hash to what the manifest says."""
    digest = xxhash.xxh3_128(data).hexdigest()
    if digest != entry.hash:
        raise _mismatch(entry, digest)


def _mismatch(entry: TensorEntry, digest: str) -> BadTensor:
    return BadTensor(
        entry.name,
        f"the bytes of {entry.name} hash to {digest}, not {entry.hash}; nothing was changed, send the whole push again",
    )
