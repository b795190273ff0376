"""The wire protocol between trainer and sidecar, version 1: every type that crosses HTTP.

One set of msgspec structs serves both encodings: JSON for people (`curl` works) and MessagePack for the trainer.
Unknown fields are errors, so a misspelt limit cannot be ignored. Nothing here imports jax, torch or a server.
"""

import hashlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec

T = TypeVar("T")

PROTOCOL_VERSION = 1

JSON = "application/json"
MSGPACK = "application/msgpack"
JSON_LINES = "application/x-ndjson"

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]

Status = Literal[
    "completed",  # the policy ended a turn without a tool call, and no interaction had more to say
    "max_turns",  # the last allowed turn still called a tool
    "max_tokens",  # a turn, or the whole trajectory, reached its token limit
    "invalid_calls",  # too many consecutive turns held only calls that could not be executed
    "timeout",  # the trajectory deadline passed
    "tool_error",  # the tools could not be set up for this task
    "interaction_error",  # the interaction raised, or did not answer in time
    "engine_error",  # generation failed
    "context_rewritten",  # the chat template rewrote earlier turns, and the context policy is reject
    "prompt_too_long",  # rejected before sampling; a prompt is never truncated
    "aborted",  # the client asked for it
]
"""Why a trajectory ended. Only trajectories with at least one sampled token can be trained on."""

CallStatus = Literal[
    "ok",
    "parse_error",
    "unknown_tool",
    "bad_arguments",
    "timeout",
    "error",
    "unavailable",  # refused before it ran: its circuit breaker is open, or its queue did not move in time
    "not_executed",
]
"""What became of one tool call. Everything but "ok" was told to the policy in the tool message."""

Message = dict[str, Any]
"""A chat message as templates expect it: role, content, and what else the user's records carry."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every wire type: immutable, keyword-only, unknown fields rejected."""


# --- rollouts ---------------------------------------------------------------------------------------------------


class SamplingParams(Wire, frozen=True, kw_only=True):
    """How tokens are drawn. Rollout log-probs are under the distribution after temperature, top-k and top-p."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """0 is greedy; its log-probs are those of the untempered distribution."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    """0 keeps every token."""


class Limits(Wire, frozen=True, kw_only=True):
    """Every bound of one trajectory. Tokens are counted after tokenisation, seconds on the sidecar's clock."""

    max_turns: Positive = 8
    max_tokens_per_turn: Positive = 512
    max_trajectory_tokens: Positive = 4096
    """Prompt, completion and observation tokens together."""
    max_prompt_tokens: Positive = 2048
    max_tool_result_tokens: Positive = 1024
    max_parallel_calls: Positive = 8
    """Calls of one turn beyond this are answered with "not executed"."""
    max_invalid_turns: Positive = 3
    """Consecutive turns in which no call could be executed, before the trajectory ends."""
    tool_timeout_s: PositiveSeconds = 80.0
    trajectory_timeout_s: PositiveSeconds = 600.0


class Task(Wire, frozen=True, kw_only=True):
    """One problem to solve, as read from a verl record."""

    task_id: str
    messages: list[Message]
    data_source: str = ""
    """Selects the reward function, as in verl."""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    tools: list[str] | None = None
    """Names of the tools offered; None offers all that the sidecar has, [] withholds them."""
    tools_kwargs: dict[str, dict[str, Any]] = {}
    """Per tool: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs."""
    interaction: str = ""
    """Name of the interaction that answers when the policy calls no tool; "" for none."""
    interaction_kwargs: dict[str, Any] = {}
    """What its start_interaction is given."""


class RewardWeights(Wire, frozen=True, kw_only=True):
    """How a trajectory's reward is put together: outcome + the weighted terms. Sent with each request, so that the
    trainer can anneal shaping, and evaluations are scored without it."""

    tool: float = 0.0
    """Of the rewards that tools return."""
    turn: float = 0.0
    """Of the scores that an interaction gives to turns, after `turn_merge`."""
    turn_merge: Literal["sum", "mean", "last", "max"] = "sum"
    """How the scores of a trajectory's turns become one."""
    valid_call: float = 0.0
    """Added once to a trajectory that made a successful tool call."""
    invalid_call: float = 0.0
    """Times the share of calls that could not be executed (usually negative)."""
    overlong: float = 0.0
    """DAPO's soft over-long penalty (arXiv:2503.14476, eq. 13): at most this much is taken off."""
    overlong_buffer_tokens: NonNegative = 0
    """Length, before the trajectory limit, over which that penalty grows from 0."""


class RolloutSpec(Wire, frozen=True, kw_only=True):
    """One trajectory to make: which task, which of its samples, from which seed."""

    task_index: NonNegative
    sample_index: NonNegative
    seed: NonNegative
    """Below 2**63. The seed of turn t derives from (seed, t)."""


class RolloutRequest(Wire, frozen=True, kw_only=True):
    """Body of POST /v1/rollouts. Sent again with the same request_id, it returns the same stream."""

    request_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    tasks: list[Task]
    rollouts: list[RolloutSpec]
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    reward_weights: RewardWeights | None = None
    """None: the outcome alone. Weights of 0 give the same reward, and warn of rewards that are ignored."""
    min_policy_version: NonNegative = 0
    """The sidecar refuses (409) while it serves an older version than this."""


class ToolCallRecord(Wire, frozen=True, kw_only=True):
    """One tool call of a turn, executed or not, and what the policy was told."""

    name: str
    """"" when the call could not be parsed."""
    arguments: Any = None
    raw: str = ""
    """The call as the policy wrote it."""
    status: CallStatus
    result: str
    """Text of the tool message, after truncation."""
    truncated: bool = False
    result_tokens: int = 0
    latency_s: float = 0.0
    """Time in the tool, waiting not included."""
    queue_s: float = 0.0
    """Time spent waiting for one of the tool's places, or for its rate limit."""
    attempts: int = 1
    """More than 1 where a tool declared idempotent was tried again."""
    reward: float = 0.0
    """The tool's own reward for this call."""
    metrics: dict[str, float] = {}
    """What the tool reported about this call, where it is a number."""


class InteractionReply(Wire, frozen=True, kw_only=True):
    """What an interaction made of a turn that called no tool."""

    text: str
    """The user message; it was shown to the policy only if the trajectory went on."""
    score: float = 0.0
    done: bool = False
    """It ended the conversation."""
    latency_s: float = 0.0


class Turn(Wire, frozen=True, kw_only=True):
    """One policy generation plus the tool results it caused."""

    start: int
    """Index in token_ids of the turn's first completion token."""
    end: int
    """One past its last completion token."""
    policy_version: int
    finish: Literal["stop", "length", "aborted"]
    cached_tokens: int = 0
    """Context tokens that the engine did not have to prefill."""
    generate_s: float = 0.0
    calls: list[ToolCallRecord] = []
    reply: InteractionReply | None = None
    stream: int = 0
    """Which of the trajectory's token streams `start` and `end` count in; see Trajectory.earlier_streams."""


class VersionSpan(Wire, frozen=True, kw_only=True):
    """token_ids[start:end] were sampled by one policy version."""

    start: int
    end: int
    policy_version: int


class TokenStream(Wire, frozen=True, kw_only=True):
    """A context that the policy saw, and what it sampled in it. All per-token lists have the length of token_ids."""

    token_ids: list[int]
    prompt_tokens: int
    """Tokens before the first one sampled in this stream."""
    loss_mask: list[bool]
    rollout_log_probs: list[float]
    version_spans: list[VersionSpan]


class Trajectory(Wire, frozen=True, kw_only=True):
    """The token-exact record of one rollout. All per-token lists have the length of token_ids."""

    task_index: int
    sample_index: int
    task_id: str
    data_source: str = ""
    seed: int
    status: Status
    error: str = ""
    """What went wrong, when status is an error."""
    token_ids: list[int] = []
    """Prompt, then completion and observation tokens in the order the policy saw them."""
    prompt_tokens: int = 0
    loss_mask: list[bool] = []
    """True exactly where the policy sampled the token."""
    rollout_log_probs: list[float] = []
    """0 where loss_mask is False."""
    version_spans: list[VersionSpan] = []
    earlier_streams: list[TokenStream] = []
    """Context policy "fork" only: streams that ended because the template rewrote earlier turns. The fields above are
    the last stream, number len(earlier_streams). Every sampled token is in exactly one stream with mask True."""
    turns: list[Turn] = []
    scored: bool = True
    """False: the reward function failed or could not run. Such a reward is no 0, and is never trained on."""
    reward: float = 0.0
    reward_terms: dict[str, float] = {}
    """The parts of the reward, weighted: they add up to it."""
    metrics: dict[str, float] = {}
    """What the reward function reported beside the score, for example accuracy under "acc"."""
    escaped_special_tokens: int = 0
    """Special-token texts found in messages or tool results and encoded as plain text."""
    messages: list[Message] = []
    """The conversation as text, for people and for the audit log; training uses token_ids only."""
    total_s: float = 0.0
    tool_s: float = 0.0

    @property
    def streams(self) -> "list[TokenStream | Trajectory]":
        """Every token stream in the order in which they were sampled. The last one is the trajectory itself."""
        return [*self.earlier_streams, self]


class TrajectoryFrame(Wire, frozen=True, kw_only=True, tag="trajectory"):
    """Frame `index` of a rollout stream."""

    index: int
    trajectory: Trajectory


class EndFrame(Wire, frozen=True, kw_only=True, tag="end"):
    """Last frame of a stream: how many trajectory frames it held, and whether the request was aborted."""

    index: int
    trajectories: int
    aborted: bool = False


Frame = TrajectoryFrame | EndFrame


# --- weights ----------------------------------------------------------------------------------------------------


class TensorEntry(Wire, frozen=True, kw_only=True):
    """One tensor of a push, under its Hugging Face name. It is coded in payload[offset : offset + nbytes]."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: list[int]
    offset: NonNegative
    nbytes: NonNegative
    hash: str
    """xxh3-128 of the whole tensor's bytes, hexadecimal, however it is coded."""
    encoding: Literal["raw", "delta", "same"] = "raw"
    """Its bytes; what changed since the base version (rollout_sidecar.weight_codec); or nothing, it did not change."""


class WeightsManifest(Wire, frozen=True, kw_only=True):
    """Body of POST /v1/weights/{version}. The payload is one byte stream cut into parts of part_bytes."""

    base_version: int | None = None
    """The version that encodings refer to; None when every tensor is sent whole."""
    base_hash: str = ""
    """The content hash of the base version."""
    tensors: list[TensorEntry]
    payload_bytes: NonNegative
    part_bytes: Positive


class WeightsStatus(Wire, frozen=True, kw_only=True):
    """Answer to begin and to each part: what is still missing. Sending goes on from here after a break."""

    version: int
    missing_parts: list[int]


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


# --- information and errors -------------------------------------------------------------------------------------


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


class Fault(Wire, frozen=True, kw_only=True):
    """What an error answer says."""

    kind: str
    message: str
    field: str = ""


class ErrorBody(Wire, frozen=True, kw_only=True):
    """Body of every answer with status 400 or above."""

    error: Fault


# --- encodings --------------------------------------------------------------------------------------------------


def encode(value: Any, content_type: str) -> bytes:
    """Encodes a wire type as MessagePack when content_type says so, else as JSON."""
    return msgspec.msgpack.encode(value) if content_type == MSGPACK else msgspec.json.encode(value)


def decode(body: bytes | bytearray, content_type: str, wire_type: type[T]) -> T:
    """Decodes and validates; raises msgspec.ValidationError (naming the field) or msgspec.DecodeError."""
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=wire_type)
    return msgspec.json.decode(body, type=wire_type)


# --- seeds ------------------------------------------------------------------------------------------------------


def derive_seed(*parts: int) -> int:
    """A seed below 2**63 from integers, the same on every machine and version: blake2b-64 of "a,b,c", top bit off.

    The trainer derives a trajectory's seed from (run seed, step, prompt, sample), the sidecar a turn's from
    (trajectory seed, turn).
    """
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
