"""Tools that answer late now and then, and a sidecar in this process that serves them: for async_training.py."""

import asyncio
import contextlib
import json
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_sidecar.agent import Agent
from rollout_sidecar.engines.base import Engine, GenerateRequest, GenerateResult
from rollout_sidecar.engines.jax import JaxEngine
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.server import ServerOptions, Sidecar, create_app
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from rollout_sidecar.tools.calculator import CalculatorTool

CALLS = 2
"""Of each scripted trajectory."""


class Late:
    """How long a call takes: log-normal, and decided by the seed of the turn that made it, which derives from the
    run's seed, the step, the task, the sample and the turn."""

    def __init__(self, median_s: float, sigma: float):
        self.median_s = median_s
        self.sigma = sigma

    def draw(self, turn_seed: int) -> float:
        """Seconds."""
        return self.median_s * math.exp(random.Random(turn_seed).gauss(0.0, self.sigma))


class LateTool(BaseTool):
    """Answers after a time that only the arguments decide."""

    def __init__(self, late: Late):
        function = {
            "name": "look",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        }
        super().__init__({}, {"type": "function", "function": function})
        self._late = late

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Waits."""
        await asyncio.sleep(self._late.draw(int(parameters["key"])))
        return ToolResponse(text="ok"), 0.0, {}


def call_then_answer(request: GenerateRequest, turn: int) -> str:
    """Calls the tool, then answers: rightly half of the time."""
    if turn < CALLS:
        call = json.dumps({"name": "look", "arguments": {"key": str(request.seed)}})
        return f"<tool_call>{call}</tool_call>"
    return f"#### {request.seed % 2}"


def scripted(folder: Path, late: Late) -> tuple[Engine, BaseTool]:
    """An engine that needs no time, and its tool."""
    return ScriptedEngine(ChatTokenizer.from_folder(folder), call_then_answer), LateTool(late)


class SeedNotingEngine(JaxEngine):
    """Tells the tool which seed the turn has that calls it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seeds: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """As ever."""
        self.seeds[request.trajectory_id] = request.seed
        return await super().generate(request)


class LateCalculator(CalculatorTool):
    """A calculator that answers after a time that the turn's seed decides."""

    def __init__(self, late: Late, engine: SeedNotingEngine):
        super().__init__({}, None)
        self._late = late
        self._engine = engine

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Waits, then computes. An instance has the name of its trajectory."""
        await asyncio.sleep(self._late.draw(self._engine.seeds[instance_id]))
        return await super().execute(instance_id, parameters, **kwargs)


def embedded(folder: Path, late: Late, *, slots: int, tokens: int) -> tuple[Engine, BaseTool]:
    """The engine that samples with JAX in this process, and its calculator."""
    engine = SeedNotingEngine(str(folder), dtype="float32", slots=slots, max_model_tokens=tokens)
    return engine, LateCalculator(late, engine)


@contextlib.contextmanager
def serving(folder: Path, engine: Engine, tool: BaseTool) -> Iterator[str]:
    """The URL of a sidecar in a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    parts: list[Any] = []

    async def start() -> str:
        agent = Agent(
            engine=engine,
            tokenizer=ChatTokenizer.from_folder(folder),
            tool_format=get_format("hermes"),
            tools={tool.name: tool},
            scorer=Scorer(),
        )
        sidecar = Sidecar(agent, ServerOptions(max_concurrent=256))
        runner = web.AppRunner(create_app(sidecar), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await sidecar.start()
        parts.extend((sidecar, runner))
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop() -> None:
        await parts[0].stop()
        await parts[1].cleanup()

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(300)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
