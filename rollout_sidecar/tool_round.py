"""What happens between two turns: the calls of one turn are run, and what comes back is fitted into the context."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from rollout_sidecar.conversation import Conversation
from rollout_sidecar.errors import EngineError, boundary
from rollout_sidecar.formats.base import ParsedCall
from rollout_sidecar.protocol import CallStatus, Message, ToolCallRecord
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tool_session import ToolSession
from rollout_sidecar.truncation import FittedResult, Keep, Truncation, cut_characters, fit

INVALID: frozenset[CallStatus] = frozenset({"parse_error", "unknown_tool", "bad_arguments"})
"""Calls that could not be executed, whatever the limits."""


class ToolRound:
    """The calls of one turn."""

    def __init__(self, session: ToolSession, calls: Sequence[ParsedCall], max_parallel_calls: int):
        self.seconds = 0.0
        """How long they took, all together."""
        self._session = session
        self._calls = calls
        self._limit = max_parallel_calls
        self._records: list[ToolCallRecord | None] = [None] * len(calls)

    async def run(self) -> None:
        """Runs all at once; those beyond the limit are answered without being run."""
        started = time.monotonic()
        try:
            if len(self._calls) == 1:
                await self._run(0)
            else:
                await asyncio.gather(*map(self._run, range(len(self._calls))))
        finally:
            self.seconds = time.monotonic() - started

    def end(self) -> list[ToolCallRecord]:
        """One record a call, in the order of the calls. Those that were cut off by a deadline are timeouts."""
        return [
            record or self._session.record(call, "timeout", "")
            for call, record in zip(self._calls, self._records, strict=True)
        ]

    async def _run(self, i: int) -> None:
        if i < self._limit:
            self._records[i] = await self._session.call(self._calls[i])
        else:
            text = f"not executed: limit of {self._limit} calls per turn"
            self._records[i] = self._session.record(self._calls[i], "not_executed", text)


def tool_messages(records: Sequence[ToolCallRecord], texts: Sequence[str]) -> list[Message]:
    """What the policy is told, one message a call."""
    return [
        {"role": "tool", "content": text, **({"name": record.name} if record.name else {})}
        for record, text in zip(records, texts, strict=True)
    ]


def with_results(
    records: Sequence[ToolCallRecord], results: Sequence[FittedResult] | None
) -> list[ToolCallRecord]:
    """The records with what the policy was told; None if it was told nothing, for want of room."""
    replace = msgspec.structs.replace
    if results is None:
        return [replace(record, result="", truncated=True) for record in records]
    return [
        replace(
            record,
            result=result.text,
            truncated=result.truncated or result.text != record.result,
            result_tokens=result.tokens,
        )
        for record, result in zip(records, results, strict=True)
    ]


def observe(
    tokenizer: ChatTokenizer,
    conversation: Conversation,
    texts: Sequence[str],
    messages: Callable[[Sequence[str]], list[Message]],
    *,
    max_tokens_per_text: int,
    max_context_tokens: int,
    truncation: Truncation,
    keep: Keep,
) -> list[FittedResult] | None:
    """Appends messages to the conversation, their texts cut to fit. None, and nothing appended, if they do not fit even
    so. Raises what the conversation raises where its template cannot append, and EngineError where it fails.
    """
    texts = [cut_characters(text, truncation.max_characters, keep) for text in texts]
    with boundary(EngineError, "an observation could not be rendered"):
        fitted = fit(
            tokenizer,
            texts,
            max_tokens_per_text,
            max_context_tokens,
            lambda texts: conversation.render_observation(messages(texts)),
            size=conversation.context_after,
            keep=keep,
        )
        if fitted is None:
            return None
        results, ids = fitted
        conversation.append_observation(messages([result.text for result in results]), ids)
    return results
