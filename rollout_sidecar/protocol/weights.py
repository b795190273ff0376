"""A push of weights: what is sent, and what is answered."""

from typing import Literal

from rollout_sidecar.protocol.base import NonNegative, Positive, Wire


class TensorEntry(Wire, frozen=True, kw_only=True):
    """One tensor of a push, under its Hugging Face name. It is coded in payload[offset : offset + nbytes]."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: list[int]
    offset: NonNegative
    nbytes: NonNegative
    hash: str
    """xxh3-128 of the whole tensor's bytes, hexadecimal, however it is coded. "" where the commit brings it."""
    encoding: Literal["raw", "delta", "same"] = "raw"
    """Its bytes; what changed since the base version (rollout_sidecar.weight_codec); or nothing, it did not change."""


class WeightsManifest(Wire, frozen=True, kw_only=True):
    """Body of POST /v1/weights/{version}. The payload is one byte stream cut into parts of part_bytes.

    A push of whole tensors may leave out every hash, so that sending begins before the last tensor is hashed.
    """

    push_id: str = ""
    """Chosen by the sender. Parts and commits of a push that another one has replaced are known, and refused, by it."""
    base_version: int | None = None
    """The version that encodings refer to; None when every tensor is sent whole."""
    base_hash: str = ""
    """The content hash of the base version."""
    tensors: list[TensorEntry]
    payload_bytes: NonNegative
    part_bytes: Positive
    in_flight: Literal["continue", "finish"] = "continue"
    """What becomes of trajectories under way: they go on with the new weights after their token or turn, or they end
    with the old ones before the swap, while new ones wait."""


class WeightsStatus(Wire, frozen=True, kw_only=True):
    """Answer to begin and to each part: what is still missing. Sending goes on from here after a break."""

    version: int
    missing_parts: list[int]


class WeightsCommit(Wire, frozen=True, kw_only=True):
    """Body of POST /v1/weights/{version}/commit. No body is the same as an empty one."""

    push_id: str = ""
    content_hash: str = ""
    """What will be served. "" says nothing of it."""
    hashes: list[str] = []
    """Of the tensors, in the manifest's order, where the manifest left them out."""


class WeightsCommitted(Wire, frozen=True, kw_only=True):
    """Answer to commit: the version now served, and the hash of all its tensors."""

    version: int
    content_hash: str


def content_hash(tensors: list[TensorEntry]) -> str:
    """The hash of a whole set of weights: xxh3-128 over name, dtype, shape and hash of each tensor, sorted by name."""
    import xxhash

    digest = xxhash.xxh3_128()
    for entry in sorted(tensors, key=lambda entry: entry.name):
        shape = ",".join(map(str, entry.shape))
        digest.update(f"{entry.name}|{entry.dtype}|{shape}|{entry.hash}\n".encode())
    return digest.hexdigest()
