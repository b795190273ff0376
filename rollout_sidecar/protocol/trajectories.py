"""The record that a rollout leaves."""

from typing import Any, Literal

from rollout_sidecar.protocol.base import Message, Wire

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


class PartialTrajectory(Wire, frozen=True, kw_only=True):
    """A trajectory between two turns: what a sidecar needs to go on from there, token for token.

    Fields have the meaning that they have in Trajectory. The next turn is number len(turns), and so is its seed.
    """

    seed: int
    turns: list[Turn]
    token_ids: list[int]
    prompt_tokens: int
    loss_mask: list[bool]
    rollout_log_probs: list[float]
    version_spans: list[VersionSpan]
    earlier_streams: list[TokenStream] = []
    messages: list[Message]
    prompt_messages: int
    """How many of the messages were there before the first turn."""
    invalid_turns: int = 0
    """Turns at the end, one after the other, in which no call could be executed."""
    total_s: float = 0.0
    tool_s: float = 0.0

    @property
    def streams(self) -> "list[TokenStream | PartialTrajectory]":
        """Every token stream in the order in which they were sampled. The last one is this."""
        return [*self.earlier_streams, self]
