"""What a sidecar says about itself, and what it says instead of an answer."""

from typing import Any

from rollout_sidecar.protocol.base import Wire


class Info(Wire, frozen=True, kw_only=True):
    """Answer to GET /v1/info."""

    protocol_version: int
    model: str
    vocab_size: int
    vocab_hash: str
    engine: str
    policy_version: int
    tool_format: str
    tools: list[dict[str, Any]]
    """OpenAI function schemas of every tool."""
    max_model_tokens: int
    """The longest context that the engine can hold."""
    content_hash: str = ""
    """Hash of the weights being served; "" before the first push."""
    instance: str = ""
    """Drawn at random when the sidecar started: two URLs with the same one are the same sidecar."""
    max_concurrent: int = 0
    """Trajectories that it generates at once."""


class Fault(Wire, frozen=True, kw_only=True):
    """What an error answer says."""

    kind: str
    message: str
    field: str = ""


class ErrorBody(Wire, frozen=True, kw_only=True):
    """Body of every answer with status 400 or above."""

    error: Fault
