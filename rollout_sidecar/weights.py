"""New weights: staged in parts, verified as a whole, swapped at once.

The old version is served until every byte of the new one has been verified and the engine has taken it; whatever
fails on the way leaves the old version as it was. One push is staged at a time, in one buffer of the payload's size.
Another push that begins replaces it, and its sender is told so with the next thing it sends.

Beside the engine's there is one copy of the weights on the host: the base that the next delta is added to. A push of
whole tensors drops it when it begins and becomes it when it is served, so there are never two.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec.structs import replace

from rollout_sidecar.engines.base import Engine, WeightTensor
from rollout_sidecar.engines.base import Staging as EngineStaging
from rollout_sidecar.errors import RequestError, describe
from rollout_sidecar.host_memory import available_bytes, give_back
from rollout_sidecar.metrics import Family
from rollout_sidecar.protocol import (
    WeightsCommit,
    WeightsCommitted,
    WeightsManifest,
    WeightsStatus,
    content_hash,
)
from rollout_sidecar.threads import brisk
from rollout_sidecar.weight_base import Applied, BadTensor, Base
from rollout_sidecar.weight_manifest import check_manifest, has_hashes, with_hashes

_log = logging.getLogger(__name__)

InFlight = Literal["continue", "finish"]
Paused = Callable[[InFlight], AbstractAsyncContextManager[None]]


def _not_paused(in_flight: InFlight) -> AbstractAsyncContextManager[None]:
    return nullcontext()


@dataclass
class Staging:
    """One push that has begun: where its bytes go, and which parts have not come yet."""

    version: int
    manifest: WeightsManifest
    buffer: np.ndarray = field(repr=False)
    missing: set[int]

    def status(self) -> WeightsStatus:
        """What the sender still has to send."""
        return WeightsStatus(version=self.version, missing_parts=sorted(self.missing))

    def place(self, index: int) -> slice:
        """Where a part goes. RequestError 400 if there is no such part."""
        start = index * self.manifest.part_bytes
        if not 0 <= start < self.manifest.payload_bytes:
            raise RequestError(400, "bad_part", f"part {index} lies beyond the payload's end")
        return slice(start, min(start + self.manifest.part_bytes, self.manifest.payload_bytes))

    def is_of(self, version: int, manifest: WeightsManifest) -> bool:
        """Whether that push may go on with what has come of this one: without hashes, only if it is this very one."""
        if has_hashes(manifest):
            manifest = replace(manifest, push_id=self.manifest.push_id)
        return (self.version, self.manifest) == (version, manifest)


class _Verifying:
    """A push being added to the base and verified, in threads; and on its way to the device meanwhile, if the engine
    knows how."""

    def __init__(self, base: Base, engine: Engine, version: int):
        self.applied = Applied()
        self._base, self._version = base, version
        self._begin = getattr(engine, "begin_staging", None)
        self._staging: EngineStaging | None = None

    def run(self, manifest: WeightsManifest, payload: np.ndarray) -> None:
        """BadTensor if a tensor cannot be served; then nothing has changed."""
        with brisk():
            self._run(manifest, payload)

    def _run(self, manifest: WeightsManifest, payload: np.ndarray) -> None:
        whole = manifest.base_version is None
        try:
            batches = self._base.batches(manifest.tensors)
            names = [entry.name for batch in batches for entry in batch]
            if self._begin is not None:
                self._staging = self._begin(self._base.named(names), self._version)
            if whole:
                self._add(names)
                self._base.verify()
            else:
                self.applied = self._base.apply(manifest.tensors, payload, self._add)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """The base is what it was."""
        if self._staging is not None:
            self._staging.drop()
        self.applied.undo(self._base)

    def _add(self, names: Sequence[str]) -> None:
        if self._staging is not None:
            self._staging.add(self._base.named(names))


class WeightStore:
    """Takes pushes for one engine. `paused` is entered while the engine swaps: new rollouts wait outside it."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_payload_bytes: int = 2**36,
        max_part_bytes: int = 2**28,
        paused: Paused = _not_paused,
    ):
        self.content_hash = ""
        """Hash of the weights being served; "" before the first push."""
        self.verify_s = 0.0
        """How long adding and verifying took in the last push."""
        self._engine = engine
        self._max_payload_bytes = max_payload_bytes
        self._max_part_bytes = max_part_bytes
        self._paused = paused
        self._staging: Staging | None = None
        self._base: Base | None = None
        self._committing = asyncio.Lock()

    @property
    def staged_bytes(self) -> int:
        """Size of the staging buffer, 0 between pushes."""
        return self._staging.buffer.nbytes if self._staging else 0

    @property
    def base_bytes(self) -> int:
        """Size of the host copy of the weights being served, 0 if there is none."""
        return self._base.nbytes if self._base else 0

    def alone(self) -> asyncio.Lock:
        """To hold while the engine's weights or memory change: pushes are refused meanwhile."""
        return self._committing

    def tensors(self) -> dict[str, WeightTensor] | None:
        """The host copy of what is being served; None before the first push, and while a full one is under way."""
        return self._base.tensors() if self._base else None

    def begin(self, version: int, manifest: WeightsManifest) -> WeightsStatus:
        """Starts a push, or tells what is missing of the one under way. Anything else that was staged is dropped."""
        check_manifest(manifest, self._max_payload_bytes, self._max_part_bytes)
        self._refuse_while_committing()
        served = self._engine.policy_version
        if version == served and content_hash(manifest.tensors) == self.content_hash:
            return WeightsStatus(version=version, missing_parts=[])
        if version <= served:
            raise self._stale(version)
        if manifest.base_version is not None:
            self._check_base(manifest, served)
        if self._staging is not None and self._staging.is_of(version, manifest):
            self._staging.manifest = manifest  # whoever asked last goes on with it
        else:
            self._check_memory(manifest)
            parts = math.ceil(manifest.payload_bytes / manifest.part_bytes)
            self._staging = None  # frees the old buffer before the new one is made
            if manifest.base_version is None:
                self._base = None  # not two copies at once; a delta that comes now is told that there is no base
            buffer = np.empty(manifest.payload_bytes, np.uint8)
            self._staging = Staging(version, manifest, buffer, set(range(parts)))
        return self._staging.status()

    async def receive(
        self, version: int, index: int, chunks: AsyncIterator[bytes], push_id: str = ""
    ) -> WeightsStatus:
        """Stores one part as it comes. A part may be sent again: the last one counts."""
        staging = self._open(version, push_id)
        place = staging.place(index)
        size, at = place.stop - place.start, 0
        staging.missing.add(index)  # half of it, if the connection breaks, is none of it
        view = staging.buffer.data[place]
        async for chunk in chunks:
            self._open(version, push_id, staging)  # bytes that are being verified must not change
            if at + len(chunk) <= size:
                view[at : at + len(chunk)] = chunk
            at += len(chunk)
        self._open(version, push_id, staging)
        if at != size:
            raise RequestError(400, "bad_part", f"part {index} has {at} bytes and must have {size}")
        staging.missing.discard(index)
        return staging.status()

    async def commit(self, version: int, order: WeightsCommit | None = None) -> WeightsCommitted:
        """Verifies every tensor and swaps. Sent again after success, it repeats its answer."""
        order = order or WeightsCommit()
        async with self._committing:
            if version == self._engine.policy_version and self.content_hash:
                if order.content_hash not in ("", self.content_hash):
                    raise self._stale(version)
                # Its memory was released meanwhile, and must be filled again.
                if self._engine.fault and self._base is not None:
                    async with self._paused("continue"):
                        await self._load(self._base, version, None)
                return WeightsCommitted(version=version, content_hash=self.content_hash)
            staging = self._staged(version, order.push_id)
            if staging.missing:
                raise RequestError(
                    409,
                    "missing_parts",
                    f"{len(staging.missing)} parts of version {version} have not arrived"
                    f" (the first is {min(staging.missing)}); begin again to learn which",
                )
            manifest = with_hashes(staging.manifest, order.hashes)
            # Good or bad, what is staged has served its purpose: a bad push is sent again as a whole.
            self._staging = None
            await self._swap(version, manifest, staging.buffer)
            self.content_hash = content_hash(manifest.tensors)
            asyncio.get_running_loop().run_in_executor(None, give_back)  # nobody waits for it
            return WeightsCommitted(version=version, content_hash=self.content_hash)

    async def _swap(self, version: int, manifest: WeightsManifest, payload: np.ndarray) -> None:
        """Verifies, then hands the engine the whole set. What fails leaves base and engine as they were."""
        begun = time.monotonic()
        old = self._base if manifest.base_version is not None else None
        base = old or Base(manifest.tensors, payload)
        verifying = _Verifying(base, self._engine, version)
        try:
            await asyncio.to_thread(verifying.run, manifest, payload)
            self.verify_s = time.monotonic() - begun
            changed = None if old is None else frozenset(verifying.applied.changed)
            async with self._paused(manifest.in_flight):
                await self._load(base, version, changed)
        except BadTensor as error:
            raise RequestError(422, error.kind, str(error), error.name) from error
        except BaseException:
            await asyncio.to_thread(verifying.undo)
            raise
        base.accept(manifest.tensors)
        self._base = base

    async def _load(self, base: Base, version: int, changed: frozenset[str] | None) -> None:
        old = self._engine.policy_version
        try:
            await self._engine.load_weights(base.tensors(), version, changed)
        except ValueError as error:
            raise RequestError(
                422,
                "rejected_weights",
                f"the engine refused version {version} and still serves {old}: {describe(error)}",
            ) from error
        if self._engine.policy_version != version:
            raise RequestError(
                500,
                "engine_error",
                f"the engine took version {version} but says it serves"
                f" {self._engine.policy_version}; restart the sidecar",
            )

    def _check_base(self, manifest: WeightsManifest, served: int) -> None:
        """Raises RequestError 409 unless the push can be added to what is here."""
        problem = ""
        if manifest.base_version != served:
            problem = f"base_version={manifest.base_version}, but {served} is being served"
        elif self._base is None:
            problem = f"there is no copy of version {served} to add a delta to"
        elif manifest.base_hash and manifest.base_hash != self.content_hash:
            problem = f"version {served} has the content {self.content_hash} here, not {manifest.base_hash}"
        else:
            try:
                self._base.check(manifest.tensors)
            except BadTensor as error:
                problem = str(error)
        if problem:
            raise RequestError(
                409,
                "wrong_base",
                f"{problem}; send every tensor whole, with base_version null",
                "$.base_version",
            )

    def _check_memory(self, manifest: WeightsManifest) -> None:
        """Raises RequestError 413 if the payload does not fit into memory. What it replaces is given up for it."""
        available = available_bytes()
        if available is None:
            return
        available += self.staged_bytes
        if manifest.base_version is None:
            available += self.base_bytes
        if manifest.payload_bytes > available:
            raise RequestError(
                413,
                "too_large",
                f"payload_bytes={manifest.payload_bytes} exceeds the {available} bytes of memory that are free"
                " here; give the sidecar more",
                "$.payload_bytes",
            )

    def _open(self, version: int, push_id: str, before: Staging | None = None) -> Staging:
        """What parts of this push are written to (if that is still the same as before)."""
        self._refuse_while_committing()
        return self._staged(version, push_id, before)

    def _staged(self, version: int, push_id: str, before: Staging | None = None) -> Staging:
        staging = self._staging
        if staging is None:
            raise RequestError(
                404,
                "not_begun",
                f"no push of version {version} is under way; begin with POST /v1/weights/{version}",
            )
        mine = staging.version == version and staging.manifest.push_id == push_id
        if not mine or before not in (None, staging):
            raise RequestError(
                409,
                "another_push",
                f"another push, of version {staging.version}, began after this one and replaced it; only one trainer"
                " may push to a sidecar",
            )
        return staging

    def _stale(self, version: int) -> RequestError:
        served = self._engine.policy_version
        return RequestError(
            409,
            "stale_version",
            f"version {version} is not newer than {served}, which is being served with other content;"
            f" push version {served + 1} or above",
        )

    def _refuse_while_committing(self) -> None:
        if self._committing.locked():
            raise RequestError(
                409,
                "committing",
                "a commit, or a look at the weights, is under way; try again when it is done",
            )


def swap_metrics(engine: Engine, weights: WeightStore) -> list[Family]:
    """What the last push took here: gauges for /metrics."""
    seconds = {"verify": weights.verify_s, **engine.swap_s}
    stages = [((("stage", stage),), value) for stage, value in sorted(seconds.items())]
    pause = [((), seconds.get("pause", 0.0))]
    return [
        Family("weight_pause_seconds", "How long the last swap held generation up.", pause),
        Family("weight_swap_seconds", "The last swap, by stage.", stages),
    ]
