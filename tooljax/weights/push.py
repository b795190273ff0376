"""Sends the policy's weights to the sidecars: all of them, whole, verified by hash before any is served."""

import asyncio
import bisect
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import jax
import numpy as np
import xxhash

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import TensorEntry, WeightsManifest, content_hash

DTYPES = get_args(TensorEntry.__annotations__["dtype"])


class PushError(SidecarError):
    """Not every sidecar serves the new weights. Pushing the same version again repeats what is missing only."""

    def __init__(self, message: str):
        super().__init__(message, kind="push_failed")


@dataclass(frozen=True)
class PushReport:
    """What was pushed. Every sidecar has acknowledged this content."""

    version: int
    bytes: int
    """Sent to each sidecar."""
    seconds: float
    content_hash: str


async def push_weights(
    clients: Sequence[SidecarClient],
    tensors: Iterable[tuple[str, jax.Array]],
    *,
    version: int,
    part_bytes: int,
    timeout_s: float,
) -> PushReport:
    """Sends weights to every sidecar at once; returns when all of them serve exactly these.

    Tensors are brought to the host one by one, and a copy of all is kept there until the end. Raises PushError,
    naming each sidecar that did not acknowledge the version and the hash of its content.

    Args:
        clients: the sidecars.
        tensors: weights under their Hugging Face names.
        version: above the one that is served, or equal to it with the same content.
        part_bytes: how much one HTTP request carries.
        timeout_s: for sending and swapping, in all sidecars together.
    """
    started = time.monotonic()
    payload = _Payload(tensors)
    manifest = WeightsManifest(
        tensors=payload.entries, payload_bytes=payload.nbytes, part_bytes=part_bytes
    )
    sending = [
        asyncio.create_task(client.push_weights(version, manifest, payload.read))
        for client in clients
    ]
    try:
        await asyncio.wait(sending, timeout=timeout_s)
    finally:
        for task in sending:
            task.cancel()
        # The client has compared each acknowledgement with the version and the hash of the manifest.
        results = await asyncio.gather(*sending, return_exceptions=True)
    failures = []
    for client, result in zip(clients, results, strict=True):
        if isinstance(result, asyncio.CancelledError):
            failures.append(f"{client.url} was not done within {timeout_s:g} s (weights.timeout_s)")
        elif isinstance(result, SidecarError):
            failures.append(str(result))
        elif isinstance(result, BaseException):
            raise result
    if failures:
        raise PushError(
            f"version {version} of the weights reached {len(clients) - len(failures)} of "
            f"{len(clients)} sidecars: {'; '.join(failures)}"
        )
    return PushReport(
        version, payload.nbytes, time.monotonic() - started, content_hash(payload.entries)
    )


class _Payload:
    """All tensors on the host, seen as one stream of bytes."""

    def __init__(self, tensors: Iterable[tuple[str, jax.Array]]):
        self.entries: list[TensorEntry] = []
        self._data: list[memoryview] = []
        offset = 0
        for name, tensor in tensors:
            dtype = str(tensor.dtype)
            if dtype not in DTYPES:
                raise ValueError(f"{name} is {dtype}; weights are pushed as {', '.join(DTYPES)}")
            # JAX runs on little-endian machines only, which is the order on the wire. A flat view of bytes, because
            # bfloat16 has no buffer of its own.
            host = np.ascontiguousarray(np.asarray(tensor))
            data = host.reshape(-1).view(np.uint8).data
            entry = TensorEntry(
                name=name,
                dtype=dtype,  # type: ignore[arg-type]
                shape=list(tensor.shape),
                offset=offset,
                nbytes=data.nbytes,
                hash=xxhash.xxh3_128_hexdigest(data),
            )
            self.entries.append(entry)
            self._data.append(data)
            offset += data.nbytes
        self.nbytes = offset
        self._ends = list(itertools.accumulate(data.nbytes for data in self._data))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the stream, from one tensor or several."""
        pieces = []
        index = bisect.bisect_right(self._ends, offset)
        while nbytes > 0:
            start = offset - self.entries[index].offset
            piece = self._data[index][start : start + nbytes]
            pieces.append(piece)
            offset += piece.nbytes
            nbytes -= piece.nbytes
            index += 1
        return b"".join(pieces)
