"""An append-only file of checksummed frames, from which a crash can take the end but nothing else.

    file  = magic, then frames
    frame = length (uint32), xxh3-64 of the body (uint64), body: MessagePack under zstd; little-endian

A frame is written whole or it is the last one: what follows the first frame that is short, or whose checksum is wrong,
is dropped by the reader, which says so.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import xxhash
import zstandard

MAGIC = b"tooljax trajectories 1\n"
_HEAD = struct.Struct("<IQ")
MAX_FRAME_BYTES = 1 << 30
"""A length above this is damage, not a frame."""


class FrameWriter:
    """Writes a file of frames from its beginning. A context manager: what was written is on disk when it ends."""

    def __init__(self, path: Path, *, level: int):
        """`level` is zstd's: 1 is fast, 19 small."""
        self._file = path.open("wb")
        self._file.write(MAGIC)
        self._compressor = zstandard.ZstdCompressor(level=level)

    def append(self, value: Any) -> None:
        """Adds one frame. ValueError if it is larger than a frame may be."""
        body = self._compressor.compress(msgspec.msgpack.encode(value))
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(
                f"a record of {len(body)} bytes is larger than a frame may be ({MAX_FRAME_BYTES}); "
                "set store.enabled = False"
            )
        # One write: a process that is killed leaves whole frames, unless the machine goes down with it.
        self._file.write(_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body)

    def __enter__(self) -> "FrameWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


class FrameReader:
    """The frames of a file, up to the first that is damaged."""

    def __init__(self, path: Path):
        self._path = path
        self.note = ""
        """What had to be dropped, once all frames have been read; "" if nothing."""
        self.start = 0
        """The byte at which the frame that was yielded last begins: `at` finds it again."""

    def __iter__(self) -> Iterator[bytes]:
        """The bodies, decompressed and checked."""
        self.note = ""
        decompressor = zstandard.ZstdDecompressor()
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(MAGIC)) != MAGIC:
                self.note = f"{self._path.name} does not begin as a file of trajectories does"
                return
            while head := file.read(_HEAD.size):
                start = file.tell() - len(head)
                body = self._body(head, file, size)
                if body is not None:
                    try:
                        body = decompressor.decompress(body)
                    except zstandard.ZstdError:  # a right checksum of what is no zstd frame
                        body = None
                if body is None:
                    self.note = (
                        f"{self._path.name}: {size - start} bytes from byte {start} on are cut short or damaged, "
                        "and were dropped"
                    )
                    return
                self.start = start
                yield body

    def at(self, start: int) -> bytes:
        """The body of the frame that begins at a byte. ValueError if no whole one does."""
        with self._path.open("rb") as file:
            file.seek(start)
            body = self._body(file.read(_HEAD.size), file, os.fstat(file.fileno()).st_size)
        try:
            if body is not None:
                return zstandard.ZstdDecompressor().decompress(body)
        except zstandard.ZstdError:
            pass
        raise ValueError(f"{self._path.name} has no whole frame at byte {start}; read it anew")

    def _body(self, head: bytes, file: Any, size: int) -> bytes | None:
        """The body that a head announces; None if it is not there."""
        if len(head) < _HEAD.size:
            return None
        length, checksum = _HEAD.unpack(head)
        if length > min(MAX_FRAME_BYTES, size - file.tell()):
            return None
        body = file.read(length)
        return body if xxhash.xxh3_64_intdigest(body) == checksum else None
