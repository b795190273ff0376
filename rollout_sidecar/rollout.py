"""The bounded multi-turn loop of one trajectory.

Render the prompt once; then for each turn: generate ids, append exactly those ids, parse the calls in that turn's text,
run the tools, append their rendered results with loss mask 0; until an answer or a limit. A turn without a call goes to
the task's interaction, if it has one: its reply is appended with loss mask 0 too, and the loop goes on until it has no
more to say. Then tool rewards, the reward, and release. Whatever goes wrong becomes the trajectory's status, with the
tokens sampled so far.

Differs from verl's ToolAgentLoop: every attempt at a call is answered (bad JSON, unknown tool, bad arguments, excess
calls), a tool instance lives as long as the trajectory unless the profile says otherwise, results are cut in tokens, a
result that fits exactly is kept, prompts are never cut, the last allowed turn's answer is still judged by the
interaction, and interactions are always finalized.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rollout_sidecar.conversation import Conversation
from rollout_sidecar.eager import start_task
from rollout_sidecar.engines.base import GenerateRequest, GenerateResult
from rollout_sidecar.engines.check import check_result
from rollout_sidecar.errors import (
    ContextRewrittenError,
    DeadlineError,
    EngineError,
    InteractionError,
    RolloutError,
    ToolError,
    boundary,
    describe,
)
from rollout_sidecar.formats.base import ParsedCall
from rollout_sidecar.interactions.session import InteractionSession
from rollout_sidecar.protocol import (
    Message,
    RolloutRequest,
    RolloutSpec,
    Status,
    Task,
    Trajectory,
    Turn,
    derive_seed,
)
from rollout_sidecar.resume import Progress, SendProgress, restored
from rollout_sidecar.scoring import Scored
from rollout_sidecar.tool_round import INVALID, ToolRound, observe, tool_messages, with_results
from rollout_sidecar.tool_session import ToolSession
from rollout_sidecar.tools.base import BaseTool

if TYPE_CHECKING:
    from rollout_sidecar.agent import Agent

_log = logging.getLogger(__name__)


class Rollout:
    """One trajectory in the making: `play`, `score`, `close`, then `trajectory`."""

    def __init__(
        self,
        agent: "Agent",
        task: Task,
        spec: RolloutSpec,
        request: RolloutRequest,
        ordinal: int,
        on_progress: SendProgress | None = None,
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
        self._interaction: InteractionSession | None = None
        self._turns: list[Turn] = []
        self._invalid_turns = 0
        self._scored = Scored()
        self._tool_s = 0.0
        self._started = time.monotonic()
        self._progress = Progress.of(agent, task, spec, on_progress)

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
        except ContextRewrittenError as error:
            self.status, self.error = "context_rewritten", describe(error)
        except EngineError as error:
            self.status, self.error = "engine_error", describe(error)
        except InteractionError as error:
            self.status, self.error = "interaction_error", describe(error)
        except (ToolError, DeadlineError) as error:
            self.status, self.error = "tool_error", describe(error)

    async def _open(self) -> tuple[ToolSession, Conversation]:
        agent, task, timeout_s = self._agent, self._task, self._limits.tool_timeout_s
        tools = self._offered_tools()
        self._session = session = ToolSession(
            tools,
            self.trajectory_id,
            task.tools_kwargs,
            timeout_s=timeout_s,
            metrics=agent.metrics,
            profile=agent.profile,
            gates=agent.gates,
            leases=agent.leases,
        )
        session.agent_data.interaction_kwargs = task.interaction_kwargs
        if task.interaction:
            self._interaction = InteractionSession.of(
                agent.interactions,
                task.interaction,
                self.trajectory_id,
                task.interaction_kwargs,
                timeout_s=timeout_s,
                metrics=agent.metrics,
                leases=agent.leases,
            )
        greetings = await session.open()
        if self._interaction is not None:
            await self._interaction.start()
        messages = [*task.messages, *({"role": "tool", "content": text} for text in greetings)]
        schemas = [tool.tool_schema for tool in tools.values()]
        begin = partial(agent.converse, schemas=schemas)
        with boundary(EngineError, "the prompt could not be rendered"):
            self._conversation = self._resumed(begin) or begin(messages)
        return session, self._conversation

    def _resumed(self, begin: Callable[[Sequence[Message]], Conversation]) -> Conversation | None:
        """The conversation that another sidecar began; None if there is none, or if it cannot go on here."""
        before = self._spec.resume
        conversation = before and restored(begin, before, self._agent.metrics, self.trajectory_id)
        if not before or not conversation:
            return None
        self._turns, self._invalid_turns = list(before.turns), before.invalid_turns
        self._tool_s, self._started = before.tool_s, self._started - before.total_s
        return conversation

    def _offered_tools(self) -> Mapping[str, BaseTool]:
        tools, task = self._agent.tools, self._task
        names = list(tools) if task.tools is None else task.tools
        # A row of a table has a key for every tool of any row, and None where it is not its own.
        of_row = [name for name, kwargs in task.tools_kwargs.items() if kwargs is not None]
        if task.tools is None and of_row and self._agent.profile.offered_tools == "row":
            names = of_row
        elif task.tools != []:
            self._agent.warn_of_unknown_tools(of_row)
        for name in names:
            if name not in tools:
                raise ToolError(
                    f"the task offers the tool {name!r}, which this sidecar lacks; it has {list(tools)}"
                )
        return {name: tools[name] for name in names}

    def _reject_prompt(self, conversation: Conversation) -> Status | None:
        tokens, limit = conversation.prompt_tokens, self._limits.max_prompt_tokens
        if self._turns:  # it was let in elsewhere
            return None
        if tokens > limit:
            problem = f"exceed max_prompt_tokens={limit}"
        elif self._room(conversation) <= 0:
            problem = f"leave no room in the {self._max_context_tokens} of a trajectory"
        else:
            return None
        self.error = f"the prompt's {tokens} tokens {problem}; prompts are never cut"
        return "prompt_too_long"

    @property
    def _max_context_tokens(self) -> int:
        return min(self._limits.max_trajectory_tokens, self._agent.engine.max_model_tokens)

    def _room(self, conversation: Conversation) -> int:
        return self._max_context_tokens - len(conversation.token_ids)

    async def _play_turns(self, session: ToolSession, conversation: Conversation) -> Status:
        for turn in range(len(self._turns), self._limits.max_turns):
            room = self._room(conversation)
            if room <= 0:
                return "max_tokens"
            result, text = await self._generate(turn, conversation, room)
            if result.finish == "aborted":
                return "aborted"
            if result.finish == "length":
                return "max_tokens"
            last = turn + 1 == self._limits.max_turns
            calls = conversation.parse_calls(text)
            if calls:
                status = await self._use_tools(session, conversation, calls, last=last)
            else:
                status = await self._ask(conversation, last=last)
            if status is not None:
                return status
            if self._progress:
                total_s = time.monotonic() - self._started
                self._progress.tell(
                    conversation, self._turns, self._invalid_turns, total_s, self._tool_s
                )
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
            stop_ids=conversation.stop_ids,
            seed=derive_seed(self._spec.seed, turn),
        )
        started = time.monotonic()
        with boundary(EngineError):
            result = await self._agent.engine.generate(request)
            check_result(request, result, self._agent.engine.vocab_size)
        generate_s = time.monotonic() - started
        if not result.token_ids:
            return result, ""
        start = len(conversation.token_ids)
        text = conversation.append_completion(
            result.token_ids, result.log_probs, result.policy_version, result.version_spans
        )
        self._turns.append(
            Turn(
                start=start,
                end=start + len(result.token_ids),
                policy_version=result.policy_version,
                finish=result.finish,
                cached_tokens=result.cached_tokens,
                generate_s=generate_s,
                stream=len(conversation.earlier_streams),
            )
        )
        return result, text

    # --- between two turns: each returns how the trajectory ends, or None if it goes on ---

    async def _use_tools(
        self,
        session: ToolSession,
        conversation: Conversation,
        calls: list[ParsedCall],
        *,
        last: bool,
    ) -> Status | None:
        if last:
            self._set(calls=[session.record(call, "not_executed", "") for call in calls])
            return "max_turns"
        self._show(session, conversation)
        tool_round = ToolRound(session, calls, self._limits.max_parallel_calls)
        try:
            await tool_round.run()
        finally:  # also what the deadline cuts off is recorded
            self._tool_s += tool_round.seconds
            records = tool_round.end()
            self._set(calls=records)
        executable = any(record.status not in INVALID for record in records)
        self._invalid_turns = 0 if executable else self._invalid_turns + 1
        if self._invalid_turns == self._limits.max_invalid_turns:
            return "invalid_calls"
        results = self._observe(
            conversation,
            [record.result for record in records],
            lambda texts: tool_messages(records, texts),
        )
        self._set(calls=with_results(records, results))
        return "max_tokens" if results is None else None

    def _show(self, session: ToolSession, conversation: Conversation) -> None:
        """Brings up to date what tools of profiles B and C see of the trajectory."""
        data = session.agent_data
        data.messages = [dict(message) for message in conversation.messages]
        data.assistant_turns = len(self._turns)
        before = self._turns[:-1]
        data.user_turns = sum(bool(turn.calls) or turn.reply is not None for turn in before)
        data.tool_rewards = [call.reward for turn in before for call in turn.calls]
        data.turn_scores = [turn.reply.score for turn in before if turn.reply is not None]

    async def _ask(self, conversation: Conversation, *, last: bool) -> Status | None:
        """What the interaction makes of a turn without a call."""
        if self._interaction is None:
            return "completed"
        reply = await self._interaction.reply(conversation.messages)
        self._set(reply=reply)
        self._invalid_turns = 0
        if last and not reply.done:
            return "max_turns"
        if reply.done and not (self._agent.profile.last_user_message and reply.text):
            return "completed"
        results = self._observe(
            conversation, [reply.text], lambda texts: [{"role": "user", "content": texts[0]}]
        )
        if results is not None:
            self._set(reply=msgspec.structs.replace(reply, text=results[0].text))
        if reply.done:
            return "completed"
        return "max_tokens" if results is None else None

    def _observe(self, conversation: Conversation, texts: list[str], messages: Any) -> Any:
        return observe(
            self._agent.tokenizer,
            conversation,
            texts,
            messages,
            max_tokens_per_text=self._limits.max_tool_result_tokens,
            max_context_tokens=self._max_context_tokens,
            truncation=self._agent.truncation,
            keep=self._agent.truncation.keep(self._agent.profile),
        )

    def _set(self, **fields: Any) -> None:
        """Changes the record of the last turn."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], **fields)

    # --- the end ---

    async def score(self) -> None:
        """Sets the reward. Without a sampled token there is nothing to score."""
        if self._conversation is None or self._session is None or not self._turns:
            return
        conversation = self._conversation
        response_tokens = len(conversation.token_ids) - conversation.prompt_tokens
        final_score = None if self._interaction is None else await self._interaction.score()
        self._scored = await self._agent.scorer.score(
            self._task,
            policy_text=conversation.model_text(),
            all_text=conversation.full_text() if self._agent.scorer.text == "all" else "",
            turns=self._turns,
            tool_rewards=await self._session.rewards(),
            weights=self._weights,
            response_tokens=response_tokens,
            max_response_tokens=response_tokens + self._room(conversation),
            timeout_s=self._limits.trajectory_timeout_s,
            metrics=self._agent.metrics,
        )
        if final_score is not None and self._scored.scored:
            self._scored.metrics["interaction_score"] = final_score
        self.error = self.error or self._scored.error

    async def close(self) -> None:
        """Releases tools and prefix exactly once; goes on in the background when the rollout is cancelled."""
        task = start_task(self._release())
        self._agent.closing.add(task)
        task.add_done_callback(self._agent.closing.discard)
        await asyncio.shield(task)

    async def _release(self) -> None:
        closing = [each.close() for each in (self._session, self._interaction) if each is not None]
        await asyncio.gather(*closing)
        try:
            with boundary(EngineError):
                await self._agent.engine.release(self.trajectory_id)
        except RolloutError as error:
            _log.warning("the engine could not release %s: %s", self.trajectory_id, error)

    def trajectory(self) -> Trajectory:
        """The record, counted."""
        conversation = self._conversation
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
            messages=self._task.messages,
        )
        if conversation is not None:
            trajectory = msgspec.structs.replace(trajectory, **conversation.record())
        return trajectory
