"""How a tensor crosses as what changed in it: the lossless coding of a push in delta mode.

Of 16-bit elements, those whose bits differ from the base are sent: where they are, as gaps between positions, and how
far each moved, as the difference of its bits read as integers. One optimizer step at a small learning rate moves few
elements, most of them by one unit in the last place, so both are small numbers. Each is cut into planes, all low bytes
first, and each plane compressed by itself (zstd): that comes close to the entropy of the positions, and far below 16
bits a value.

    header   changed elements, planes of the gaps, bytes of each plane: varints of 7 bits, the lowest first
    planes   gaps, lowest byte first, as many as the largest gap needs; then two of the moves

A plane that compression would not shorten is as long as the number of changed elements, and is as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

LEVEL = 1
"""Of zstd. Planes of small numbers gain nothing from higher ones."""

MAX_PLANES = 8


@dataclass(frozen=True)
class Delta:
    """What changed in one tensor of 16-bit elements."""

    positions: np.ndarray
    """int64, ascending, in the flattened tensor."""
    moves: np.ndarray
    """uint16: new bits minus old bits, modulo 2**16."""

    @classmethod
    def between(cls, old: np.ndarray, new: np.ndarray) -> "Delta":
        """From `old` to `new`, both flat uint16."""
        positions = np.flatnonzero(old != new)
        return cls(positions, new[positions] - old[positions])

    def apply(self, bits: np.ndarray) -> None:
        """Changes `bits`, flat uint16, in place."""
        bits[self.positions] += self.moves

    def undo(self, bits: np.ndarray) -> None:
        """Changes back what `apply` changed."""
        bits[self.positions] -= self.moves


def encode(delta: Delta) -> bytes:
    """The bytes of a delta."""
    gaps = np.diff(delta.positions, prepend=-1) - 1
    gap_planes = (int(gaps.max(initial=0)).bit_length() + 7) // 8
    signed = delta.moves.view(np.int16)
    # Zigzag: small moves in either direction become small numbers.
    zigzag = ((signed << 1) ^ (signed >> 15)).view(np.uint16)
    planes = [*_compressed(gaps, gap_planes), *_compressed(zigzag, 2)]
    header = [len(gaps), gap_planes, *map(len, planes)]
    return b"".join([*map(_varint, header), *planes])


def decode(data: bytes | memoryview, elements: int) -> Delta:
    """The delta in `data`, of a tensor with that many elements. ValueError if it cannot be one."""
    view = memoryview(data)
    changed, view = _read_varint(view)
    gap_planes, view = _read_varint(view)
    if changed > elements or gap_planes > MAX_PLANES:
        raise ValueError(
            f"the delta changes {changed} of {elements} elements, in {gap_planes} planes"
        )
    sizes = []
    for _ in range(gap_planes + 2):
        size, view = _read_varint(view)
        sizes.append(size)
    if len(view) != sum(sizes):
        raise ValueError(f"the delta has {len(data)} bytes, which is not what its header says")
    planes = []
    for size in sizes:
        planes.append(_decompressed(view[:size], changed))
        view = view[size:]
    gaps = _joined(planes[:gap_planes], np.dtype(np.int64), changed)
    if changed and not 0 <= gaps.min() <= gaps.max() < elements:
        raise ValueError(f"the delta changes elements beyond the {elements} of its tensor")
    positions = np.cumsum(gaps + 1) - 1
    if changed and positions[-1] >= elements:
        raise ValueError(f"the delta changes elements beyond the {elements} of its tensor")
    zigzag = _joined(planes[gap_planes:], np.dtype(np.uint16), changed)
    return Delta(positions, (zigzag >> 1) ^ (np.uint16(0) - (zigzag & np.uint16(1))))


def entropy_floor_bits(elements: int, changed: int) -> float:
    """What positions and 16-bit values cost at least: elements x (H(p) + 16 p) bits, with p = changed / elements."""
    if not 0 < changed < elements:
        return 16.0 * changed
    p = changed / elements
    return elements * (-p * np.log2(p) - (1 - p) * np.log2(1 - p) + 16 * p)


def _compressed(values: np.ndarray, planes: int) -> Iterator[bytes]:
    """The lowest bytes of all values, then the next ones, and so on. Hosts are little-endian, as the wire is."""
    import zstandard

    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    for index in range(planes):
        plane = np.ascontiguousarray(columns[:, index])
        smaller = compressor.compress(plane.data)
        yield smaller if len(smaller) < plane.size else plane.tobytes()


def _joined(planes: list[np.ndarray], dtype: np.dtype, count: int) -> np.ndarray:
    values = np.zeros(count, dtype)
    columns = values.view(np.uint8).reshape(-1, dtype.itemsize)
    for index, plane in enumerate(planes):
        columns[:, index] = plane
    return values


def _decompressed(data: memoryview, size: int) -> np.ndarray:
    import zstandard

    if len(data) == size:
        return np.frombuffer(data, np.uint8)
    # zstandard reads the size from the frame and would allocate it; nobody may ask for more than what is expected.
    try:
        found = zstandard.frame_content_size(data)
        if found != size:
            raise ValueError(f"a plane of the delta unpacks to {found} bytes instead of {size}")
        plane = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane of the delta cannot be unpacked: {error}") from error
    return np.frombuffer(plane, np.uint8)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview) -> tuple[int, memoryview]:
    """A number and what follows it."""
    value = 0
    for index, byte in enumerate(data[:9]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, data[index + 1 :]
    raise ValueError("the delta's header is cut off")
