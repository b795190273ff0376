"""What a manifest must be before a byte of its push is taken."""

import math
import re
from collections.abc import Sequence

from msgspec.structs import replace

from rollout_sidecar.errors import RequestError
from rollout_sidecar.protocol import TensorEntry, WeightsManifest

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_HASH = re.compile(r"[0-9a-f]{32}")


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
        where = f"$.tensors[{index}]"
        _check_entry(entry, offset, where, whole=manifest.base_version is None)
        if not entry.hash:
            _check_may_come_later(manifest, where)
        elif not _HASH.fullmatch(entry.hash):
            raise _bad_hash(f"{where}.hash", entry.hash)
        if entry.name in names:
            raise _bad(f"{where}.name", f"{entry.name} is listed twice")
        names.add(entry.name)
        offset += entry.nbytes
    if offset != manifest.payload_bytes:
        raise _bad(
            "$.payload_bytes", f"{manifest.payload_bytes}, but the tensors have {offset} bytes"
        )


def has_hashes(manifest: WeightsManifest) -> bool:
    """Whether they are here, and not to come with the commit. Of a manifest that has been checked."""
    return bool(manifest.tensors[0].hash)


def with_hashes(manifest: WeightsManifest, hashes: Sequence[str]) -> WeightsManifest:
    """The manifest with the hashes of the commit filled in. RequestError 400 unless there is one for each tensor."""
    if has_hashes(manifest):
        if hashes:
            raise _bad_commit("the manifest has the hashes already; leave them out of the commit")
        return manifest
    if len(hashes) != len(manifest.tensors):
        raise _bad_commit(
            f"{len(hashes)} hashes for {len(manifest.tensors)} tensors; the manifest left them out, so the commit"
            " brings one for each"
        )
    for index, text in enumerate(hashes):
        if not _HASH.fullmatch(text):
            raise _bad_hash(f"$.hashes[{index}]", text)
    pairs = zip(manifest.tensors, hashes, strict=True)
    return replace(manifest, tensors=[replace(entry, hash=text) for entry, text in pairs])


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


def _check_may_come_later(manifest: WeightsManifest, where: str) -> None:
    if manifest.base_version is not None:
        raise _bad(f"{where}.hash", "only a push of whole tensors may leave out the hashes")
    if any(entry.hash for entry in manifest.tensors):
        raise _bad(f"{where}.hash", "either every tensor has its hash, or none")
    if not manifest.push_id:
        raise _bad("$.push_id", "a push whose hashes come with the commit needs a push_id")


def _bad(where: str, message: str) -> RequestError:
    return RequestError(400, "invalid_manifest", f"{message} - at `{where}`", where)


def _bad_hash(where: str, text: str) -> RequestError:
    return _bad(where, f"{text!r} is not 32 lower-case hexadecimal digits")


def _bad_commit(message: str) -> RequestError:
    return RequestError(400, "invalid_commit", f"{message} - at `$.hashes`", "$.hashes")
