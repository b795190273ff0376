"""Rollout requests, and the frames that answer them."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec

from rollout_sidecar.protocol.base import Message, NonNegative, Positive, PositiveSeconds, Wire
from rollout_sidecar.protocol.trajectories import PartialTrajectory, Trajectory

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may have written a message of a prompt."""

KWARGS_KINDS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""What a task may hand to a tool, by the method that gets it."""


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
    tools_kwargs: dict[str, Any] = {}
    """Per tool: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs, each an object. Null is absent, at
    every level."""
    interaction: str = ""
    """Name of the interaction that answers when the policy calls no tool; "" for none."""
    interaction_kwargs: dict[str, Any] = {}
    """What its start_interaction is given."""

    def __post_init__(self) -> None:
        """ValueError names the message or the tool; of a request it becomes a msgspec.ValidationError."""
        for i, message in enumerate(self.messages):
            if problem := role_problem(message.get("role")):
                raise ValueError(f"messages[{i}].role {problem}")
        for name, kwargs in self.tools_kwargs.items():
            if problem := kwargs_problem(kwargs):
                raise ValueError(f"tools_kwargs.{name}{problem}")


def role_problem(role: Any) -> str:
    """Why this can be no message's role; "" if it can."""
    if role in ROLES:
        return ""
    near = get_close_matches(str(role), ROLES, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"is {role!r:.60}, expected one of {', '.join(ROLES)}{hint}"


def kwargs_problem(kwargs: Any) -> str:
    """What is wrong with what a task hands to one tool, as the end of a sentence that begins with its place."""
    if kwargs is None:
        return ""
    if not isinstance(kwargs, Mapping):
        return f" must be an object, got {kwargs!r:.60}"
    for kind, given in kwargs.items():
        if kind not in KWARGS_KINDS:
            near = get_close_matches(str(kind), KWARGS_KINDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(KWARGS_KINDS)}"
            return f" has the unknown key {kind!r:.60}; {hint}"
        if given is None:
            continue
        if not isinstance(given, Mapping):
            return f".{kind} must be an object, got {given!r:.60}"
        for key in given:
            if not isinstance(key, str):
                return f".{kind} has the key {key!r:.60}, which is no text"
    return ""


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
    resume: PartialTrajectory | None = None
    """Where another sidecar left off: the trajectory goes on from there."""


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
    progress: bool = False
    """Send a ProgressFrame after every turn from which the trajectory could be resumed elsewhere."""


class TrajectoryFrame(Wire, frozen=True, kw_only=True, tag="trajectory"):
    """Frame `index` of a rollout stream."""

    index: int
    trajectory: Trajectory


class ProgressFrame(Wire, frozen=True, kw_only=True, tag="progress"):
    """A turn has ended, and its trajectory goes on. These frames have no number: after a lost connection those of
    trajectories still under way are sent again."""

    task_index: int
    sample_index: int
    known_turns: NonNegative = 0
    """The lists in `partial` hold only what came after this many turns; 0: everything."""
    partial: PartialTrajectory

    def extend(self, known: PartialTrajectory | None) -> PartialTrajectory | None:
        """The trajectory with what this frame says, from what was known before of the same run of it."""
        new = self.partial
        if known is not None and self.known_turns + len(new.turns) <= len(known.turns):
            return known  # sent again
        if not self.known_turns:
            return new
        if known is None or len(known.turns) != self.known_turns:
            return known
        return msgspec.structs.replace(
            new,
            turns=known.turns + new.turns,
            token_ids=known.token_ids + new.token_ids,
            loss_mask=known.loss_mask + new.loss_mask,
            rollout_log_probs=known.rollout_log_probs + new.rollout_log_probs,
            version_spans=known.version_spans + new.version_spans,
            earlier_streams=known.earlier_streams,
            messages=known.messages + new.messages,
        )


class EndFrame(Wire, frozen=True, kw_only=True, tag="end"):
    """Last frame of a stream: how many trajectory frames it held, and whether the request was aborted."""

    index: int
    trajectories: int
    aborted: bool = False


Frame = TrajectoryFrame | ProgressFrame | EndFrame
