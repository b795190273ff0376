"""Lists of numbers as few bytes: of the smallest type that holds them exactly, byte planes apart, for zstd."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

Kind = Literal["bool", "int32", "int64", "float32", "float64"]


class Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A one-dimensional array."""

    kind: Kind
    length: int
    data: bytes
    """Booleans: eight to a byte. Numbers: first the lowest byte of all, then the second of all, ..."""

    @classmethod
    def of(cls, values: Sequence[bool] | Sequence[int] | Sequence[float] | np.ndarray) -> "Packed":
        """Packs booleans, integers or floats without loss: floats that are float32 values take four bytes."""
        array = np.asarray(values)
        if array.ndim != 1:
            raise ValueError(f"an array of shape {array.shape} is not one-dimensional")
        if array.dtype == bool:
            return cls("bool", array.size, np.packbits(array).tobytes())
        kind = _kind(array)
        planes = np.ascontiguousarray(array, f"<{np.dtype(kind).str[1:]}").view(np.uint8)
        return cls(kind, array.size, planes.reshape(array.size, -1).T.tobytes())

    def unpack(self) -> np.ndarray:
        """The array. ValueError if the bytes do not fit its length."""
        raw = np.frombuffer(self.data, np.uint8)
        if self.kind == "bool":
            wanted = -(-self.length // 8)
        else:
            wanted = self.length * np.dtype(self.kind).itemsize
        if raw.size != wanted:
            raise ValueError(
                f"{raw.size} bytes are not {self.length} values of {self.kind} ({wanted} bytes)"
            )
        if self.kind == "bool":
            return np.unpackbits(raw, count=self.length).astype(bool)
        dtype = np.dtype(self.kind).newbyteorder("<")
        planes = raw.reshape(dtype.itemsize, self.length).T
        return np.ascontiguousarray(planes).reshape(-1).view(dtype).astype(self.kind)


def _kind(array: np.ndarray) -> Kind:
    if array.dtype.kind in "iu":
        small = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
        return "int32" if small else "int64"
    if array.dtype.kind != "f":
        raise ValueError(f"an array of {array.dtype} holds neither booleans nor numbers")
    if array.dtype.itemsize <= 4:
        return "float32"
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32).astype(np.float64)
    return "float32" if np.array_equal(narrow, array, equal_nan=True) else "float64"
