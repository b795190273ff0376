"""Real sidecars for the trainer's tests: served over HTTP from a thread of this process, playing a script."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from rollout_sidecar.agent import Agent
from rollout_sidecar.engines.base import GenerateRequest, GenerateResult
from rollout_sidecar.engines.scripted import Script, ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import Task
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.server import ServerOptions, Sidecar, create_app
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool
from tooljax.model import tiny

T = TypeVar("T")


def make_tokenizer(folder: Path) -> ChatTokenizer:
    """One of tooljax.model.tiny's, with few merges."""
    tiny.write_tokenizer(tiny.train_tokenizer(["What is 2? Count to two."], 300), folder)
    return ChatTokenizer.from_folder(folder)


def make_tasks(count: int) -> list[Task]:
    """Tasks t0, t1, ... whose prompts name them, and whose answer is their number."""
    return [
        Task(
            task_id=f"t{i}",
            messages=[{"role": "user", "content": f"Problem {i}?"}],
            data_source="openai/gsm8k",
            ground_truth=str(i),
        )
        for i in range(count)
    ]


class Backwards(ScriptedEngine):
    """Ends its trajectories in the opposite of the order they were asked for."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Waits longest for the first."""
        await asyncio.sleep(max(0.0, 0.3 - 0.02 * request.ordinal))
        return await super().generate(request)


class Served:
    """One sidecar being served."""

    def __init__(self, url: str, sidecar: Sidecar, loop: asyncio.AbstractEventLoop):
        self.url = url
        self.sidecar = sidecar
        self._loop = loop

    @property
    def engine(self) -> ScriptedEngine:
        """What it generates with: its requests can be looked at."""
        engine = self.sidecar.agent.engine
        assert isinstance(engine, ScriptedEngine)
        return engine

    def prompts(self) -> list[str]:
        """The first context of every trajectory, as text."""
        first = {request.trajectory_id: request for request in reversed(self.engine.requests)}
        return [self.sidecar.agent.tokenizer.decode(r.token_ids) for r in first.values()]

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs something on the sidecar's loop."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)


@contextmanager
def serve(
    tokenizer: ChatTokenizer,
    script: Script,
    *,
    count: int = 1,
    engine: Callable[..., ScriptedEngine] = ScriptedEngine,
    tools: Sequence[BaseTool] = (),
    versions: Sequence[int] = (),
    token: str = "",
    **engine_kwargs: Any,
) -> Iterator[list[Served]]:
    """`count` sidecars on free ports; `versions` are those that they have served before."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []
    served: list[Served] = []

    async def start() -> None:
        for i in range(count):
            plays = engine(tokenizer, script, **engine_kwargs)
            plays.policy_version = versions[i] if versions else 0
            agent = Agent(
                engine=plays,
                tokenizer=tokenizer,
                tool_format=get_format("hermes"),
                tools={tool.name: tool for tool in tools},
                scorer=Scorer(),
            )
            sidecar = Sidecar(agent, ServerOptions(token=token))
            runner = web.AppRunner(create_app(sidecar), access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            await sidecar.start()
            runners.append(runner)
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            served.append(Served(url, sidecar, loop))

    async def stop() -> None:
        for one in served:
            await one.sidecar.stop()
        for runner in runners:
            await runner.cleanup()

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        yield served
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
