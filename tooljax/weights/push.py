"""Sends the policy's weights to the sidecars: what changed, or all of them, verified by hash before any is served."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import WeightsManifest, content_hash
from tooljax.weights.payload import Base, Payload, delta_payload, full_payload

ANOTHER_BASE = ("wrong_base", "hash_mismatch")
"""Answers of a sidecar that lacks the base of a delta, or whose copy of it is damaged: it gets everything."""


InFlight = Literal["continue", "finish"]

Send = Callable[[SidecarClient], Awaitable[bool]]
"""Sends a push to one sidecar. Gives whether it got everything although a delta was meant for it."""

Deliver = Callable[[Send], Awaitable[int]]
"""Sends a push to whom it concerns; gives how many of them got everything. Raises if nobody serves it."""


class PushError(SidecarError):
    """Not every sidecar serves the new weights. Pushing the same version again repeats what is missing only."""

    def __init__(self, message: str):
        super().__init__(message, kind="push_failed")


@dataclass(frozen=True)
class PushReport:
    """What was pushed. Every sidecar has acknowledged this content."""

    version: int
    bytes: int
    """Sent to each sidecar that had the base, or to all of them in a full push."""
    full_bytes: int
    """What a full push has."""
    seconds: float
    content_hash: str
    changed_elements: int
    """16-bit elements that differ from the base; 0 in a full push."""
    elements: int
    """16-bit elements that were compared with the base; 0 in a full push."""
    full_resends: int
    """Sidecars that did not have the base, and got everything."""

    def metrics(self) -> dict[str, float]:
        """What a step logs of its push."""
        metrics = {
            "weights/push_bytes": float(self.bytes),
            "weights/push_ratio": self.full_bytes / max(self.bytes, 1),
            "weights/full_resends": float(self.full_resends),
        }
        if self.elements:
            metrics["weights/changed_frac"] = self.changed_elements / self.elements
        return metrics


class WeightSender:
    """Pushes version after version to the same sidecars, and knows what they serve.

    In delta mode it keeps the last version that every sidecar has acknowledged: on the devices, to compare with, and
    on the host, to hash and to send whole where a sidecar lost its copy.
    """

    def __init__(
        self,
        clients: Sequence[SidecarClient],
        *,
        mode: Literal["full", "delta"],
        part_bytes: int,
    ):
        self._clients = clients
        self._mode = mode
        self._part_bytes = part_bytes
        self._base: Base | None = None
        self._last: tuple[Payload, int] | None = None

    async def push(
        self,
        tensors: Iterable[tuple[str, jax.Array]],
        *,
        version: int,
        timeout_s: float,
        in_flight: InFlight = "continue",
        deliver: Deliver | None = None,
    ) -> PushReport:
        """Sends weights to every sidecar at once; returns when all of them serve exactly these.

        Raises PushError, naming each sidecar that did not acknowledge the version and the hash of its content; the
        base stays what it was.

        Args:
            tensors: weights under their Hugging Face names, the same names and shapes every time.
            version: above the one that is served, or equal to it with the same content.
            timeout_s: for sending and swapping, in all sidecars together.
            in_flight: what becomes of trajectories under way.
            deliver: decides who gets it; default: all get it, and all must acknowledge it.
        """
        started = time.monotonic()
        self._last = None  # its bytes may change now
        # The host has one copy, the base, which is changed in place: until that is acknowledged there is no base.
        base, self._base = self._base, None
        payload = await asyncio.to_thread(self._code, base, tensors)
        try:
            send = partial(self._send, payload, version, in_flight)
            resent = await (deliver or partial(self._to_all, version, timeout_s))(send)
        except BaseException:
            if payload.base is not None and base is not None:
                payload.undo(base)
                self._base = base
            raise
        if any(array.dtype.itemsize == 2 for array in payload.arrays.values()):
            self._base = payload.acknowledged(version)
        self._last = payload, version
        return PushReport(
            version=version,
            bytes=payload.nbytes,
            full_bytes=payload.full_bytes,
            seconds=time.monotonic() - started,
            content_hash=content_hash(payload.entries),
            changed_elements=payload.changed_elements,
            elements=payload.elements,
            full_resends=resent,
        )

    async def catch_up(self, client: SidecarClient) -> None:
        """Sends a sidecar all of the version that was pushed last. Raises SidecarError."""
        if self._last is None:
            raise SidecarError(
                "there is no version of the weights to send again", kind="no_weights"
            )
        payload, version = self._last
        await self._send_whole(payload, version, "continue", client)

    def _code(self, base: Base | None, tensors: Iterable[tuple[str, jax.Array]]) -> Payload:
        if self._mode == "full":
            return full_payload(tensors, keep_arrays=False)
        named = dict(tensors)
        if base is not None and base.fits(named):
            return delta_payload(base, named)
        return full_payload(named.items(), keep_arrays=True)

    async def _to_all(self, version: int, timeout_s: float, send: Send) -> int:
        """How many sidecars got everything although a delta was meant for them."""
        sending = [asyncio.ensure_future(send(client)) for client in self._clients]
        try:
            await asyncio.wait(sending, timeout=timeout_s)
        finally:
            for task in sending:
                task.cancel()
            results = await asyncio.gather(*sending, return_exceptions=True)
        failures = []
        for client, result in zip(self._clients, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                failures.append(
                    f"{client.url} was not done within {timeout_s:g} s (weights.timeout_s)"
                )
            elif isinstance(result, SidecarError):
                failures.append(str(result))
            elif isinstance(result, BaseException):
                raise result
        if failures:
            raise PushError(
                f"version {version} of the weights reached {len(sending) - len(failures)} of "
                f"{len(sending)} sidecars: {'; '.join(failures)}"
            )
        return sum(result is True for result in results)

    async def _send(
        self, payload: Payload, version: int, in_flight: InFlight, client: SidecarClient
    ) -> bool:
        """Whether the sidecar got everything although a delta was meant for it.

        The client compares each acknowledgement with the version and the hash of the manifest.
        """
        manifest = WeightsManifest(
            tensors=payload.entries,
            payload_bytes=payload.nbytes,
            part_bytes=self._part_bytes,
            base_version=payload.base.version if payload.base else None,
            base_hash=payload.base.content_hash if payload.base else "",
            in_flight=in_flight,
        )
        try:
            await client.push_weights(version, manifest, payload.read)
            return False
        except SidecarError as error:
            if payload.base is None or error.kind not in ANOTHER_BASE:
                raise
        await self._send_whole(payload, version, in_flight, client)
        return True

    async def _send_whole(
        self, payload: Payload, version: int, in_flight: InFlight, client: SidecarClient
    ) -> None:
        whole = payload.whole()
        manifest = WeightsManifest(
            tensors=whole.entries,
            payload_bytes=whole.nbytes,
            part_bytes=self._part_bytes,
            in_flight=in_flight,
        )
        await client.push_weights(version, manifest, whole.read)
