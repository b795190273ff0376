"""New weights: staged in parts, verified as a whole, swapped at once.

The old version is served until every byte of the new one has been verified and the engine has taken it; whatever
fails on the way leaves the old version as it was. One push is staged at a time, in one buffer of the payload's size.

Beside the engine's there is one copy of the weights on the host: the base that the next delta is added to. A push of
whole tensors drops it when it begins and becomes it when it is served, so there are never two.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from rollout_sidecar.engines.base import Engine, WeightTensor
from rollout_sidecar.errors import RequestError, describe
from rollout_sidecar.protocol import (
    TensorEntry,
    WeightsCommitted,
    WeightsManifest,
    WeightsStatus,
    content_hash,
)
from rollout_sidecar.weight_base import Applied, BadTensor, Base, verify

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_HASH = re.compile(r"[0-9a-f]{32}")

_log = logging.getLogger(__name__)


@dataclass
class Staging:
    """One push that has begun: where its bytes go, and which parts have not come yet."""

    version: int
    manifest: WeightsManifest
    buffer: bytearray = field(repr=False)
    missing: set[int]

    def status(self) -> WeightsStatus:
        """What the sender still has to send."""
        return WeightsStatus(version=self.version, missing_parts=sorted(self.missing))


class WeightStore:
    """Takes pushes for one engine. `paused` is entered while the engine swaps: new rollouts wait outside it."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_payload_bytes: int = 2**36,
        max_part_bytes: int = 2**28,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.content_hash = ""
        """Hash of the weights being served; "" before the first push."""
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
        return len(self._staging.buffer) if self._staging else 0

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
            raise RequestError(
                409,
                "stale_version",
                f"version {version} is not newer than {served}, which is being served with other content;"
                f" push version {served + 1} or above",
            )
        if manifest.base_version is not None:
            self._check_base(manifest, served)
        staging = self._staging
        if staging is None or staging.version != version or staging.manifest != manifest:
            parts = math.ceil(manifest.payload_bytes / manifest.part_bytes)
            self._staging = None  # frees the old buffer before the new one is made
            if manifest.base_version is None:
                self._base = None  # not two copies at once; a delta that comes now is told that there is no base
            buffer = bytearray(manifest.payload_bytes)
            self._staging = staging = Staging(version, manifest, buffer, set(range(parts)))
        return staging.status()

    def put_part(self, version: int, index: int, data: bytes) -> WeightsStatus:
        """Stores one part. A part may be sent again: the last one counts."""
        self._refuse_while_committing()
        staging = self._staged(version)
        manifest = staging.manifest
        start = index * manifest.part_bytes
        if not 0 <= start < manifest.payload_bytes:
            raise RequestError(400, "bad_part", f"part {index} lies beyond the payload's end")
        expected = min(manifest.part_bytes, manifest.payload_bytes - start)
        if len(data) != expected:
            raise RequestError(
                400, "bad_part", f"part {index} has {len(data)} bytes and must have {expected}"
            )
        staging.buffer[start : start + expected] = data
        staging.missing.discard(index)
        return staging.status()

    async def commit(self, version: int) -> WeightsCommitted:
        """Verifies every tensor and swaps. Sent again after success, it repeats its answer."""
        async with self._committing:
            if version == self._engine.policy_version and self.content_hash:
                return WeightsCommitted(version=version, content_hash=self.content_hash)
            staging = self._staged(version)
            if staging.missing:
                raise RequestError(
                    409,
                    "missing_parts",
                    f"{len(staging.missing)} parts of version {version} have not arrived"
                    f" (the first is {min(staging.missing)}); begin again to learn which",
                )
            # Good or bad, what is staged has served its purpose: a bad push is sent again as a whole.
            self._staging = None
            await self._swap(staging)
            self.content_hash = content_hash(staging.manifest.tensors)
            return WeightsCommitted(version=version, content_hash=self.content_hash)

    async def _swap(self, staging: Staging) -> None:
        """Verifies, then hands the engine the whole set. What fails leaves base and engine as they were."""
        manifest = staging.manifest
        payload = memoryview(staging.buffer)
        base, applied = self._base, Applied()
        try:
            if manifest.base_version is None:
                for entry in manifest.tensors:
                    await asyncio.to_thread(verify, entry, payload[_slice(entry)])
                base = Base(manifest.tensors, staging.buffer)
            else:
                assert base is not None, "begin has seen to it, and nothing drops it meanwhile"
                applied = await asyncio.to_thread(base.apply, manifest.tensors, payload)
        except BadTensor as error:
            raise RequestError(422, "hash_mismatch", str(error), error.name) from error
        changed = None if manifest.base_version is None else frozenset(applied.changed)
        try:
            with self._paused():
                await self._load(base, staging.version, changed)
        except BaseException:
            await asyncio.to_thread(applied.undo, base)
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

    def _staged(self, version: int) -> Staging:
        if self._staging is None or self._staging.version != version:
            raise RequestError(
                404,
                "not_begun",
                f"no push of version {version} is under way; begin with POST /v1/weights/{version}",
            )
        return self._staging

    def _refuse_while_committing(self) -> None:
        if self._committing.locked():
            raise RequestError(
                409, "committing", "a commit is under way; try again when it is done"
            )


def check_manifest(manifest: WeightsManifest, max_payload_bytes: int, max_part_bytes: int) -> None:
    """Raises RequestError 400 or 413 unless the tensors lie end to end and fill the payload, within the limits."""
    if not manifest.tensors:
        raise _bad("$.tensors", "a push needs at least one tensor")
    if manifest.payload_bytes > max_payload_bytes:
        raise RequestError(
            413,
            "too_large",
            f"payload_bytes={manifest.payload_bytes} exceeds this sidecar's {max_payload_bytes};"
            " start it with a larger --max_weights_bytes",
            "$.payload_bytes",
        )
    if manifest.part_bytes > max_part_bytes:
        raise RequestError(
            413,
            "too_large",
            f"part_bytes={manifest.part_bytes} exceeds this sidecar's {max_part_bytes};"
            " send smaller parts (weights.part_bytes)",
            "$.part_bytes",
        )
    offset = 0
    names = set()
    for index, entry in enumerate(manifest.tensors):
        _check_entry(entry, offset, f"$.tensors[{index}]", whole=manifest.base_version is None)
        if entry.name in names:
            raise _bad(f"$.tensors[{index}].name", f"{entry.name} is listed twice")
        names.add(entry.name)
        offset += entry.nbytes
    if offset != manifest.payload_bytes:
        raise _bad(
            "$.payload_bytes", f"{manifest.payload_bytes}, but the tensors have {offset} bytes"
        )


def _check_entry(entry: TensorEntry, offset: int, where: str, *, whole: bool) -> None:
    if entry.offset != offset:
        raise _bad(
            f"{where}.offset",
            f"{entry.name} starts at {entry.offset}, but the tensor before it ends at {offset}",
        )
    if any(size < 0 for size in entry.shape):
        raise _bad(f"{where}.shape", f"{entry.name} has the shape {entry.shape}")
    if whole and entry.encoding != "raw":
        raise _bad(
            f"{where}.encoding",
            f"{entry.name} is coded as {entry.encoding!r}, and there is no base_version",
        )
    if entry.encoding == "delta" and ITEM_BYTES[entry.dtype] != 2:
        raise _bad(
            f"{where}.encoding", f"{entry.name} is {entry.dtype}; deltas are of 16-bit types"
        )
    expected = 0 if entry.encoding == "same" else math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if entry.nbytes != expected and entry.encoding != "delta":
        raise _bad(
            f"{where}.nbytes",
            f"{entry.name} has {entry.nbytes} bytes, but {entry.dtype} {entry.shape} has {expected}",
        )
    if not _HASH.fullmatch(entry.hash):
        raise _bad(f"{where}.hash", f"{entry.hash!r} is not 32 lower-case hexadecimal digits")


def _bad(where: str, message: str) -> RequestError:
    return RequestError(400, "invalid_manifest", f"{message} - at `{where}`", where)


def _slice(entry: TensorEntry) -> slice:
    return slice(entry.offset, entry.offset + entry.nbytes)
