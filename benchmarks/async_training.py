"""What rollouts ahead of their step, and oversampling, are worth where tools answer late now and then.

    python benchmarks/async_training.py
    python benchmarks/async_training.py --steps 40 --median_s 0.3 --update_s 1

The whole training loop (`tooljax.train`: rollouts, update of a tiny model, push to the sidecar, logs) against a sidecar
over HTTP whose engine plays a script: each trajectory calls a tool twice, then answers. How long the tool takes is
drawn from a log-normal distribution, by task, sample and turn: every mode waits for the same draws of the same tasks.
Tokens cost nothing, so what is measured is waiting: of the step for the slowest trajectory, which is what rollouts
ahead and oversampling are for. Steps that compile are left out.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from aiohttp import web

from rollout_sidecar.agent import Agent
from rollout_sidecar.engines.base import GenerateRequest
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.server import ServerOptions, Sidecar, create_app
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from tooljax.config import Config, load_config
from tooljax.model import tiny
from tooljax.rollouts import open_sidecars
from tooljax.train import Run, train

PROMPTS, SAMPLES, CALLS = 8, 4, 2
WARM_UP = 3
"""Steps that are left out: they compile, and nothing is ahead yet."""

MODES: dict[str, list[str]] = {
    "synchronous": [],
    "lag 1": ["async.max_policy_lag=1"],
    "oversampling 1.25": ["async.oversampling=1.25"],
    "lag 1, oversampling 1.25": ["async.max_policy_lag=1", "async.oversampling=1.25"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=33, help="the first 3 do not count")
    parser.add_argument("--median_s", type=float, default=0.15, help="of the tool's time")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm")
    parser.add_argument("--update_s", type=float, default=0.5, help="added to each update")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        tokenizer = ChatTokenizer.from_folder(folder / "model")
        for mode, settings in MODES.items():
            with serving(tokenizer, Late(args.median_s, args.sigma, args.seed)) as url:
                config = settings_of(folder, url, folder / mode.replace(" ", "_"), args, settings)
                found[mode] = measured(config, args.update_s)
                print(f"{mode}: {np.mean(found[mode][0]):.2f} s a step", file=sys.stderr)
    show(found)
    return 0


class Late(BaseTool):
    """Answers after a time that only the arguments decide."""

    def __init__(self, median_s: float, sigma: float, seed: int):
        function = {
            "name": "look",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        }
        super().__init__({}, {"type": "function", "function": function})
        self._draw = (median_s, sigma, seed)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Waits."""
        median_s, sigma, seed = self._draw
        drawn = random.Random(f"{seed}/{parameters['key']}").gauss(0.0, sigma)
        await asyncio.sleep(median_s * math.exp(drawn))
        return ToolResponse(text="ok"), 0.0, {}


def script(request: GenerateRequest, turn: int) -> str:
    """Calls the tool, then answers: rightly half of the time. A seed is that of task, sample and turn."""
    if turn < CALLS:
        arguments = {"key": f"{request.seed}/{turn}"}
        call = json.dumps({"name": "look", "arguments": arguments})
        return f"<tool_call>{call}</tool_call>"
    return f"#### {request.seed % 2}"


@contextlib.contextmanager
def serving(tokenizer: ChatTokenizer, tool: BaseTool) -> Iterator[str]:
    """A sidecar in a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    parts: list[Any] = []

    async def start() -> str:
        agent = Agent(
            engine=ScriptedEngine(tokenizer, script),
            tokenizer=tokenizer,
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
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def write_files(folder: Path) -> None:
    """A tiny model, and tasks whose answers are 0 or 1."""
    texts = ['<tool_call>{"name": "look", "arguments": {"key": "0"}}</tool_call>', "#### 1 What?"]
    tiny.build(folder / "model", texts, vocab=300, embed=32, layers=1, seed=0)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What? {i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i % 2)},
        }
        for i in range(40 * PROMPTS)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def settings_of(
    folder: Path, url: str, run_dir: Path, args: argparse.Namespace, settings: list[str]
) -> Config:
    """The config of one mode."""
    shared = {
        "run.dir": run_dir,
        "run.steps": args.steps,
        "run.seed": args.seed,
        "run.progress": "off",
        "model.path": folder / "model",
        "model.dtype": "float32",
        "data.train": (str(folder / "train.jsonl"),),
        "data.prompts_per_step": PROMPTS,
        "grpo.group_size": SAMPLES,
        "grpo.kl_coef": 0.0,
        "limits.max_prompt_tokens": 512,
        "limits.max_trajectory_tokens": 1024,
        "batch.row_lengths": (1024,),
        "sidecar.urls": (url,),
        "gate.every_pushes": 0,  # nobody samples here
        "checkpoint.every_steps": 10_000,
        "track.tensorboard": False,
    }
    return load_config([], [*(f"{k}={v}" for k, v in shared.items()), *settings])


def measured(config: Config, update_s: float) -> tuple[np.ndarray, float]:
    """Seconds of each step, and the mean lag."""
    update = Run.update

    def slower(self: Run, *given: Any) -> Any:
        out = update(self, *given)
        time.sleep(update_s)
        return out

    Run.update = slower  # type: ignore[method-assign]
    try:
        with open_sidecars(config) as sidecars:
            train(config, sidecars)
    finally:
        Run.update = update  # type: ignore[method-assign]
    with open(Path(config.run.dir) / "metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines][WARM_UP:]
    lag = float(np.mean([row["policy/lag/mean"] for row in rows]))
    return np.array([row["time/step_s"] for row in rows]), lag


def show(found: dict[str, tuple[np.ndarray, float]]) -> None:
    """A table in Markdown: each mode beside the first."""
    base, _ = found["synchronous"]
    print("| mode | s a step | against synchronous | p95 of a step | less by | mean lag |")
    print("|---|---|---|---|---|---|")
    for mode, (seconds, lag) in found.items():
        p95, base_p95 = np.percentile(seconds, 95), np.percentile(base, 95)
        print(
            f"| {mode} | {seconds.mean():.2f} | {base.mean() / seconds.mean():.2f} x | {p95:.2f} s "
            f"| {1 - p95 / base_p95:.0%} | {lag:.2f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
