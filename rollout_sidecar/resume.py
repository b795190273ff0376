"""How a trajectory goes on in another sidecar: what is told of it after every turn, and how it is taken up again.

A trajectory can go on elsewhere as long as everything that it depends on is in its messages and tokens. A tool or an
interaction that keeps state breaks that with its first use, unless it is declared `stateless`: from then on nothing is
told, and whoever asks for the trajectory again gets it from the last turn before, when that state was still fresh.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollout_sidecar.conversation import Conversation, first_difference
from rollout_sidecar.errors import RolloutError
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import (
    Message,
    PartialTrajectory,
    ProgressFrame,
    RolloutSpec,
    Task,
    ToolCallRecord,
    Turn,
    VersionSpan,
)

if TYPE_CHECKING:
    from rollout_sidecar.agent import Agent

_log = logging.getLogger(__name__)

NOT_RUN = frozenset({"parse_error", "unknown_tool", "bad_arguments", "not_executed", "unavailable"})
"""Statuses of calls that never reached a tool."""

SendProgress = Callable[[ProgressFrame], None]


class Progress:
    """Tells of one trajectory after each turn what is new since the turn before."""

    def __init__(
        self,
        spec: RolloutSpec,
        send: SendProgress,
        tools: Mapping[str, object],
        interaction: object | None,
    ):
        self._spec = spec
        self._send = send
        self._tools = tools
        self._interaction = interaction
        self._turns = self._tokens = self._spans = self._messages = self._streams = 0

    @classmethod
    def of(
        cls, agent: "Agent", task: Task, spec: RolloutSpec, send: SendProgress | None
    ) -> "Progress | None":
        """None if nobody wants to be told."""
        if send is None:
            return None
        return cls(spec, send, agent.tools, agent.interactions.get(task.interaction))

    def tell(
        self,
        conversation: Conversation,
        turns: Sequence[Turn],
        invalid_turns: int,
        total_s: float,
        tool_s: float,
    ) -> None:
        """The last of `turns` has ended, and the next one begins."""
        if depends_on_state(turns, self._tools, self._interaction):
            return
        if (
            len(conversation.earlier_streams) != self._streams
        ):  # a new context began: all is told again
            self._turns = self._tokens = self._spans = self._messages = 0
        known_turns, tokens, spans = self._turns, self._tokens, self._spans
        partial = PartialTrajectory(
            seed=self._spec.seed,
            turns=list(turns[known_turns:]),
            token_ids=conversation.token_ids[tokens:],
            prompt_tokens=conversation.prompt_tokens,
            loss_mask=conversation.loss_mask[tokens:],
            rollout_log_probs=conversation.rollout_log_probs[tokens:],
            version_spans=conversation.version_spans[spans:],
            earlier_streams=[] if known_turns else list(conversation.earlier_streams),
            messages=conversation.messages[self._messages :],
            prompt_messages=conversation.prompt_messages,
            invalid_turns=invalid_turns,
            total_s=total_s,
            tool_s=tool_s,
        )
        self._turns, self._tokens = len(turns), len(conversation.token_ids)
        self._spans, self._messages = len(conversation.version_spans), len(conversation.messages)
        self._streams = len(conversation.earlier_streams)
        self._send(
            ProgressFrame(
                task_index=self._spec.task_index,
                sample_index=self._spec.sample_index,
                known_turns=known_turns,
                partial=partial,
            )
        )


def depends_on_state(
    turns: Sequence[Turn], tools: Mapping[str, object], interaction: object | None
) -> bool:
    """Whether what happened so far left state somewhere that is not in the messages."""
    return any(
        (turn.reply is not None and not is_stateless(interaction))
        or any(_left_state(call, tools) for call in turn.calls)
        for turn in turns
    )


def is_stateless(part: object | None) -> bool:
    """What a tool or an interaction declares: `stateless` in its config, else on its class. Default: it keeps state."""
    config = getattr(part, "config", None)
    declared = config.get("stateless") if isinstance(config, Mapping) else None
    return bool(getattr(part, "stateless", False) if declared is None else declared)


def _left_state(call: ToolCallRecord, tools: Mapping[str, object]) -> bool:
    return call.status not in NOT_RUN and not is_stateless(tools.get(call.name))


def restored(
    begin: Callable[[Sequence[Message]], Conversation],
    partial: PartialTrajectory,
    metrics: Metrics,
    name: str,
) -> Conversation | None:
    """The conversation as it was elsewhere; None, logged and counted, where it cannot go on here."""
    try:
        return rewritten(begin, partial)
    except (ValueError, RolloutError) as error:
        metrics.count("resumes_refused_total")
        _log.warning("%s starts from its prompt again: %s", name, error)
        return None


def rewritten(
    begin: Callable[[Sequence[Message]], Conversation], partial: PartialTrajectory
) -> Conversation:
    """The conversation as it was elsewhere, its sampled ids as they were sampled.

    It is written anew, message by message, and compared: ValueError if this sidecar writes other tokens. That is so if
    its chat template, its tools or its context policy differ.

    Args:
        begin: makes a conversation from the messages of a prompt.
    """
    messages = partial.messages[partial.prompt_messages :]
    conversation = begin(partial.messages[: partial.prompt_messages])
    at = 0
    for number, turn in enumerate(partial.turns):
        if at >= len(messages) or messages[at].get("role") != "assistant":
            raise ValueError(f"turn {number} of the trajectory to resume has no assistant message")
        ids, log_probs, spans = _sampled(partial, turn)
        conversation.append_completion(ids, log_probs, turn.policy_version, spans)
        end = at + 1
        while end < len(messages) and messages[end].get("role") != "assistant":
            end += 1
        added = messages[at + 1 : end]
        conversation.append_observation(added, conversation.render_observation(added))
        at = end
    _compare(conversation, partial)
    return conversation


def _sampled(
    partial: PartialTrajectory, turn: Turn
) -> tuple[list[int], list[float], list[VersionSpan]]:
    """Ids, log-probs and versions of one turn. ValueError if it lies outside its stream."""
    streams = partial.streams
    if not 0 <= turn.stream < len(streams):
        raise ValueError(f"a turn is in stream {turn.stream}, and there are {len(streams)}")
    stream, start, end = streams[turn.stream], turn.start, turn.end
    if not 0 <= start < end <= len(stream.token_ids) == len(stream.rollout_log_probs):
        raise ValueError(f"a turn is tokens {start} to {end} of {len(stream.token_ids)}")
    spans = [
        VersionSpan(start=s.start - start, end=s.end - start, policy_version=s.policy_version)
        for s in stream.version_spans
        if start <= s.start and s.end <= end
    ]
    return stream.token_ids[start:end], stream.rollout_log_probs[start:end], spans


def _compare(conversation: Conversation, partial: PartialTrajectory) -> None:
    here = [s.token_ids for s in conversation.earlier_streams] + [conversation.token_ids]
    there = [stream.token_ids for stream in partial.streams]
    if len(here) != len(there):
        raise ValueError(f"it has {len(there)} token streams, and {len(here)} here")
    for ours, theirs in zip(here, there, strict=True):
        if ours != theirs:
            at = first_difference(ours, theirs)
            raise ValueError(
                f"its token {at} is {_at(theirs, at)}, and {_at(ours, at)} as this sidecar writes it"
            )
    if conversation.loss_mask != partial.loss_mask:
        raise ValueError("its loss mask is another one than this sidecar's")


def _at(ids: Sequence[int], index: int) -> object:
    return ids[index] if index < len(ids) else "missing"
