"""The bounded multi-turn loop of one trajectory.

Render the prompt once; then for each turn: generate ids, append exactly those ids, parse the calls in that turn's text,
run the tools, append their rendered results with loss mask 0; until an answer or a limit. Then tool rewards, the
reward, and release. Whatever goes wrong becomes the trajectory's status, with the tokens sampled so far.

Differs from verl's ToolAgentLoop: every attempt at a call is answered (bad JSON, unknown tool, bad arguments, excess
calls), a tool instance lives as long as the trajectory, results are cut in tokens, a result that fits exactly is kept,
and prompts are never cut.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rollout_sidecar.conversation import Conversation
from rollout_sidecar.engines.base import Engine, GenerateRequest, GenerateResult
from rollout_sidecar.errors import (
    DeadlineError,
    EngineError,
    RolloutError,
    ToolError,
    boundary,
    describe,
)
from rollout_sidecar.formats.base import ParsedCall, ToolFormat
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import (
    CallStatus,
    Message,
    RolloutRequest,
    RolloutSpec,
    Status,
    Task,
    ToolCallRecord,
    Trajectory,
    Turn,
    derive_seed,
)
from rollout_sidecar.scoring import Scored, Scorer
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tool_session import ToolSession
from rollout_sidecar.tools.base import BaseTool
from rollout_sidecar.truncation import fit

INVALID: frozenset[CallStatus] = frozenset({"parse_error", "unknown_tool", "bad_arguments"})
"""Calls that could not be executed, whatever the limits."""

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Agent:
    """What all rollouts share: the engine, the text side of the model, the tools, and how rewards are made."""

    engine: Engine
    tokenizer: ChatTokenizer
    tool_format: ToolFormat
    tools: Mapping[str, BaseTool] = field(default_factory=dict)
    scorer: Scorer = field(default_factory=Scorer)
    metrics: Metrics = field(default_factory=Metrics)
    closing: set[asyncio.Task] = field(default_factory=set)
    """Releases under way. They go on when their rollout is cancelled; wait for them before the loop ends."""


async def run_rollout(
    agent: Agent, task: Task, spec: RolloutSpec, request: RolloutRequest, ordinal: int = 0
) -> Trajectory:
    """Plays one trajectory to its end. Never raises, except CancelledError; then tools are released all the same.

    Args:
        ordinal: position of the trajectory in its request.
    """
    rollout = _Rollout(agent, task, spec, request, ordinal)
    try:
        try:
            await rollout.play()
            await rollout.score()
        finally:
            await rollout.close()
    except Exception as error:  # a fault of ours: the other trajectories must not pay for it
        _log.exception("rollout %s failed", rollout.trajectory_id)
        rollout.status, rollout.error = "engine_error", f"internal error: {error!r}"
    return rollout.trajectory()


class _Rollout:
    """One trajectory in the making."""

    def __init__(
        self, agent: Agent, task: Task, spec: RolloutSpec, request: RolloutRequest, ordinal: int
    ):
        self.trajectory_id = f"{request.request_id}:{ordinal}"
        self.status: Status = "completed"
        self.error = ""
        self._agent = agent
        self._task = task
        self._spec = spec
        self._sampling = request.sampling
        self._limits = request.limits
        self._weights = request.reward_weights
        self._ordinal = ordinal
        self._conversation: Conversation | None = None
        self._session: ToolSession | None = None
        self._turns: list[Turn] = []
        self._scored = Scored()
        self._tool_s = 0.0
        self._started = time.monotonic()

    # --- the loop ---

    async def play(self) -> None:
        """Sets status and error; leaves everything sampled in the conversation."""
        deadline_s = self._limits.trajectory_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                session, conversation = await self._open()
                self.status = self._reject_prompt(conversation) or await self._play_turns(
                    session, conversation
                )
        except TimeoutError:
            self.status, self.error = "timeout", f"not finished within {deadline_s:g} s"
        except EngineError as error:
            self.status, self.error = "engine_error", describe(error)
        except (ToolError, DeadlineError) as error:
            self.status, self.error = "tool_error", describe(error)

    async def _open(self) -> tuple[ToolSession, Conversation]:
        agent, task = self._agent, self._task
        names = list(agent.tools) if task.tools is None else task.tools
        for name in names:
            if name not in agent.tools:
                raise ToolError(
                    f"the task offers the tool {name!r}, which this sidecar lacks;"
                    f" it has {list(agent.tools)}"
                )
        tools = {name: agent.tools[name] for name in names}
        self._session = ToolSession(
            tools,
            self.trajectory_id,
            task.tools_kwargs,
            timeout_s=self._limits.tool_timeout_s,
            metrics=agent.metrics,
        )
        greetings = await self._session.open()
        messages = [*task.messages, *({"role": "tool", "content": text} for text in greetings)]
        schemas = [tool.tool_schema for tool in tools.values()]
        with boundary(EngineError, "the prompt could not be rendered"):
            self._conversation = Conversation(
                agent.tokenizer, agent.tool_format, messages, schemas or None
            )
        return self._session, self._conversation

    def _reject_prompt(self, conversation: Conversation) -> Status | None:
        tokens, limit = conversation.prompt_tokens, self._limits.max_prompt_tokens
        if tokens > limit:
            problem = f"exceed max_prompt_tokens={limit}"
        elif (room := self._room(conversation)) <= 0:
            problem = f"leave no room in the {tokens + room} of a trajectory"
        else:
            return None
        self.error = f"the prompt's {tokens} tokens {problem}; prompts are never cut"
        return "prompt_too_long"

    def _room(self, conversation: Conversation) -> int:
        limit = min(self._limits.max_trajectory_tokens, self._agent.engine.max_model_tokens)
        return limit - len(conversation.token_ids)

    async def _play_turns(self, session: ToolSession, conversation: Conversation) -> Status:
        limits = self._limits
        invalid_turns = 0
        for turn in range(limits.max_turns):
            room = self._room(conversation)
            if room <= 0:
                return "max_tokens"
            result, text = await self._generate(turn, conversation, room)
            if result.finish == "aborted":
                return "aborted"
            if result.finish == "length":
                return "max_tokens"
            calls = conversation.parse_calls(text)
            if not calls:
                return "completed"
            if turn + 1 == limits.max_turns:
                self._set_calls([session.record(call, "not_executed", "") for call in calls])
                return "max_turns"
            records = await self._run_calls(session, calls)
            executable = any(record.status not in INVALID for record in records)
            invalid_turns = 0 if executable else invalid_turns + 1
            if invalid_turns == limits.max_invalid_turns:
                return "invalid_calls"
            if not self._observe(conversation, records):
                return "max_tokens"
        raise AssertionError("the last turn always returns")

    async def _generate(
        self, turn: int, conversation: Conversation, room: int
    ) -> tuple[GenerateResult, str]:
        """Samples one turn and appends exactly what was sampled."""
        request = GenerateRequest(
            trajectory_id=self.trajectory_id,
            ordinal=self._ordinal,
            token_ids=list(conversation.token_ids),
            max_tokens=min(self._limits.max_tokens_per_turn, room),
            sampling=self._sampling,
            stop_ids=self._agent.tokenizer.stop_ids,
            seed=derive_seed(self._spec.seed, turn),
        )
        started = time.monotonic()
        with boundary(EngineError):
            result = await self._agent.engine.generate(request)
            _check_result(request, result, self._agent.engine.vocab_size)
        if not result.token_ids:
            return result, ""
        start = len(conversation.token_ids)
        text = conversation.append_completion(
            result.token_ids, result.log_probs, result.policy_version
        )
        self._turns.append(
            Turn(
                start=start,
                end=start + len(result.token_ids),
                policy_version=result.policy_version,
                finish=result.finish,
                cached_tokens=result.cached_tokens,
                generate_s=time.monotonic() - started,
            )
        )
        return result, text

    # --- tool calls ---

    async def _run_calls(
        self, session: ToolSession, calls: Sequence[ParsedCall]
    ) -> list[ToolCallRecord]:
        """All calls of one turn at once, records in the order of the calls; also if the deadline cuts them off."""
        limit = self._limits.max_parallel_calls
        records: list[ToolCallRecord | None] = [None] * len(calls)

        async def run(i: int) -> None:
            if i < limit:
                records[i] = await session.call(calls[i])
            else:
                text = f"not executed: limit of {limit} calls per turn"
                records[i] = session.record(calls[i], "not_executed", text)

        started = time.monotonic()
        try:
            await asyncio.gather(*map(run, range(len(calls))))
        finally:
            self._tool_s += time.monotonic() - started
            done = [
                record or session.record(call, "timeout", "")
                for call, record in zip(calls, records, strict=True)
            ]
            self._set_calls(done)
        return done

    def _set_calls(self, records: list[ToolCallRecord]) -> None:
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], calls=records)

    def _observe(self, conversation: Conversation, records: list[ToolCallRecord]) -> bool:
        """Appends the tool messages, cut to fit. False, and nothing appended, if they do not fit even so."""

        def messages(texts: Sequence[str]) -> list[Message]:
            return [_tool_message(*pair) for pair in zip(records, texts, strict=True)]

        fitted = fit(
            self._agent.tokenizer,
            [record.result for record in records],
            self._limits.max_tool_result_tokens,
            self._room(conversation),
            lambda texts: conversation.render_observation(messages(texts)),
        )
        if fitted is None:
            replace = msgspec.structs.replace
            self._set_calls([replace(record, result="", truncated=True) for record in records])
            return False
        results, ids = fitted
        conversation.append_observation(messages([result.text for result in results]), ids)
        self._set_calls(
            [
                msgspec.structs.replace(
                    record,
                    result=result.text,
                    truncated=result.truncated,
                    result_tokens=result.tokens,
                )
                for record, result in zip(records, results, strict=True)
            ]
        )
        return True

    # --- the end ---

    async def score(self) -> None:
        """Sets the reward. Without a sampled token there is nothing to score."""
        if self._conversation is None or self._session is None or not self._turns:
            return
        conversation = self._conversation
        response_tokens = len(conversation.token_ids) - conversation.prompt_tokens
        self._scored = await self._agent.scorer.score(
            self._task,
            policy_text=conversation.model_text(),
            all_text=conversation.full_text(),
            turns=self._turns,
            tool_rewards=await self._session.rewards(),
            weights=self._weights,
            response_tokens=response_tokens,
            max_response_tokens=response_tokens + self._room(conversation),
            timeout_s=self._limits.trajectory_timeout_s,
            metrics=self._agent.metrics,
        )
        self.error = self.error or self._scored.error

    async def close(self) -> None:
        """Releases tools and prefix exactly once; goes on in the background when the rollout is cancelled."""
        task = asyncio.ensure_future(self._release())
        self._agent.closing.add(task)
        task.add_done_callback(self._agent.closing.discard)
        await asyncio.shield(task)

    async def _release(self) -> None:
        if self._session is not None:
            await self._session.close()
        try:
            with boundary(EngineError):
                await self._agent.engine.release(self.trajectory_id)
        except RolloutError as error:
            _log.warning("the engine could not release %s: %s", self.trajectory_id, error)

    def trajectory(self) -> Trajectory:
        """The record, counted."""
        conversation = self._conversation
        self._count(conversation)
        trajectory = Trajectory(
            task_index=self._spec.task_index,
            sample_index=self._spec.sample_index,
            task_id=self._task.task_id,
            data_source=self._task.data_source,
            seed=self._spec.seed,
            status=self.status,
            error=self.error,
            turns=self._turns,
            scored=self._scored.scored,
            reward=sum(self._scored.terms.values(), 0.0),
            reward_terms=self._scored.terms,
            metrics=self._scored.metrics,
            total_s=time.monotonic() - self._started,
            tool_s=self._tool_s,
        )
        if conversation is None:
            return msgspec.structs.replace(trajectory, messages=self._task.messages)
        return msgspec.structs.replace(
            trajectory,
            token_ids=conversation.token_ids,
            prompt_tokens=conversation.prompt_tokens,
            loss_mask=conversation.loss_mask,
            rollout_log_probs=conversation.rollout_log_probs,
            version_spans=conversation.version_spans,
            escaped_special_tokens=conversation.escaped_special_tokens,
            messages=conversation.messages,
        )

    def _count(self, conversation: Conversation | None) -> None:
        count = self._agent.metrics.count
        count("rollouts_total", status=self.status)
        count("turns_total", len(self._turns))
        if conversation is not None:
            sampled = sum(conversation.loss_mask)
            count("prompt_tokens_total", conversation.prompt_tokens)
            count("completion_tokens_total", sampled)
            observed = len(conversation.token_ids) - conversation.prompt_tokens - sampled
            count("observation_tokens_total", observed)


def _tool_message(record: ToolCallRecord, text: str) -> Message:
    message: Message = {"role": "tool", "content": text}
    return {**message, "name": record.name} if record.name else message


def _check_result(request: GenerateRequest, result: GenerateResult, vocab_size: int) -> None:
    """Refuses what cannot be trained on, before it reaches a trainer."""
    ids, log_probs = result.token_ids, result.log_probs
    if len(ids) != len(log_probs):
        raise EngineError(f"the engine returned {len(ids)} ids with {len(log_probs)} log-probs")
    if not ids and result.finish != "aborted":
        raise EngineError("the engine returned no token")
    if len(ids) > request.max_tokens:
        raise EngineError(f"the engine returned {len(ids)} ids, {request.max_tokens} were allowed")
    if result.finish == "stop" and ids[-1] not in request.stop_ids:
        raise EngineError(f"the engine stopped at id {ids[-1]}, which is not a stop id")
    passed = next((token_id for token_id in ids[:-1] if token_id in request.stop_ids), None)
    if passed is not None:
        raise EngineError(f"the engine went on after the stop id {passed}")
    for token_id, log_prob in zip(ids, log_probs, strict=True):
        if not 0 <= token_id < vocab_size:
            raise EngineError(f"the engine returned the id {token_id}; it has {vocab_size}")
        if not math.isfinite(log_prob):
            raise EngineError(f"the engine returned the log-prob {log_prob} for id {token_id}")
