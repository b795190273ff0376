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
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from support.process_time import Sampler, Usage, UsageMeter
from support.random_model import SIZES, write_model
from support.scripted_lengths import AlwaysCalls, NoOpTool, Pace, ScriptedLengths

from rollout_sidecar.agent import Agent
from rollout_sidecar.client import SidecarClient
from rollout_sidecar.engines.sglang import IO, SglangEngine
from rollout_sidecar.engines.sglang_setup import SglangOptions, sglang_module
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

ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "max_total_tokens": 2**15,
}


# --- the two ways -------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """One run of all conversations."""

    seconds: float
    trajectories: list[Trajectory] = field(default_factory=list)
    sampled: int = 0
    hits: int = 0
    ideal: int = 0
    usage: Usage = field(default_factory=Usage)
    pace: str = ""


async def over_http(
    url: str, request: RolloutRequest, folder: Path, engine: ScriptedLengths
) -> Played:
    """By a client in a process of its own, whose clock counts."""
    engine.pace = Pace()
    asked, answered = folder / "request", folder / "answer"
    asked.write_bytes(msgspec.msgpack.encode(request))
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", url, str(asked), str(answered)
    )
    if await client.wait():
        raise SystemExit("the client failed")
    begun, seconds, trajectories = msgspec.msgpack.decode(
        answered.read_bytes(), type=tuple[float, float, list[Trajectory]]
    )
    played = Played(seconds, sorted(trajectories, key=lambda each: each.task_index))
    played.pace = engine.pace.told(begun)
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

    async def ask() -> tuple[float, float, list[Trajectory]]:
        request = msgspec.msgpack.decode(Path(asked).read_bytes(), type=RolloutRequest)
        async with SidecarClient(url) as sidecar:
            await sidecar.info()  # connected
            begun = time.perf_counter()
            trajectories = [each async for each in sidecar.rollouts(request)]
            return begun, time.perf_counter() - begun, trajectories

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
        way = Ways(engine, url, request, folder, args.at_once)
        warm = await way.served("warm")
        await way.driven(warm.trajectories)
        if args.where:
            await _show_where(way, warm.trajectories)
        served, driven = [], []
        with _profile(args.profile):
            for number in range(args.rounds):
                for first in (number % 2, not number % 2):  # neither always goes first
                    if first:
                        served.append(await way.served(f"r{number}"))
                    elif not args.profile:
                        driven.append(await way.driven(warm.trajectories))
                if driven:
                    _show_round(number, served[-1], driven[-1])
    return served, driven


class Ways:
    """Both ways to play the conversations, each from an empty prefix cache."""

    def __init__(
        self,
        engine: ScriptedLengths,
        url: str,
        request: RolloutRequest,
        folder: Path,
        at_once: int,
    ):
        self._engine, self._url, self._request = engine, url, request
        self._folder, self._at_once = folder, at_once
        self._meter = UsageMeter()

    async def served(self, name: str) -> Played:
        """Over HTTP, under this request id."""
        request = msgspec.structs.replace(self._request, request_id=name)
        return await self._metered(
            lambda: over_http(self._url, request, self._folder, self._engine)
        )

    async def driven(self, like: Sequence[Trajectory]) -> Played:
        """By SGLang alone."""
        return await self._metered(lambda: bare(self._engine, like, self._at_once))

    async def _metered(self, play: Callable[[], Coroutine[Any, Any, Played]]) -> Played:
        await self._engine._forget_prefixes()
        gc.collect()  # what the run before left is not this one's
        before = self._meter.read()
        played = await play()
        played.usage = self._meter.read() - before
        return played


async def _show_where(way: Ways, like: Sequence[Trajectory]) -> None:
    """A round of each, in which the event loop's thread is looked at."""
    for name, play in (
        ("SGLang driven bare", lambda: way.driven(like)),
        ("the sidecar over HTTP", lambda: way.served("where")),
    ):
        with Sampler(("rollout_sidecar", "sglang", "aiohttp")) as sampler:
            played = await play()
        turns = sum(len(trajectory.turns) for trajectory in like)
        print(f"\n{name}: {1e3 * played.usage.process / turns:.3f} ms of CPU a turn, of it")
        print(sampler.table(turns, played.usage.process), flush=True)


def _show_round(number: int, served: Played, driven: Played) -> None:
    rates = [played.sampled / played.seconds for played in (served, driven)]
    print(
        f"round {number}: {rates[0]:,.0f} tokens/s, bare {rates[1]:,.0f} ({rates[0] / rates[1]:.3f}); {served.pace}",
        flush=True,
    )


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
    print(f"{'':24}{'tokens/s':>10}{'of ideal hits':>15}  seconds by round")
    for name, runs in (("SGLang driven bare", driven), ("the sidecar over HTTP", served)):
        rate = statistics.median(run.sampled / run.seconds for run in runs)
        hits = sum(run.hits for run in runs) / sum(run.ideal for run in runs)
        seconds = "  ".join(f"{run.seconds:.2f}" for run in runs)
        print(f"{name:24}{rate:10,.0f}{hits:15.1%}  {seconds}")
    print(
        f"\n{'CPU ms a turn, median':24}{'process':>10}{'event loop':>12}{'garbage':>10}{'SGLang':>10}"
    )
    for name, runs in (("SGLang driven bare", driven), ("the sidecar over HTTP", served)):
        process, loop, garbage, children = (
            1e3 * statistics.median(getattr(run.usage, part) for run in runs) / turns
            for part in ("process", "main_thread", "garbage", "children")
        )
        print(f"{name:24}{process:10.3f}{loop:12.3f}{garbage:10.3f}{children:10.3f}")
    ratios = [bare.seconds / run.seconds for run, bare in zip(served, driven, strict=True)]
    lost = statistics.median(
        run.seconds - bare.seconds for run, bare in zip(served, driven, strict=True)
    )
    print(
        f"\nratio {statistics.median(ratios):.3f} in the median of {len(ratios)} rounds, {min(ratios):.3f} to "
        f"{max(ratios):.3f} (goal 0.97); {1e3 * lost / turns:+.3f} ms a turn"
    )


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
    add("--rounds", type=int, default=6)
    add("--memory_fraction", type=float, default=0.6)
    add("--sglang_args", type=json.loads, default={}, help="JSON of more arguments of the engine")
    add("--where", action="store_true", help="show first what takes the CPU time")
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
