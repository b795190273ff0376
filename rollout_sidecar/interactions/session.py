"""One trajectory's conversation with an interaction, from start to finalize. Every call has a deadline."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollout_sidecar.errors import (
    DeadlineError,
    InteractionError,
    RolloutError,
    boundary,
    safe_text,
)
from rollout_sidecar.foreign import bounded, invoke, takes_positional
from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.leases import Lease, Leases
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import InteractionReply, Message

_log = logging.getLogger(__name__)


class InteractionSession:
    """`start`, any number of `reply`s, `score`, `close`. Only the first two raise."""

    def __init__(
        self,
        interaction: BaseInteraction,
        name: str,
        instance_id: str,
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        metrics: Metrics,
        leases: Leases,
    ):
        """Nothing is called yet.

        Args:
            kwargs: given to start_interaction and generate_response. None means absent.
            timeout_s: deadline of each call.
        """
        self._interaction = interaction
        self._name = name
        self._instance_id = instance_id
        self._kwargs = {key: value for key, value in kwargs.items() if value is not None}
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._book = leases
        self._lease: Lease[str] | None = None

    @classmethod
    def of(
        cls, interactions: Mapping[str, BaseInteraction], name: str, *args: Any, **kwargs: Any
    ) -> "InteractionSession":
        """The session with the interaction of that name. InteractionError if there is none."""
        if name not in interactions:
            raise InteractionError(
                f"the task names the interaction {name!r}, which this sidecar lacks; it has"
                f" {list(interactions)}"
            )
        return cls(interactions[name], name, *args, **kwargs)

    async def start(self) -> None:
        """Begins the conversation. InteractionError if that fails."""
        interaction, name, metrics = self._interaction, self._name, self._metrics

        async def begin() -> str:
            started = await invoke(interaction.start_interaction, self._instance_id, **self._kwargs)
            return started if isinstance(started, str) else self._instance_id

        async def finalize(instance_id: str) -> None:
            await _with_or_without_id(interaction.finalize_interaction, instance_id)

        self._lease = self._book.open(
            begin(),
            finalize,
            failed=lambda error: _failed(metrics, name, "finalize_interaction", error),
            owner=self,
            otherwise=self._instance_id,  # it may have begun to keep something before it failed
        )
        await self._checked("start_interaction", self._lease.opened(self._timeout_s))

    async def reply(self, messages: Sequence[Message]) -> InteractionReply:
        """The interaction's answer to the last of the messages. InteractionError if there is none."""
        assert self._lease is not None, "start first"
        clock = asyncio.get_running_loop().time
        started = clock()
        copies = [dict(message) for message in messages]
        call = invoke(
            self._interaction.generate_response,
            self._lease.opening.result(),
            copies,
            **self._kwargs,
        )
        answer = await self._checked("generate_response", bounded(call, self._timeout_s))
        reply = await self._checked("generate_response", _read(answer, clock() - started))
        self._metrics.observe("interaction_seconds", reply.latency_s, interaction=self._name)
        return reply

    async def score(self) -> float | None:
        """What calculate_score says; None, logged and counted, where it fails or the conversation never began."""
        opening = None if self._lease is None else self._lease.opening
        if opening is None or not opening.done():
            return None
        if opening.cancelled() or opening.exception() is not None:
            return None
        method = "calculate_score"
        try:
            with boundary(InteractionError):
                call = _with_or_without_id(self._interaction.calculate_score, opening.result())
                score = float(await bounded(call, self._timeout_s) or 0.0)
                if not math.isfinite(score):
                    raise ValueError(f"it returned {score}, expected a finite number")
                return score
        except RolloutError as error:
            _failed(self._metrics, self._name, method, error)
            return None

    async def close(self) -> None:
        """Finalizes the conversation, if it was begun."""
        if self._lease is not None:
            await self._lease.end(self._timeout_s)

    async def _checked(self, method: str, call: Awaitable[Any]) -> Any:
        """What the call gives; anything that goes wrong is an InteractionError that names the method."""
        try:
            with boundary(InteractionError):
                return await call
        except DeadlineError:
            problem = f"gave no answer within {self._timeout_s:g} s"
            error = InteractionError(f"{self._what(method)} {problem}")
        except RolloutError as raised:
            error = InteractionError(f"{self._what(method)}: {raised}")
        _failed(self._metrics, self._name, method, error)
        raise error

    def _what(self, method: str) -> str:
        return f"{method} of interaction {self._name!r}"


async def _read(answer: Any, latency_s: float) -> InteractionReply:
    """The reply in what generate_response returned. ValueError or TypeError if there is none."""
    if not isinstance(answer, tuple | list) or len(answer) < 3:
        raise ValueError(f"it returned {repr(answer)[:200]}, expected (done, text, score, more)")
    done, text, score, *_ = answer
    number = 0.0 if score is None else float(score)
    if not math.isfinite(number):
        raise ValueError(f"the score of the turn is {number}, expected a finite number")
    return InteractionReply(
        text=safe_text(str(text or "")), score=number, done=bool(done), latency_s=latency_s
    )


async def _with_or_without_id(method: Callable[..., Any], instance_id: str) -> Any:
    """verl's own classes disagree on whether these methods are given the id."""
    return await invoke(method, *([instance_id] if takes_positional(method) else []))


def _failed(metrics: Metrics, name: str, method: str, error: Exception) -> None:
    metrics.count("interaction_failures_total", interaction=name, method=method)
    _log.warning("%s of interaction %r failed: %s", method, name, error)
