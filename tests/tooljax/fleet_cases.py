"""Sidecars that can be killed and started again, and policies that only the seed decides, for the fleet's tests."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax.numpy as jnp
import msgspec
from aiohttp import web

from rollout_sidecar.agent import Agent
from rollout_sidecar.engines.base import GenerateRequest
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import Limits, SamplingParams, Trajectory, derive_seed
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.server import ServerOptions, Sidecar, create_app
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from tooljax.config.schema import WeightsConfig
from tooljax.rollouts import Groups, Sidecars

T = TypeVar("T")

SEED = (5,)
TURNS = 4


class Add(BaseTool):
    """Adds one; remembers how often it was asked, which changes no answer."""

    stateless = True

    def __init__(self):
        function = {
            "name": "add",
            "parameters": {"type": "object", "properties": {"to": {"type": "integer"}}},
        }
        super().__init__({}, {"type": "function", "function": function})
        self.open = 0

    async def create(self, instance_id=None, **kwargs):
        self.open += 1
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(parameters["to"] + 1)), 0.0, {}

    async def release(self, instance_id, **kwargs):
        self.open -= 1


class Sum(Add):
    """Adds to what it was asked before: it keeps state."""

    stateless = False

    def __init__(self):
        super().__init__()
        self.sums: dict[str, int] = {}

    async def execute(self, instance_id, parameters, **kwargs):
        self.sums[instance_id] = self.sums.get(instance_id, 0) + parameters["to"]
        return ToolResponse(text=str(self.sums[instance_id])), 0.0, {}


def several_turns(tasks: int, samples: int, turns: int = TURNS) -> Callable[..., str]:
    """A policy that calls the tool in every turn but the last, with what its seed and the turn say."""
    known = {
        derive_seed(derive_seed(*SEED, i, s), turn): (10 * i + s, turn)
        for i in range(tasks)
        for s in range(samples)
        for turn in range(turns)
    }

    def script(request: GenerateRequest, _: int) -> str:
        number, turn = known[request.seed]
        if turn + 1 == turns:
            return f"#### {number}"
        arguments = f'{{"to": {100 * turn + number}}}'
        return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'

    return script


class Replica:
    """A sidecar on a port of its own, which it keeps when it is started again."""

    def __init__(self, make: Callable[[], Sidecar], loop: asyncio.AbstractEventLoop):
        self._make = make
        self._loop = loop
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.sidecar: Sidecar
        self.on_generate: Callable[[int], None] = lambda count: None
        """Called on the loop with the number of generations since the start."""

    @property
    def url(self) -> str:
        """Where it listens, or listened."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def engine(self) -> ScriptedEngine:
        """What it generates with."""
        return self.sidecar.agent.engine  # type: ignore[return-value]

    async def start_here(self) -> None:
        """Starts with a fresh engine."""
        self.sidecar = self._make()
        generate, count = self.engine.generate, 0

        async def counted(request: GenerateRequest) -> Any:
            nonlocal count
            count += 1
            self.on_generate(count)
            return await generate(request)

        self.engine.generate = counted  # type: ignore[method-assign]
        runner = web.AppRunner(create_app(self.sidecar), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()
        self._port = runner.addresses[0][1]
        self._runner = runner
        await self.sidecar.start()

    def kill_here(self) -> None:
        """As kill -9 looks from outside: connections are cut, and nobody listens. To be called on the loop."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        loop = asyncio.get_running_loop()
        for site in list(runner.sites):
            # Not Server.close yet: asyncio would leak what was accepted and is no transport yet.
            for listening in site._server._sockets:  # type: ignore[attr-defined]
                loop.remove_reader(listening)
                listening.shutdown(socket.SHUT_RDWR)
        _cut(runner)
        asyncio.ensure_future(self._bury(runner, self.sidecar))

    async def _bury(self, runner: web.AppRunner, sidecar: Sidecar) -> None:
        await asyncio.sleep(0.02)  # for those
        _cut(runner)
        await runner.cleanup()
        await sidecar.stop()

    async def stop_here(self) -> None:
        """Ends it in good order."""
        if self._runner is not None:
            await self.sidecar.stop()
            await self._runner.cleanup()

    def kill(self) -> None:
        """From another thread."""
        self._loop.call_soon_threadsafe(self.kill_here)

    def start(self) -> None:
        """From another thread."""
        self.do(self.start_here())

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs something on the sidecar's loop."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)


def _cut(runner: web.AppRunner) -> None:
    for connection in list(runner.server.connections):  # type: ignore[union-attr]
        if connection.transport is not None:
            connection.transport.abort()


@contextmanager
def replicas(
    tokenizer: ChatTokenizer,
    script: Callable[..., str] | Sequence[str],
    *,
    count: int,
    tool: type[Add] = Add,
    engine: type[ScriptedEngine] = ScriptedEngine,
    delays: Sequence[float] = (),
    **options: Any,
) -> Iterator[list[Replica]]:
    """`count` sidecars; `delays` are the times of a turn by replica, `options` those of the server."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def maker(delay_s: float) -> Callable[[], Sidecar]:
        def make() -> Sidecar:
            agent = Agent(
                engine=engine(tokenizer, script, delay_s=delay_s),
                tokenizer=tokenizer,
                tool_format=get_format("hermes"),
                tools={"add": tool()},
                scorer=Scorer(),
            )
            return Sidecar(agent, ServerOptions(**options))

        return make

    made = [Replica(maker(delays[i] if delays else 0.0), loop) for i in range(count)]
    try:
        for replica in made:
            replica.start()
        yield made
    finally:
        for replica in made:
            replica.do(replica.stop_here())

        async def settle() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            if rest:
                await asyncio.wait(rest, timeout=10)

        asyncio.run_coroutine_threadsafe(settle(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def connect(served: Sequence[Replica], *, period_s: float = 0.1, **kwargs: Any) -> Sidecars:
    """The trainer's side, with a short time between two looks."""
    sidecars = Sidecars([one.url for one in served], **{"token": None, "timeout_s": 30.0, **kwargs})
    sidecars.fleet.period_s = period_s
    return sidecars


def roll(sidecars: Sidecars, tasks: Sequence[Any], *, samples: int, **kwargs: Any) -> Groups:
    """Trajectories of SEED."""
    return sidecars.rollout(
        tasks,
        samples=samples,
        seed=SEED,
        sampling=SamplingParams(),
        limits=Limits(max_tokens_per_turn=128, max_turns=TURNS + 1),
        **kwargs,
    )


def push(sidecars: Sidecars, step: int, mode: str = "full", **kwargs: Any):
    """Weights that differ from step to step."""
    tensors = [
        ("a", jnp.arange(6, dtype=jnp.float32)),
        ("b", jnp.full((64, 2), step, jnp.bfloat16)),
    ]
    weights = WeightsConfig(part_bytes=1024, mode=mode, **{"timeout_s": 10.0, **kwargs})  # type: ignore
    return sidecars.push(tensors, step=step, weights=weights)


def essence(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory without what clocks and caches say."""
    record = msgspec.to_builtins(trajectory)
    for turn in record["turns"]:
        del turn["generate_s"], turn["cached_tokens"]
        for call in turn["calls"]:
            del call["latency_s"], call["queue_s"]
    return {key: value for key, value in record.items() if key not in ("total_s", "tool_s")}


def essences(groups: Groups) -> list[list[dict[str, Any]]]:
    """All of them."""
    return [[essence(trajectory) for trajectory in group] for group in groups]
