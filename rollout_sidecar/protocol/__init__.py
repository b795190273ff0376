"""The wire protocol between trainer and sidecar, version 1: every type that crosses HTTP.

One set of msgspec structs serves both encodings: JSON for people (`curl` works) and MessagePack for the trainer.
Unknown fields are errors, so a misspelt limit cannot be ignored. Nothing here imports jax, torch or a server.
"""

from rollout_sidecar.protocol.base import (
    INSTANCE_HEADER,
    JSON,
    JSON_LINES,
    MSGPACK,
    PROTOCOL_VERSION,
    Message,
    NonNegative,
    Positive,
    PositiveSeconds,
    Wire,
    decode,
    derive_seed,
    encode,
)
from rollout_sidecar.protocol.engine import EngineMemory, ServedWeights
from rollout_sidecar.protocol.information import (
    ErrorBody,
    Fault,
    Info,
)
from rollout_sidecar.protocol.rollouts import (
    EndFrame,
    Frame,
    Limits,
    ProgressFrame,
    RewardWeights,
    RolloutRequest,
    RolloutSpec,
    SamplingParams,
    Task,
    TrajectoryFrame,
)
from rollout_sidecar.protocol.trajectories import (
    CallStatus,
    InteractionReply,
    PartialTrajectory,
    Status,
    TokenStream,
    ToolCallRecord,
    Trajectory,
    Turn,
    VersionSpan,
)
from rollout_sidecar.protocol.weights import (
    TensorEntry,
    WeightsCommit,
    WeightsCommitted,
    WeightsManifest,
    WeightsStatus,
    content_hash,
)

__all__ = [
    "INSTANCE_HEADER",
    "CallStatus",
    "EndFrame",
    "EngineMemory",
    "ErrorBody",
    "Fault",
    "Frame",
    "Info",
    "InteractionReply",
    "JSON",
    "JSON_LINES",
    "Limits",
    "MSGPACK",
    "Message",
    "NonNegative",
    "PROTOCOL_VERSION",
    "PartialTrajectory",
    "Positive",
    "PositiveSeconds",
    "ProgressFrame",
    "RewardWeights",
    "RolloutRequest",
    "RolloutSpec",
    "SamplingParams",
    "ServedWeights",
    "Status",
    "Task",
    "TensorEntry",
    "TokenStream",
    "ToolCallRecord",
    "Trajectory",
    "TrajectoryFrame",
    "Turn",
    "VersionSpan",
    "WeightsCommit",
    "WeightsCommitted",
    "WeightsManifest",
    "WeightsStatus",
    "Wire",
    "content_hash",
    "decode",
    "derive_seed",
    "encode",
]
