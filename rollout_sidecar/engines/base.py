"""What the agent loop needs from a generation engine: token ids in, token ids and log-probs out.

Engines: `jax.py` (embedded, CPU/TPU/GPU), `sglang.py` (GPU), `scripted.py` (plays a script, for tests).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollout_sidecar.protocol import SamplingParams, VersionSpan


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One turn to generate. `token_ids` is the whole context: the engine finds by itself what it has cached."""

    trajectory_id: str
    """The same in every turn of a trajectory, so that an engine can keep its prefix."""
    ordinal: int
    """Position of the trajectory in its request. With the seed, it makes an embedded engine's placement repeatable."""
    token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    """Already specific to the turn."""


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """What was sampled. When `finish` is "stop" the matched stop id is the last token, present exactly once."""

    token_ids: list[int]
    log_probs: list[float]
    """Under the sampled distribution: after temperature, top-k and top-p. Greedy: untempered."""
    finish: Literal["stop", "length", "aborted"]
    policy_version: int
    """The version that sampled the last token."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """Positions in token_ids by version, where weights were swapped during the turn; [] if one version sampled all."""
    cached_tokens: int = 0


@dataclass(frozen=True)
class WeightTensor:
    """One tensor of a push: raw little-endian bytes under a Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview = field(repr=False)


class Staging(Protocol):
    """Weights on their way to the device while others are still verified.

    An engine may have `begin_staging(tensors, policy_version) -> Staging | None`, called in a thread with every tensor
    that is about to change, of which only name, dtype, shape and size count; None if it would rather wait. The next
    thing it is asked is `load_weights` of that version, with these among its tensors as all that changed, or `drop`.
    """

    def add(self, tensors: Sequence[WeightTensor]) -> None:
        """The bytes of these will not change until load_weights has returned, or `drop`. Called in several threads."""
        ...

    def drop(self) -> None:
        """These weights will not be loaded. No bytes are read when this returns."""
        ...


RELEASED = (
    "its memory is released for a trainer on the same device: POST /v1/engine/resume, then push weights. A training "
    "run with sidecar.share_gpu does both when it is started again"
)
"""The fault of an engine between release_memory and resume_memory."""

EMPTY = "its weights were released and nothing has been pushed since: push them. A training run does when it is started"
"""The fault between resume_memory and the next load_weights."""


class Engine(Protocol):
    """A generation engine. All methods are called from one event loop; `generate` runs many times at once."""

    name: str
    policy_version: int
    max_model_tokens: int
    vocab_size: int

    @property
    def swap_s(self) -> Mapping[str, float]:
        """Seconds of the last load_weights: stage, pause (generation stood still), and parts of the pause, whose names
        begin with it. {} before the first."""
        ...

    @property
    def fault(self) -> str:
        """Why nothing can be generated, and what to do; "" when it can."""
        ...

    async def start(self) -> None:
        """Loads the model and compiles; returns when the first request can be served."""
        ...

    async def close(self) -> None:
        """Ends every generation (as "aborted") and frees the device."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one turn. Cancelling the call aborts the generation."""
        ...

    async def abort(self, trajectory_id: str) -> None:
        """Ends the trajectory's running generation, which returns what it has as "aborted". No-op if unknown."""
        ...

    async def release(self, trajectory_id: str) -> None:
        """The trajectory has ended: whatever is kept for its prefix may go. No-op if unknown."""
        ...

    async def load_weights(
        self,
        tensors: Mapping[str, WeightTensor],
        policy_version: int,
        changed: frozenset[str] | None = None,
    ) -> None:
        """Replaces all weights at once, between tokens or turns of what is running; forgets every cached prefix.

        Raises ValueError, and keeps serving the old weights, if a name, shape or dtype does not fit the model.

        Args:
            tensors: the whole set. The bytes are valid, and the same, only until this returns.
            policy_version: what they are called.
            changed: names of those that differ from what was loaded last; None if that is not known.
        """
        ...

    async def altered_tensors(self, tensors: Mapping[str, WeightTensor]) -> list[str] | None:
        """Names of the tensors that the engine's own memory holds otherwise than given; None if it cannot tell."""
        ...

    async def release_memory(self) -> None:
        """Gives the device's memory back: weights and KV cache. What is running waits, with what it has sampled.

        Nothing is generated until `resume_memory` and, after it, `load_weights`. Does nothing if released already.
        NotImplementedError, with what to do, if this engine cannot.
        """
        ...

    async def resume_memory(self) -> None:
        """Takes the memory again; the weights in it are garbage. Does nothing if nothing was released."""
        ...
