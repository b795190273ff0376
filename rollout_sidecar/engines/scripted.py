"""An engine that plays a script instead of a model: for tests of agents, tools and rewards, ours and users'.

The script is a list of texts, one a turn, or a function of the request and the turn. Each text is tokenised and ends
with the end-of-turn token, as if a model had sampled it. Everything is deterministic, log-probs included.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from rollout_sidecar.engines.base import (
    EMPTY,
    RELEASED,
    GenerateRequest,
    GenerateResult,
    WeightTensor,
)


class ScriptTokenizer(Protocol):
    """What the engine needs of a tokenizer; ChatTokenizer has it."""

    vocab_size: int
    end_of_turn_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids of the text."""
        ...


Script = Sequence[str] | Callable[[GenerateRequest, int], str]
"""What the policy says in each turn: texts by turn, or a function of the request and the turn's number from 0."""


def scripted_log_prob(token_id: int) -> float:
    """The log-prob that the engine reports for a token: between -1 and -1/8, exact in float32."""
    return -(1 + token_id % 8) / 8


class ScriptedEngine:
    """Plays `script`, waiting `delay_s` before each turn. `load_weights` only records the version and the names."""

    name = "scripted"

    def __init__(
        self,
        tokenizer: ScriptTokenizer,
        script: Script,
        *,
        max_model_tokens: int = 4096,
        delay_s: float = 0.0,
    ):
        self.policy_version = 0
        self.max_model_tokens = max_model_tokens
        self.vocab_size = tokenizer.vocab_size
        self.delay_s = delay_s
        self.requests: list[GenerateRequest] = []
        """Every request so far, in order."""
        self.released: list[str] = []
        """Trajectories that have ended, in order."""
        self.loaded: list[str] = []
        """Names of the tensors of the last push."""
        self.released_memory = False
        """Between `release_memory` and `resume_memory`."""
        self.fault = ""
        self.swap_s: dict[str, float] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._tokenizer = tokenizer
        self._script = script
        self._turns: dict[str, int] = {}
        self._aborts: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Ends every generation as "aborted"."""
        for event in self._aborts.values():
            event.set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The trajectory's next text, cut at max_tokens; nothing, with finish "aborted", after an abort."""
        turn = self._turns.get(request.trajectory_id, 0)
        self._turns[request.trajectory_id] = turn + 1
        self.requests.append(request)
        if await self._aborted_while_waiting(request.trajectory_id):
            return self._result([], "aborted")
        await self._open.wait()
        ids = [*self._tokenizer.encode(self._text(request, turn)), self._tokenizer.end_of_turn_id]
        finish = "stop" if len(ids) <= request.max_tokens else "length"
        return self._result(ids[: request.max_tokens], finish)

    async def abort(self, trajectory_id: str) -> None:
        """Ends the trajectory's running generation."""
        if trajectory_id in self._aborts:
            self._aborts[trajectory_id].set()

    async def release(self, trajectory_id: str) -> None:
        """Forgets the trajectory's turn."""
        if self._turns.pop(trajectory_id, None) is not None:
            self.released.append(trajectory_id)

    async def load_weights(
        self,
        tensors: Mapping[str, WeightTensor],
        policy_version: int,
        changed: frozenset[str] | None = None,
    ) -> None:
        """Records what was pushed."""
        if self.released_memory:
            raise ValueError(RELEASED)
        self.loaded = list(tensors)
        self.policy_version = policy_version
        self.fault = ""
        self._open.set()

    async def altered_tensors(self, tensors: Mapping[str, WeightTensor]) -> list[str] | None:
        """None: it keeps no weights."""
        return None

    async def release_memory(self) -> None:
        """There is no memory to give; turns wait all the same."""
        self.released_memory, self.fault = True, RELEASED
        self._open.clear()

    async def resume_memory(self) -> None:
        """Turns still wait, for weights."""
        if self.released_memory:
            self.released_memory, self.fault = False, EMPTY

    def _text(self, request: GenerateRequest, turn: int) -> str:
        if callable(self._script):
            return self._script(request, turn)
        if turn >= len(self._script):
            raise ValueError(
                f"the script has {len(self._script)} turns, and turn {turn + 1} was asked"
            )
        return self._script[turn]

    async def _aborted_while_waiting(self, trajectory_id: str) -> bool:
        if not self.delay_s:
            return False
        event = self._aborts.setdefault(trajectory_id, asyncio.Event())
        try:
            async with asyncio.timeout(self.delay_s):
                await event.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._aborts.pop(trajectory_id, None)

    def _result(
        self, ids: list[int], finish: Literal["stop", "length", "aborted"]
    ) -> GenerateResult:
        return GenerateResult(
            token_ids=ids,
            log_probs=[scripted_log_prob(token_id) for token_id in ids],
            finish=finish,
            policy_version=self.policy_version,
        )
