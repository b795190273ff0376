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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Deltas:
    """What changed in several tensors, one after the other: coded and decoded at once.

    Most tensors change in a few thousand elements. Work on them one by one would be calls more than work, and threads
    would wait for Python more than they run.
    """

    positions: np.ndarray
    """int64, ascending within each tensor."""
    moves: np.ndarray
    """uint16."""
    counts: Sequence[int]
    """Changed elements of each tensor."""

    def __iter__(self) -> Iterator[Delta]:
        """Of each tensor; nothing is copied."""
        end = 0
        for count in self.counts:
            start, end = end, end + count
            yield Delta(self.positions[start:end], self.moves[start:end])


def encode(delta: Delta) -> bytes:
    """The bytes of a delta."""
    return encode_all(Deltas(delta.positions, delta.moves, [len(delta.positions)]))[0]


def encode_all(deltas: Deltas) -> list[bytes]:
    """The bytes of each delta."""
    starts, filled = _starts(deltas.counts)
    gaps = np.diff(deltas.positions, prepend=-1) - 1
    gaps[starts] = deltas.positions[starts]
    largest = np.zeros(len(deltas.counts), np.int64)
    largest[filled] = np.maximum.reduceat(gaps, starts) if starts.size else 0
    gap_planes = [(int(gap).bit_length() + 7) // 8 for gap in largest]
    signed = deltas.moves.view(np.int16)
    # Zigzag: small moves in either direction become small numbers.
    zigzag = ((signed << 1) ^ (signed >> 15)).view(np.uint16)
    of_gaps, of_moves = _planes(gaps, max(gap_planes, default=0)), _planes(zigzag, 2)
    planes, end = [], 0
    for count, wanted in zip(deltas.counts, gap_planes, strict=True):
        start, end = end, end + count
        planes += [plane[start:end] for plane in [*of_gaps[:wanted], *of_moves]]
    smaller = iter(_compressed(planes))
    coded = []
    for count, wanted in zip(deltas.counts, gap_planes, strict=True):
        mine = [next(smaller) for _ in range(wanted + 2)]
        header = [count, wanted, *map(len, mine)]
        coded.append(b"".join([*map(_varint, header), *mine]))
    return coded


def decode(data: bytes | memoryview, elements: int) -> Delta:
    """The delta in `data`, of a tensor with that many elements. ValueError if it cannot be one."""
    return next(iter(decode_all([(data, elements)])))


def decode_all(coded: Sequence[tuple[bytes | memoryview, int]]) -> Deltas:
    """The deltas in such pairs of bytes and elements of the tensor. ValueError if one of them cannot be one."""
    counts, gap_planes, planes = [], [], []
    for data, elements in coded:
        changed, wanted, mine = _cut(data, elements)
        counts.append(changed)
        gap_planes.append(wanted)
        planes += [(plane, changed) for plane in mine]
    unpacked = iter(_decompressed(planes))
    columns: list[list[bytes | memoryview]] = [[] for _ in range(max(gap_planes, default=0) + 2)]
    for count, wanted in zip(counts, gap_planes, strict=True):
        for index, column in enumerate(columns):
            column.append(next(unpacked) if index < wanted + 2 else bytes(count))
    zigzag = _joined(columns[:2], np.dtype(np.uint16))
    positions = _positions(
        _joined(columns[2:], np.dtype(np.uint64), zigzag.size),
        counts,
        [elements for _, elements in coded],
    )
    return Deltas(positions, (zigzag >> 1) ^ (np.uint16(0) - (zigzag & np.uint16(1))), counts)


def entropy_floor_bits(elements: int, changed: int) -> float:
    """What positions and 16-bit values cost at least: elements x (H(p) + 16 p) bits, with p = changed / elements."""
    if not 0 < changed < elements:
        return 16.0 * changed
    p = changed / elements
    return elements * (-p * np.log2(p) - (1 - p) * np.log2(1 - p) + 16 * p)


def _starts(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where the elements of each tensor begin that has any, and which tensors these are."""
    sizes = np.asarray(counts, np.int64)
    return (np.cumsum(sizes) - sizes)[sizes > 0], sizes > 0


def _planes(values: np.ndarray, planes: int) -> list[np.ndarray]:
    """The lowest bytes of all values, then the next ones, and so on. Hosts are little-endian, as the wire is."""
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    return [np.ascontiguousarray(columns[:, index]) for index in range(planes)]


def _joined(
    planes: Sequence[Sequence[bytes | memoryview]], dtype: np.dtype, size: int | None = None
) -> np.ndarray:
    """Values of their planes, each in pieces that follow one another."""
    joined = [np.frombuffer(b"".join(pieces), np.uint8) for pieces in planes]
    values = np.zeros(joined[0].size if size is None else size, dtype)
    columns = values.view(np.uint8).reshape(-1, dtype.itemsize)
    for index, plane in enumerate(joined):
        columns[:, index] = plane
    return values


def _compressed(planes: Sequence[np.ndarray]) -> list[bytes | memoryview]:
    """Each, or as it is where it would not be shorter. In one call: contexts of zstd take longer than small planes."""
    import zstandard

    filled: Any = [plane.data for plane in planes if plane.size]
    if not filled:
        return [b""] * len(planes)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    frames: Iterator[Any] = iter(compressor.multi_compress_to_buffer(filled))
    coded: list[bytes | memoryview] = []
    for plane in planes:
        smaller = memoryview(next(frames)) if plane.size else b""
        coded.append(smaller if len(smaller) < plane.size else plane.data)
    return coded


def _cut(data: bytes | memoryview, elements: int) -> tuple[int, int, list[memoryview]]:
    """How many elements a delta changes, how many planes the gaps have, and all planes. ValueError if it has not what
    its header says."""
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
        planes.append(view[:size])
        view = view[size:]
    # Moves first: they are always two.
    return changed, gap_planes, [*planes[gap_planes:], *planes[:gap_planes]]


def _positions(gaps: np.ndarray, counts: Sequence[int], elements: Sequence[int]) -> np.ndarray:
    """Gaps (uint64) as positions. ValueError if one lies beyond its tensor's elements."""
    starts, filled = _starts(counts)
    if not starts.size:
        return np.zeros(0, np.int64)
    sizes, limits = np.asarray(counts, np.uint64)[filled], np.asarray(elements, np.uint64)[filled]
    ends = np.cumsum(gaps + np.uint64(1))  # modulo 2**64, as all that is made of it
    before = np.append(np.uint64(0), ends[starts[1:] - 1])
    positions = ends - np.repeat(before, sizes.astype(np.int64)) - np.uint64(1)
    # No gap leads from below the limit past 2**64, so that one beyond is seen even if others follow.
    for values in (gaps, positions):
        beyond = np.flatnonzero(np.maximum.reduceat(values, starts) >= limits)
        if beyond.size:
            limit = limits[beyond[0]]
            raise ValueError(f"the delta changes elements beyond the {limit} of its tensor")
    return positions.view(np.int64)


def _decompressed(planes: Sequence[tuple[memoryview, int]]) -> list[bytes | memoryview]:
    """Each of its size, which those have already that were not compressed. ValueError if one has another."""
    import zstandard

    packed, sizes = [], []
    try:
        for plane, size in planes:
            if len(plane) == size:
                continue
            # Nobody may have more allocated than what is expected.
            found = zstandard.frame_content_size(plane)
            if found != size or not size:
                raise ValueError(f"a plane of the delta unpacks to {found} bytes instead of {size}")
            packed.append(plane)
            sizes.append(size)
        frames: Iterator[Any] = iter(())
        if packed:  # of none, zstandard ends the process
            frames = iter(
                zstandard.ZstdDecompressor().multi_decompress_to_buffer(
                    packed, decompressed_sizes=np.array(sizes, np.uint64).tobytes()
                )
            )
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane of the delta cannot be unpacked: {error}") from error
    return [plane if len(plane) == size else memoryview(next(frames)) for plane, size in planes]


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
