"""How a tensor crosses as what changed in it: the lossless coding of a push in delta mode.

Of 16-bit elements, those whose bits differ from the base are sent: where they are, as gaps between positions, and how
far each moved, as the difference of its bits read as integers. One optimizer step at a small learning rate moves few
elements, most of them by one unit in the last place, so both are small numbers. Each is cut into a plane of low bytes
and a plane of high bytes, and each plane compressed by itself (zstd): that comes close to the entropy of the positions,
and far below 16 bits a value.

    header   <QQIIII   changed elements, escaped gaps, compressed bytes of the four planes
    planes   gaps low, gaps high, moves low, moves high
    escapes  <Q each   gaps of ESCAPE and above, in order
"""

import struct
from dataclasses import dataclass

import numpy as np

ESCAPE = 0xFFFF
"""A gap plane that holds this has the gap among the escapes."""

LEVEL = 1
"""Of zstd. Planes of small numbers gain nothing from higher ones."""

_HEADER = struct.Struct("<QQIIII")


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
    import zstandard

    gaps = np.diff(delta.positions, prepend=-1) - 1
    escaped = gaps >= ESCAPE
    short = np.where(escaped, ESCAPE, gaps).astype(np.uint16)
    signed = delta.moves.view(np.int16)
    # Zigzag: small moves in either direction become small numbers.
    zigzag = ((signed << 1) ^ (signed >> 15)).view(np.uint16)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    planes = [compressor.compress(plane) for plane in (*_planes(short), *_planes(zigzag))]
    escapes = gaps[escaped].astype("<u8").tobytes()
    header = _HEADER.pack(len(gaps), int(escaped.sum()), *map(len, planes))
    return b"".join([header, *planes, escapes])


def decode(data: bytes | memoryview, elements: int) -> Delta:
    """The delta in `data`, of a tensor with that many elements. ValueError if it cannot be one."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are no delta: its header alone has {_HEADER.size}")
    changed, escapes, *sizes = _HEADER.unpack_from(data)
    if changed > elements or escapes > changed:
        raise ValueError(f"the delta changes {changed} of {elements} elements")
    if len(data) != _HEADER.size + sum(sizes) + 8 * escapes:
        raise ValueError(f"the delta has {len(data)} bytes, which is not what its header says")
    view, planes = memoryview(data)[_HEADER.size :], []
    for size in sizes:
        planes.append(_decompress(view[:size], changed))
        view = view[size:]
    gaps = _join(planes[0], planes[1]).astype(np.int64)
    escaped = gaps == ESCAPE
    if int(escaped.sum()) != escapes:
        raise ValueError("the delta's escaped gaps are not as many as its header says")
    gaps[escaped] = np.frombuffer(view, "<u8").astype(np.int64)
    if gaps.size and (gaps.min() < 0 or gaps.max() >= elements):
        raise ValueError(f"the delta changes elements beyond the {elements} of its tensor")
    positions = np.cumsum(gaps + 1) - 1
    if positions.size and positions[-1] >= elements:
        raise ValueError(f"the delta changes elements beyond the {elements} of its tensor")
    zigzag = _join(planes[2], planes[3])
    return Delta(positions, (zigzag >> 1) ^ (np.uint16(0) - (zigzag & np.uint16(1))))


def entropy_floor_bits(elements: int, changed: int) -> float:
    """What positions and 16-bit values cost at least: elements x (H(p) + 16 p) bits, with p = changed / elements."""
    if not 0 < changed < elements:
        return 16.0 * changed
    p = changed / elements
    return elements * (-p * np.log2(p) - (1 - p) * np.log2(1 - p) + 16 * p)


def _planes(values: np.ndarray) -> tuple[bytes, bytes]:
    return (values & 0xFF).astype(np.uint8).tobytes(), (values >> 8).astype(np.uint8).tobytes()


def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint16) | (high.astype(np.uint16) << 8)


def _decompress(data: memoryview, size: int) -> np.ndarray:
    import zstandard

    # zstandard reads the size from the frame and would allocate it; nobody may ask for more than what is expected.
    try:
        found = zstandard.frame_content_size(data)
        if found != size:
            raise ValueError(f"a plane of the delta unpacks to {found} bytes instead of {size}")
        plane = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane of the delta cannot be unpacked: {error}") from error
    return np.frombuffer(plane, np.uint8)
