"""What the agent loop itself costs: a scripted engine, and a tool that does nothing.

    python benchmarks/agent_loop.py                  # with a small tokenizer made here
    python benchmarks/agent_loop.py --model DIR      # with a real one

The cost is the time of a turn less the time that the bare engine takes for the same requests in the same run. What is
left is rendering, tokenising, parsing, the tool's session and gate, and the record. The goal is 3 ms at p50.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_sidecar.agent import Agent, run_rollout
from rollout_sidecar.engines.base import GenerateRequest
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import Limits, RolloutRequest, RolloutSpec, Task, Trajectory
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool, ToolResponse

TURNS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="", help="folder of a tokenizer; empty: a small one")
    parser.add_argument("--runs", type=int, default=200, help="trajectories, one by one")
    parser.add_argument("--at_once", type=int, default=64, help="trajectories at the same time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = ChatTokenizer.from_folder(args.model or small_tokenizer(folder))
        report(asyncio.run(overhead(tokenizer, args.runs, args.at_once)))


def small_tokenizer(folder: str) -> str:
    """Writes one into the folder, and returns it."""
    from tooljax.model import tiny

    texts = ['<tool_call>\n{"name": "tool", "arguments": {"text": "abc"}}\n</tool_call>', "#### 2"]
    tiny.write_tokenizer(tiny.train_tokenizer(texts, 400), folder)
    return folder


class NoOpTool(BaseTool):
    """Answers at once."""

    def __init__(self):
        properties = {"text": {"type": "string", "description": "Anything."}}
        parameters = {"type": "object", "properties": properties, "required": ["text"]}
        function = {"name": "tool", "description": "Does nothing.", "parameters": parameters}
        super().__init__({}, {"type": "function", "function": function})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        return ToolResponse(text="ok"), 0.0, {}


@dataclass(frozen=True)
class Overhead:
    """Seconds a turn, by trajectory; and of many trajectories at once."""

    turn_s: list[float]
    engine_s: list[float]
    at_once: int
    at_once_turn_s: float

    @property
    def overhead_s(self) -> list[float]:
        """The loop's own share of a turn."""
        return [turn - engine for turn, engine in zip(self.turn_s, self.engine_s, strict=True)]


async def overhead(tokenizer: ChatTokenizer, runs: int, at_once: int) -> Overhead:
    """Plays trajectories one by one, gives each one's requests to the bare engine, then plays many at once."""
    call = get_format("hermes").render_call("tool", {"text": "abc"})
    engine = ScriptedEngine(tokenizer, [call] * (TURNS - 1) + ["#### 2"])
    agent = Agent(
        engine=engine,
        tokenizer=tokenizer,
        tool_format=get_format("hermes"),
        tools={"tool": NoOpTool()},
    )
    question = {"role": "user", "content": "Use the tool, then say 2."}
    request = RolloutRequest(
        request_id="r",
        tasks=[
            Task(task_id="t", messages=[question], data_source="openai/gsm8k", ground_truth="2")
        ],
        rollouts=[
            RolloutSpec(task_index=0, sample_index=i, seed=i) for i in range(max(runs, at_once))
        ],
        limits=Limits(max_turns=TURNS),
    )

    async def play(i: int) -> Trajectory:
        return await run_rollout(agent, request.tasks[0], request.rollouts[i], request, i)

    turn_s, engine_s = [], []
    for i in range(runs):
        engine.requests.clear()
        started = time.perf_counter()
        trajectory = await play(i)
        turn_s.append((time.perf_counter() - started) / TURNS)
        assert (trajectory.status, len(trajectory.turns)) == ("completed", TURNS), trajectory.error
        engine_s.append(await _bare(engine, list(engine.requests)) / TURNS)
    started = time.perf_counter()
    await asyncio.gather(*map(play, range(at_once)))
    at_once_turn_s = (time.perf_counter() - started) / (TURNS * at_once)
    return Overhead(turn_s, engine_s, at_once, at_once_turn_s)


async def _bare(engine: ScriptedEngine, requests: Sequence[GenerateRequest]) -> float:
    started = time.perf_counter()
    for request in requests:
        await engine.generate(request)
    seconds = time.perf_counter() - started
    await engine.release(requests[0].trajectory_id)
    return seconds


def report(result: Overhead) -> None:
    """A few lines."""

    def quantiles(seconds: Sequence[float]) -> str:
        cuts = statistics.quantiles(seconds, n=20)
        return f"p50 {1e3 * cuts[9]:6.3f} ms   p95 {1e3 * cuts[18]:6.3f} ms"

    ratio = statistics.median(result.turn_s) / statistics.median(result.engine_s)
    print(f"overhead of a turn, {len(result.turn_s)} trajectories of {TURNS} turns, one by one")
    print(f"  a turn            {quantiles(result.turn_s)}")
    print(f"  the bare engine   {quantiles(result.engine_s)}")
    print(
        f"  the loop's own    {quantiles(result.overhead_s)}   (a turn is {ratio:.1f} times the engine)"
    )
    print(
        f"  a turn with {result.at_once} trajectories at once: {1e3 * result.at_once_turn_s:.3f} ms"
    )


if __name__ == "__main__":
    main()
