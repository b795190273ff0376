"""What every wire type is made of, and how one becomes bytes."""

import hashlib
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

PROTOCOL_VERSION = 1

JSON = "application/json"
MSGPACK = "application/msgpack"
JSON_LINES = "application/x-ndjson"

INSTANCE_HEADER = "X-Sidecar-Instance"
"""Of answers to rollout requests: Info.instance. A stream that goes on with another one is another run's."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]

Message = dict[str, Any]
"""A chat message as templates expect it: role, content, and what else the user's records carry."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every wire type: immutable, keyword-only, unknown fields rejected."""


def encode(value: Any, content_type: str) -> bytes:
    """Encodes a wire type as MessagePack when content_type says so, else as JSON."""
    return msgspec.msgpack.encode(value) if content_type == MSGPACK else msgspec.json.encode(value)


def decode(body: bytes | bytearray, content_type: str, wire_type: type[T]) -> T:
    """Decodes and validates; raises msgspec.ValidationError (naming the field) or msgspec.DecodeError."""
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=wire_type)
    return msgspec.json.decode(body, type=wire_type)


def derive_seed(*parts: int) -> int:
    """A seed below 2**63 from integers, the same on every machine and version: blake2b-64 of "a,b,c", top bit off.

    The trainer derives a trajectory's seed from (run seed, step, prompt, sample), the sidecar a turn's from
    (trajectory seed, turn).
    """
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
