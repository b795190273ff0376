"""What a sidecar says about the engine behind it: the weights that it holds, and the memory."""

from rollout_sidecar.protocol.base import Wire


class ServedWeights(Wire, frozen=True, kw_only=True):
    """Answer to GET /v1/weights: what is being served, tensor by tensor. Made when asked: it reads every weight."""

    version: int
    content_hash: str
    hashes: dict[str, str]
    """xxh3-128 of the bytes of each tensor in the host copy, by name."""
    altered: list[str] | None = None
    """Tensors that the engine itself holds otherwise; None if it cannot tell."""


class EngineMemory(Wire, frozen=True, kw_only=True):
    """Answer to POST /v1/engine/release and /v1/engine/resume."""

    released: bool
    """Weights and KV cache take no memory of the device now."""
    fault: str
    """Why nothing can be generated, and what to do; "" when it can."""
