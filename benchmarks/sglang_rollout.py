"""What the sidecar's multi-turn loop over HTTP costs, beside the same SGLang engine driven bare.

    python benchmarks/sglang_rollout.py --size 0.5B    # on a GPU with SGLang; about three minutes
    python benchmarks/sglang_rollout.py                # a tiny model on a CPU: make test-sglang has the environment

Both drive one engine, in turns, with the same conversations: as many at once, as many turns, and token for token the
same lengths of prompts, turns and tool results. The lengths are a script: a turn is sampled to its length whatever its
tokens are, ends there, and is taken for a call of a tool that answers at once. The client is a process of its own, as
a trainer is. Bare means SGLang's own request object in, its answer out, and the next turn sent when it is there.

Goals: the sidecar gives at least 97 % of the bare engine's tokens a second, and finds at least 95 % of the prefix that
there is to find: of each turn but the first, everything before the last token that the turn before sampled.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from support.random_model import SIZES, write_model

from rollout_sidecar.agent import Agent
from rollout_sidecar.client import SidecarClient
from rollout_sidecar.engines.base import GenerateRequest, GenerateResult
from rollout_sidecar.engines.sglang import IO, SglangEngine
from rollout_sidecar.engines.sglang_setup import SglangOptions, sglang_module
from rollout_sidecar.formats.base import BaseFormat, ParsedCall
from rollout_sidecar.garbage import set_aside_what_is_there
from rollout_sidecar.protocol import (
    Limits,
    RolloutRequest,
    RolloutSpec,
    Task,
    Trajectory,
)
from rollout_sidecar.server import create_app
from rollout_sidecar.sidecar import ServerOptions, Sidecar
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool, ToolResponse

ANY_ID = 300
"""Written where a stop id was sampled before its turn's end."""

ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "max_total_tokens": 2**15,
}


# --- the script ---------------------------------------------------------------------------------------------------


class ScriptedLengths(SglangEngine):
    """Samples each turn to the length that the script says, and ends it with a stop id in place of its last token.

    No prefix is lost by that: the last sampled token is not in the cache yet.
    """

    lengths: list[list[int]]
    """By trajectory and turn."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        turns = self.lengths[request.ordinal]
        turn = self._played[request.trajectory_id] = self._played.get(request.trajectory_id, -1) + 1
        unending = replace(request, max_tokens=turns[turn], stop_ids=frozenset())
        result = await super().generate(unending)
        ids = [ANY_ID if id in request.stop_ids else id for id in result.token_ids]
        ids[-1] = min(request.stop_ids)
        return replace(result, token_ids=ids, finish="stop")

    async def release(self, trajectory_id: str) -> None:
        self._played.pop(trajectory_id, None)
        await super().release(trajectory_id)

    @property
    def _played(self) -> dict[str, int]:
        return self.__dict__.setdefault("_played_turns", {})


class AlwaysCalls(BaseFormat):
    """Takes every turn for one call of the tool."""

    name = "always"
    markers = ()
    listing = ()
    form = ""

    def parse(self, text: str, **_: Any) -> list[ParsedCall]:
        return [ParsedCall("tool", {"text": text[:20]}, text)]


class NoOpTool(BaseTool):
    """Answers at once."""

    def __init__(self, characters: int):
        properties = {"text": {"type": "string", "description": "Anything."}}
        parameters = {"type": "object", "properties": properties, "required": ["text"]}
        function = {"name": "tool", "description": "Does nothing.", "parameters": parameters}
        super().__init__({}, {"type": "function", "function": function})
        self._answer = "x" * characters

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        return ToolResponse(text=self._answer), 0.0, {}


# --- the two ways -------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """One run of all conversations."""

    seconds: float
    trajectories: list[Trajectory] = field(default_factory=list)
    sampled: int = 0
    hits: int = 0
    ideal: int = 0


async def over_http(url: str, request: RolloutRequest, folder: Path) -> Played:
    """By a client in a process of its own, whose clock counts."""
    asked, answered = folder / "request", folder / "answer"
    asked.write_bytes(msgspec.msgpack.encode(request))
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", url, str(asked), str(answered)
    )
    if await client.wait():
        raise SystemExit("the client failed")
    seconds, trajectories = msgspec.msgpack.decode(
        answered.read_bytes(), type=tuple[float, list[Trajectory]]
    )
    played = Played(seconds, sorted(trajectories, key=lambda each: each.task_index))
    for trajectory in trajectories:
        if trajectory.status != "max_turns":
            raise SystemExit(f"{trajectory.status}: {trajectory.error}")
        turns = trajectory.turns
        played.sampled += sum(turn.end - turn.start for turn in turns)
        played.hits += sum(turn.cached_tokens for turn in turns[1:])
        played.ideal += sum(turn.end - 1 for turn in turns[:-1])
    return played


def client(url: str, asked: str, answered: str) -> None:
    """The trainer's side: asks, and reads every trajectory."""

    async def ask() -> tuple[float, list[Trajectory]]:
        request = msgspec.msgpack.decode(Path(asked).read_bytes(), type=RolloutRequest)
        async with SidecarClient(url) as sidecar:
            await sidecar.info()  # connected
            begun = time.perf_counter()
            trajectories = [each async for each in sidecar.rollouts(request)]
            return time.perf_counter() - begun, trajectories

    Path(answered).write_bytes(msgspec.msgpack.encode(asyncio.run(ask())))


async def bare(engine: SglangEngine, like: Sequence[Trajectory], at_once: int) -> Played:
    """The same conversations without a sidecar."""
    make_request = sglang_module(IO).GenerateReqInput
    manager, slots = engine._manager, asyncio.Semaphore(at_once)
    played = Played(0.0)

    async def converse(trajectory: Trajectory) -> None:
        turns = trajectory.turns
        async with slots:
            ids = trajectory.token_ids[: trajectory.prompt_tokens]
            for number, turn in enumerate(turns):
                length = turn.end - turn.start
                request = make_request(
                    rid=uuid.uuid4().hex,
                    input_ids=ids,
                    sampling_params={
                        "temperature": 1.0,
                        "max_new_tokens": length,
                        "ignore_eos": True,
                    },
                    return_logprob=True,
                )
                [answer] = [each async for each in manager.generate_request(request, None)]
                if number:
                    played.hits += answer["meta_info"]["cached_tokens"]
                    played.ideal += len(ids) - _said_between(turns, number) - 1
                played.sampled += len(answer["output_ids"])
                if number + 1 < len(turns):
                    said = trajectory.token_ids[turn.end : turns[number + 1].start]
                    ids = ids + answer["output_ids"] + said

    begun = time.perf_counter()
    await asyncio.gather(*map(converse, like))
    played.seconds = time.perf_counter() - begun
    return played


def _said_between(turns: Sequence[Any], number: int) -> int:
    return turns[number].start - turns[number - 1].end


# --- the run ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(engine: SglangEngine, model: Path, args: argparse.Namespace):
    """The sidecar on a free port of this process; gives its URL."""
    agent = Agent(
        engine=engine,
        tokenizer=ChatTokenizer.from_folder(model),
        tool_format=AlwaysCalls(),
        tools={"tool": NoOpTool(args.tool_tokens)},
    )
    sidecar = Sidecar(agent, ServerOptions(model=str(model), max_concurrent=args.at_once))
    await sidecar.start()
    set_aside_what_is_there()  # as python -m rollout_sidecar does
    runner = web.AppRunner(create_app(sidecar), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await sidecar.stop()


async def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Played], list[Played]]:
    """Alternating runs of the sidecar and of the bare engine, each with an empty prefix cache."""
    model = folder / "model"
    longest = args.prompt_tokens + args.turns * (2 * args.tokens + args.tool_tokens + 64) + 512
    write_model(model, args.size, max_positions=longest)
    engine = ScriptedLengths(str(model), max_model_tokens=longest, options=_options(args))
    draw = np.random.default_rng(0)
    low, high = (int(args.tokens * (1 + sign * args.spread)) for sign in (-1, 1))
    engine.lengths = draw.integers(low, high + 1, (args.trajectories, args.turns)).tolist()
    words = draw.integers(97, 123, (args.trajectories, args.prompt_tokens), dtype=np.uint8)
    tasks = [
        Task(
            task_id=str(i),
            messages=[{"role": "user", "content": text.tobytes().decode()}],
            data_source="openai/gsm8k",
            ground_truth="1",
        )
        for i, text in enumerate(words)
    ]
    limits = Limits(
        max_turns=args.turns,
        max_tokens_per_turn=2 * args.tokens + 1,
        max_prompt_tokens=longest,
        max_trajectory_tokens=longest,
    )
    request = RolloutRequest(
        request_id="r",
        tasks=tasks,
        rollouts=[RolloutSpec(task_index=i, sample_index=0, seed=i) for i in range(len(tasks))],
        limits=limits,
    )
    async with serving(engine, model, args) as url:
        warm = await over_http(url, request, folder)
        await bare(engine, warm.trajectories, args.at_once)
        served, driven = [], []
        with _profile(args.profile):
            for number in range(args.rounds):
                await engine._forget_prefixes()
                again = msgspec.structs.replace(request, request_id=f"r{number}")
                served.append(await over_http(url, again, folder))
                if not args.profile:
                    await engine._forget_prefixes()
                    driven.append(await bare(engine, warm.trajectories, args.at_once))
                    _show_round(number, served[-1], driven[-1])
    return served, driven


def _show_round(number: int, served: Played, driven: Played) -> None:
    rates = [played.sampled / played.seconds for played in (served, driven)]
    print(f"round {number}: {rates[0]:,.0f} tokens/s, bare {rates[1]:,.0f}", flush=True)


def _options(args: argparse.Namespace) -> SglangOptions:
    import torch

    extra = {} if torch.cuda.is_available() else dict(ON_CPU)
    return SglangOptions(
        dtype="bfloat16",
        max_running=args.at_once,
        memory_fraction=args.memory_fraction,
        extra=extra | args.sglang_args,
    )


def _profile(file: str):
    if not file:
        return nullcontext()
    import cProfile

    profile = cProfile.Profile()

    class Written:
        def __enter__(self):
            profile.enable()

        def __exit__(self, *_):
            profile.disable()
            profile.dump_stats(file)

    return Written()


def report(args: argparse.Namespace, served: Sequence[Played], driven: Sequence[Played]) -> None:
    """A table: each way's rounds, and what they give together."""
    turns = args.trajectories * args.turns
    print(
        f"\n{args.size}, {args.trajectories} conversations of {args.turns} turns, {args.at_once} at once; about "
        f"{args.prompt_tokens} prompt, {args.tokens} sampled and {args.tool_tokens} tool tokens a turn; "
        f"SGLang {sglang_module('').__version__}, {os.cpu_count()} CPU cores\n"
    )
    print(f"{'':28}{'tokens/s':>12}{'of ideal hits':>16}{'seconds by round':>24}")
    rates = []
    for name, runs in (("SGLang driven bare", driven), ("the sidecar over HTTP", served)):
        rates.append(statistics.median(run.sampled / run.seconds for run in runs))
        hits = sum(run.hits for run in runs) / sum(run.ideal for run in runs)
        seconds = "  ".join(f"{run.seconds:.2f}" for run in runs)
        print(f"{name:28}{rates[-1]:12,.0f}{hits:16.1%}{seconds:>24}")
    lost = statistics.median(run.seconds for run in served) - statistics.median(
        run.seconds for run in driven
    )
    print(f"\nratio {rates[1] / rates[0]:.3f} (goal 0.97); {1e3 * lost / turns:+.3f} ms a turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="tiny")
    add("--trajectories", type=int, help="default: twice --at_once")
    add("--at_once", type=int, help="default: 256; tiny: 4")
    add("--turns", type=int, default=4)
    add("--tokens", type=int, help="mean sampled tokens a turn; default: 128; tiny: 16")
    add("--spread", type=float, default=0.5, help="turns differ by up to this share of the mean")
    add("--prompt_tokens", type=int, help="default: 256; tiny: 64")
    add("--tool_tokens", type=int, default=64)
    add("--rounds", type=int, default=3)
    add("--memory_fraction", type=float, default=0.6)
    add("--sglang_args", type=json.loads, default={}, help="JSON of more arguments of the engine")
    add(
        "--profile",
        default="",
        help="file for a profile of the sidecar's runs; nothing is compared then",
    )
    args = parser.parse_args()
    tiny = args.size == "tiny"
    args.at_once = args.at_once or (4 if tiny else 256)
    args.trajectories = args.trajectories or 2 * args.at_once
    args.tokens = args.tokens or (16 if tiny else 128)
    args.prompt_tokens = args.prompt_tokens or (64 if tiny else 256)
    with tempfile.TemporaryDirectory() as folder:
        served, driven = asyncio.run(measure(args, Path(folder)))
    if driven:
        report(args, served, driven)


if __name__ == "__main__":  # SGLang's processes import this file
    if sys.argv[1:2] == ["--client"]:
        client(*sys.argv[2:])
    else:
        main()
