"""Conversations whose lengths are a script: how long each turn is, when it is asked for, and what answers it."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_sidecar.engines.base import GenerateRequest, GenerateResult
from rollout_sidecar.engines.sglang import SglangEngine
from rollout_sidecar.formats.base import BaseFormat, ParsedCall
from rollout_sidecar.tools.base import BaseTool, ToolResponse

ANY_ID = 300
"""Written where a stop id was sampled before its turn's end."""


class ScriptedLengths(SglangEngine):
    """Samples each turn to the length that the script says, and ends it with a stop id in place of its last token.

    No prefix is lost by that: the last sampled token is not in the cache yet.
    """

    lengths: list[list[int]]
    """By trajectory and turn."""
    pace: "Pace"
    """Of the run that is under way."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        turns = self.lengths[request.ordinal]
        turn = self.pace.ask(request.trajectory_id)
        unending = replace(request, max_tokens=turns[turn], stop_ids=frozenset())
        result = await super().generate(unending)
        self.pace.answer(request.trajectory_id)
        ids = [ANY_ID if id in request.stop_ids else id for id in result.token_ids]
        ids[-1] = min(request.stop_ids)
        return replace(result, token_ids=ids, finish="stop")


class Pace:
    """When the turns of a run were asked for."""

    def __init__(self):
        self.firsts: list[float] = []
        """By trajectory: when its first turn was asked for."""
        self.between: list[float] = []
        """Seconds between a turn's answer and the question for the next."""
        self._turns: dict[str, int] = {}
        self._answered: dict[str, float] = {}

    def ask(self, trajectory_id: str) -> int:
        """The number of the turn that begins."""
        now = time.perf_counter()
        turn = self._turns[trajectory_id] = self._turns.get(trajectory_id, -1) + 1
        if turn:
            self.between.append(now - self._answered[trajectory_id])
        else:
            self.firsts.append(now)
        return turn

    def answer(self, trajectory_id: str) -> None:
        """A turn has ended."""
        self._answered[trajectory_id] = time.perf_counter()

    def told(self, begun: float) -> str:
        """In a line; `begun` is when the client asked for the run."""
        first, last = (1e3 * (edge(self.firsts) - begun) for edge in (min, max))
        middle, most = (1e3 * value for value in np.quantile(self.between, [0.5, 0.9]))
        return (
            f"asked for the first turns after {first:.0f} to {last:.0f} ms, for a next one {middle:.2f} ms after an "
            f"answer (90 %: {most:.2f} ms)"
        )


class AlwaysCalls(BaseFormat):
    """Takes every turn for one call of the tool."""

    name = "always"
    markers = ()
    listing = ()
    form = ""

    def parse(self, text: str, **_: Any) -> list[ParsedCall]:
        return [ParsedCall("tool", {"text": text[:20]}, text)]


class NoOpTool(BaseTool):
    """Answers at once, each time with another text, so that nothing is gained by keeping its tokens."""

    def __init__(self, characters: int):
        properties = {"text": {"type": "string", "description": "Anything."}}
        parameters = {"type": "object", "properties": properties, "required": ["text"]}
        function = {"name": "tool", "description": "Does nothing.", "parameters": parameters}
        super().__init__({}, {"type": "function", "function": function})
        self._characters = characters
        self._answers = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        self._answers += 1
        text = f"{self._answers:0{self._characters}d}"
        return ToolResponse(text=text), 0.0, {}
