"""One push to one sidecar, from its beginning to the acknowledgement.

Parts go one after the other over one connection, in pieces that are views of the tensors: nothing is copied on the way
to the socket. Whatever the sidecar says is missing is sent; a sidecar that was restarted in between gets it all again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from rollout_sidecar.connection import Connection, SidecarError
from rollout_sidecar.protocol import (
    MSGPACK,
    WeightsCommit,
    WeightsCommitted,
    WeightsManifest,
    WeightsStatus,
    content_hash,
    encode,
)
from rollout_sidecar.weight_manifest import has_hashes

T = TypeVar("T")

BEGINNINGS = 6
"""How often a push begins, at most, if the sidecar forgets it."""

PIECE_BYTES = 2**20
"""Of a part, written to the socket at once. Larger ones hold the event loop up."""

BUSY_S = 0.2
"""Between two attempts while the sidecar commits another push."""

Read = Callable[[int, int], bytes | memoryview | Sequence[memoryview]]
Hashes = Callable[[], Awaitable[Sequence[str]]]


class WeightConnection(Connection):
    """A connection that weights can be pushed over."""

    async def push_weights(
        self, version: int, manifest: WeightsManifest, read: Read, hashes: Hashes | None = None
    ) -> WeightsCommitted:
        """Sends what the sidecar has not got of a push, commits it, and checks what it then serves.

        Args:
            version: above the one being served.
            manifest: the tensors.
            read: read(offset, nbytes) gives bytes of the payload, in one piece or several, and may wait for them; it is
                called in a thread, once or more for each part.
            hashes: of the tensors, where the manifest leaves them out; awaited when everything else has been sent.
        """
        push = _Push(self, f"/v1/weights/{version}", manifest, read, hashes, self._deadline())
        done = await push.send()
        expected = content_hash(push.complete.tensors)
        if done != WeightsCommitted(version=version, content_hash=expected):
            raise self._bad_answer(
                f"after the push of version {version} it serves version {done.version} with the"
                f" content {done.content_hash}, not {expected}"
            )
        return done


@dataclass
class _Push:
    """A push under way."""

    connection: Connection
    path: str
    manifest: WeightsManifest
    read: Read
    hashes: Hashes | None
    deadline: float

    def __post_init__(self):
        self.complete = self.manifest
        """The manifest with its hashes, once they are known."""

    async def send(self) -> WeightsCommitted:
        """Until it is acknowledged."""
        beginnings = 0
        while True:
            try:
                return await self._send_once()
            except SidecarError as error:
                if error.kind == "committing":
                    await asyncio.sleep(BUSY_S)  # until the deadline, which every exchange has
                    continue
                beginnings += 1
                if error.kind == "stale_version" and self.manifest is not await self._completed():
                    self.manifest = self.complete  # it may serve these very weights: hashes tell
                elif error.kind not in ("not_begun", "missing_parts") or beginnings == BEGINNINGS:
                    raise

    async def _send_once(self) -> WeightsCommitted:
        begun = encode(self.manifest, MSGPACK)
        status = await self._exchange(WeightsStatus, "POST", self.path, begun)
        for part in status.missing_parts:
            await self._put_part(part)
        complete = await self._completed()
        order = WeightsCommit(
            push_id=self.manifest.push_id,
            content_hash=content_hash(complete.tensors),
            hashes=[] if complete is self.manifest else [entry.hash for entry in complete.tensors],
        )
        order = encode(order, MSGPACK)
        return await self._exchange(WeightsCommitted, "POST", f"{self.path}/commit", order)

    async def _put_part(self, part: int) -> None:
        start = part * self.manifest.part_bytes
        nbytes = min(self.manifest.part_bytes, self.manifest.payload_bytes - start)
        read = await asyncio.to_thread(self.read, start, nbytes)
        pieces: Sequence[Any] = [read] if isinstance(read, (bytes, memoryview)) else read
        if (got := sum(map(len, pieces))) != nbytes:
            raise ValueError(f"read({start}, {nbytes}) gave {got} bytes")
        path = f"{self.path}/parts/{part}"
        if self.manifest.push_id:
            path += f"?push_id={self.manifest.push_id}"
        body = b"".join(pieces) if nbytes <= PIECE_BYTES else _Body(pieces)
        await self._exchange(WeightsStatus, "PUT", path, body, {"Content-Length": str(nbytes)})

    async def _exchange(
        self,
        wire_type: type[T],
        method: str,
        path: str,
        data: Any,
        headers: dict[str, str] | None = None,
    ) -> T:
        answer = await self.connection._call(
            method, path, deadline=self.deadline, data=data, headers=headers
        )
        return self.connection._decode(answer, wire_type)

    async def _completed(self) -> WeightsManifest:
        if self.hashes is not None and not has_hashes(self.complete):
            pairs = zip(self.manifest.tensors, await self.hashes(), strict=True)
            tensors = [replace(entry, hash=text) for entry, text in pairs]
            self.complete = replace(self.manifest, tensors=tensors)
        return self.complete


class _Body:
    """Pieces as a stream. Iterated anew each time the exchange is repeated."""

    def __init__(self, pieces: Sequence[bytes | memoryview]):
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        for piece in self._pieces:
            for start in range(0, len(piece), PIECE_BYTES):
                yield piece[start : start + PIECE_BYTES]
