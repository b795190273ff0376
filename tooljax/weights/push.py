"""Sends the policy's weights to the sidecars: what changed, or all of them, verified by hash before any is served."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.host_memory import give_back
from rollout_sidecar.protocol import TensorEntry, WeightsManifest, content_hash
from rollout_sidecar.weight_codec import entropy_floor_bits
from tooljax.weights.outgoing import Outgoing, Streamed, known, without_hashes
from tooljax.weights.payload import (
    Base,
    Payload,
    delta_payload,
    full_payload,
    layout,
)
from tooljax.weights.stopwatch import Stopwatch

AGAIN_WHOLE = ("wrong_base", "hash_mismatch")
"""Answers of a sidecar that lacks the base of a delta, whose copy of it is damaged, or that got damaged bytes: it gets
everything, once."""

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
    stages: dict[str, float]
    """Seconds by stage, by the clock: code, send, and of code: find, fetch. Added up over threads: encode, apply, copy,
    hash."""

    @property
    def floor_bytes(self) -> float:
        """What the changes would take at least, their positions and new values coded without knowing anything else."""
        return entropy_floor_bits(self.elements, self.changed_elements) / 8

    def metrics(self) -> dict[str, float]:
        """What a step logs of its push."""
        metrics = {
            "weights/push_bytes": float(self.bytes),
            "weights/push_ratio": self.full_bytes / max(self.bytes, 1),
            "weights/full_resends": float(self.full_resends),
        }
        if self.elements:
            metrics["weights/changed_frac"] = self.changed_elements / self.elements
        if self.changed_elements:
            metrics["weights/floor_ratio"] = self.bytes / self.floor_bytes
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
        self._layout: list[TensorEntry] | None = None
        """Of a full push in full mode, once one was made."""
        self._last: tuple[Payload, int] | None = None
        self._sizes: dict[int, int] = {}
        """Of what changed in the last push, to find it sooner in the next."""

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
        watch = Stopwatch()
        self._last = None  # its bytes may change now
        # The host has one copy, the base, which is changed in place: until that is acknowledged there is no base.
        base, self._base = self._base, None
        outgoing = await self._outgoing(base, tensors, watch)
        watch.seconds["code"] = time.monotonic() - started
        try:
            send = partial(self._send, outgoing, version, in_flight)
            resent = await (deliver or partial(self._to_all, version, timeout_s))(send)
            payload = await outgoing.payload()
        except BaseException:
            self._layout = None
            if outgoing.base is not None:
                (await outgoing.payload()).undo(outgoing.base)
                self._base = outgoing.base
            raise
        watch.seconds["send"] = time.monotonic() - started - watch.seconds["code"]
        if self._mode == "full":
            self._layout = without_hashes(payload.entries)
        elif any(array.dtype.itemsize == 2 for array in payload.arrays.values()):
            self._base = payload.acknowledged(version)
        self._last = payload, version
        asyncio.get_running_loop().run_in_executor(None, give_back)  # nobody waits for it
        return PushReport(
            version=version,
            bytes=payload.nbytes,
            full_bytes=payload.full_bytes,
            seconds=time.monotonic() - started,
            content_hash=content_hash(payload.entries),
            changed_elements=payload.changed_elements,
            elements=payload.elements,
            full_resends=resent,
            stages=dict(watch.seconds),
        )

    async def catch_up(self, client: SidecarClient) -> None:
        """Sends a sidecar all of the version that was pushed last. Raises SidecarError."""
        if self._last is None:
            raise SidecarError(
                "there is no version of the weights to send again", kind="no_weights"
            )
        payload, version = self._last
        await self._send_whole(payload, version, "continue", client)

    async def _outgoing(
        self, base: Base | None, tensors: Iterable[tuple[str, jax.Array]], watch: Stopwatch
    ) -> Outgoing:
        """What to send. A full push is sent while it comes to the host, if it is known what will come."""
        if self._mode == "full":
            if self._layout is not None:
                return Streamed(self._layout, tensors, keep_arrays=False, watch=watch)
            fetch = partial(full_payload, tensors, keep_arrays=False, watch=watch)
            return known(await asyncio.to_thread(fetch))
        named = dict(tensors)
        if base is not None and base.fits(named):
            find = partial(delta_payload, base, named, watch=watch, sizes=self._sizes)
            return known(await asyncio.to_thread(find))
        shapes = ((name, str(array.dtype), array.shape) for name, array in named.items())
        return Streamed(layout(shapes), named.items(), keep_arrays=True, watch=watch)

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
        self, outgoing: Outgoing, version: int, in_flight: InFlight, client: SidecarClient
    ) -> bool:
        """Whether the sidecar got everything although a delta was meant for it.

        The client compares each acknowledgement with the version and the hash of the manifest.
        """
        base = outgoing.base
        manifest = WeightsManifest(
            push_id=uuid.uuid4().hex,
            tensors=outgoing.entries,
            payload_bytes=outgoing.nbytes,
            part_bytes=self._part_bytes,
            base_version=base.version if base else None,
            base_hash=base.content_hash if base else "",
            in_flight=in_flight,
        )
        try:
            await client.push_weights(version, manifest, outgoing.read, outgoing.hashes)
            return False
        except SidecarError as error:
            if error.kind not in AGAIN_WHOLE:
                raise
        await self._send_whole(await outgoing.payload(), version, in_flight, client)
        return base is not None

    async def _send_whole(
        self, payload: Payload, version: int, in_flight: InFlight, client: SidecarClient
    ) -> None:
        whole = payload.whole()
        manifest = WeightsManifest(
            push_id=uuid.uuid4().hex,
            tensors=whole.entries,
            payload_bytes=whole.nbytes,
            part_bytes=self._part_bytes,
            in_flight=in_flight,
        )
        await client.push_weights(version, manifest, whole.read)
