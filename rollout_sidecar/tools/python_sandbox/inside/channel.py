"""Frames over the socket to the sidecar: the length of a JSON header, the header, and bytes that the header counts."""

import json
import os
import struct
from typing import Any


class Channel:
    """One frame at a time, blocking."""

    def __init__(self, fd: int):
        self.fd = fd

    def receive(self) -> dict[str, Any] | None:
        """The next request; None if the sidecar closed the socket, or is gone."""
        size = self._read(4)
        body = size and self._read(struct.unpack("!I", size)[0])
        return json.loads(body) if body else None

    def send(self, header: dict[str, Any], *payloads: bytes) -> None:
        """A reply. A sidecar that is gone is noticed by the next `receive`."""
        header = {**header, "sizes": [len(payload) for payload in payloads]}
        body = json.dumps(header).encode()
        view = memoryview(b"".join((struct.pack("!I", len(body)), body, *payloads)))
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _read(self, size: int) -> bytes:
        chunks = []
        while size:
            try:
                chunk = os.read(self.fd, min(size, 1 << 20))
            except ConnectionResetError:
                return b""
            if not chunk:
                return b""
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)
