"""What the tests of agent, server and client share: tools that behave well and badly, requests, a served sidecar."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import xxhash
from aiohttp import web

from rollout_sidecar.agent import Agent, run_rollout
from rollout_sidecar.engines.scripted import Script, ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import (
    JSON,
    MSGPACK,
    ErrorBody,
    Fault,
    Frame,
    Limits,
    RewardWeights,
    RolloutRequest,
    RolloutSpec,
    Task,
    TensorEntry,
    Trajectory,
    WeightsManifest,
    WeightsStatus,
    decode,
    encode,
)
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.server import ServerOptions, Sidecar, create_app
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from rollout_sidecar.weights import WeightStore


def schema(name: str, **properties: str) -> dict[str, Any]:
    """A function schema whose properties, by type, are all required."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": type_} for key, type_ in properties.items()},
                "required": list(properties),
            },
        },
    }


class Signal:
    """An event between a test and a tool of its own, which run on different event loops."""

    def __init__(self):
        self._event = threading.Event()
        self.set, self.is_set = self._event.set, self._event.is_set

    async def wait(self) -> None:
        """Until it is set."""
        while not self.is_set():
            await asyncio.sleep(0.001)


async def until(holds: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Waits for what another thread does."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.002)


class CounterTool(BaseTool):
    """Counts its calls by instance, and everything that is done to it in `log`."""

    def __init__(self, name: str = "counter", **properties: str):
        super().__init__({}, schema(name, **properties))
        self.counts: dict[str, int] = {}
        self.log: list[tuple[str, str]] = []
        self.kwargs: list[dict[str, Any]] = []

    def times(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _ in self.log)

    def note(self, method: str, instance_id: str | None, kwargs: dict[str, Any]) -> None:
        """Logs a call."""
        self.log.append((method, instance_id or ""))
        self.kwargs.append(kwargs)

    async def create(self, instance_id: str | None = None, **kwargs: Any):
        self.note("create", instance_id, kwargs)
        assert instance_id is not None
        self.counts[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        self.note("execute", instance_id, kwargs)
        self.counts[instance_id] += 1
        return await self.answer(instance_id, parameters)

    async def answer(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        """What execute returns."""
        return ToolResponse(text=str(self.counts[instance_id])), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.note("calc_reward", instance_id, kwargs)
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.note("release", instance_id, kwargs)
        del self.counts[instance_id]


class EchoTool(CounterTool):
    """Answers with its argument."""

    def __init__(self, name: str = "echo"):
        super().__init__(name, text="string")

    async def answer(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        return ToolResponse(text=parameters["text"]), 0.0, {}


class HangingTool(CounterTool):
    """Never answers."""

    async def answer(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        await asyncio.sleep(60)


class RaisingTool(CounterTool):
    """Cannot do it."""

    async def answer(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        raise RuntimeError("no such table")


class SayingTool(CounterTool):
    """Always answers the same."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    async def answer(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        return ToolResponse(text=self.text), 0.0, {}


class PenaltyTool(CounterTool):
    """Each call costs a twentieth."""

    async def answer(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        return ToolResponse(text="wrong"), -0.05, {}


def call(name: str, **arguments: Any) -> str:
    """A call as a policy writes it."""
    return get_format("hermes").render_call(name, arguments)


def make_agent(
    tokenizer: ChatTokenizer, script: Script, *tools: BaseTool, reward: str = "gsm8k", **kwargs: Any
) -> Any:
    """An agent whose policy plays the script. kwargs: max_model_tokens, delay_s, and fields of Scorer.

    Typed as Any, because tests look into its scripted engine and exchange its parts.
    """
    engine_kwargs = {
        key: kwargs.pop(key) for key in ("max_model_tokens", "delay_s") if key in kwargs
    }
    return Agent(
        engine=ScriptedEngine(tokenizer, script, **engine_kwargs),
        tokenizer=tokenizer,
        tool_format=get_format("hermes"),
        tools={tool.name: tool for tool in tools},
        scorer=Scorer(reward=reward, **kwargs),
    )


def make_task(**kwargs: Any) -> Task:
    """A task whose answer is 2."""
    fields = {
        "task_id": "t",
        "messages": [{"role": "user", "content": "Count to two."}],
        "data_source": "openai/gsm8k",
        "ground_truth": "2",
    }
    return Task(**{**fields, **kwargs})


def make_request(task: Task | None = None, samples: int = 1, **kwargs: Any) -> RolloutRequest:
    """A request for some samples of one task."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "tasks": [task or make_task()],
        "rollouts": [RolloutSpec(task_index=0, sample_index=i, seed=i) for i in range(samples)],
        "limits": Limits(max_tokens_per_turn=1024),
    }
    return RolloutRequest(**{**fields, **kwargs})


async def play(
    agent: Agent, task: Task | None = None, weights: RewardWeights | None = None, **limits: Any
) -> Trajectory:
    """One rollout, checked for what holds of every trajectory."""
    limits = {"max_tokens_per_turn": 1024, **limits}
    request = make_request(task, limits=Limits(**limits), reward_weights=weights)
    trajectory = await run_rollout(agent, request.tasks[0], request.rollouts[0], request)
    check_trajectory(trajectory)
    return trajectory


def check_trajectory(trajectory: Trajectory) -> None:
    """Lengths agree, the mask is True exactly in turns, log-probs elsewhere are 0, reward terms add up."""
    length = len(trajectory.token_ids)
    assert len(trajectory.loss_mask) == len(trajectory.rollout_log_probs) == length
    sampled = {i for turn in trajectory.turns for i in range(turn.start, turn.end)}
    assert [i in sampled for i in range(length)] == trajectory.loss_mask
    assert sum(span.end - span.start for span in trajectory.version_spans) == len(sampled)
    assert all(
        (log_prob != 0) == mask
        for log_prob, mask in zip(trajectory.rollout_log_probs, trajectory.loss_mask, strict=True)
    )
    assert trajectory.reward == sum(trajectory.reward_terms.values())
    json.dumps(trajectory.messages, allow_nan=False).encode("utf-8")


def tool_messages(trajectory: Trajectory) -> list[str]:
    """What tools told the policy."""
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


def statuses(trajectory: Trajectory) -> list[list[str]]:
    """The status of each call, by turn."""
    return [[record.status for record in turn.calls] for turn in trajectory.turns]


@asynccontextmanager
async def serving(
    agent: Agent, *, start: bool = True, **options: Any
) -> AsyncIterator[tuple[str, Sidecar]]:
    """A sidecar on a free port of this machine: its URL, and itself."""
    sidecar = Sidecar(agent, ServerOptions(**options))
    runner = web.AppRunner(create_app(sidecar), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    if start:
        await sidecar.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", sidecar
    finally:
        await sidecar.stop()
        await runner.cleanup()


class Push:
    """A push of a few tensors: its payload, its manifest, and `read` as the client wants it."""

    def __init__(self, *, part_bytes: int = 10, seed: int = 0, **shapes: list[int]):
        shapes = shapes or {"b": [3], "a": [2, 2]}
        tensors, payload = [], b""
        for name, shape in shapes.items():
            nbytes = 4 * math.prod(shape)
            data = bytes((seed + 7 * len(payload) + i) % 256 for i in range(nbytes))
            tensors.append(
                TensorEntry(
                    name=name,
                    dtype="float32",
                    shape=shape,
                    offset=len(payload),
                    nbytes=nbytes,
                    hash=xxhash.xxh3_128_hexdigest(data),
                )
            )
            payload += data
        self.payload = payload
        self.manifest = WeightsManifest(
            tensors=tensors, payload_bytes=len(payload), part_bytes=part_bytes
        )
        self.reads: list[int] = []

    @property
    def parts(self) -> list[bytes]:
        """The payload, cut."""
        size = self.manifest.part_bytes
        return [self.payload[i : i + size] for i in range(0, len(self.payload), size)]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the payload; notes the offset."""
        self.reads.append(offset)
        return self.payload[offset : offset + nbytes]


async def put_part(
    weights: WeightStore, version: int, index: int, data: bytes, push_id: str = ""
) -> WeightsStatus:
    """Gives a store one part, in two chunks."""

    async def chunks() -> AsyncIterator[bytes]:
        yield data[: len(data) // 2]
        yield data[len(data) // 2 :]

    return await weights.receive(version, index, chunks(), push_id)


# --- HTTP by hand -------------------------------------------------------------------------------------------------


async def lines(response: aiohttp.ClientResponse) -> list[Any]:
    """The frames of an NDJSON stream."""
    return [
        msgspec.json.decode(line, type=Frame) async for line in response.content if line.strip()
    ]


async def fault(response: aiohttp.ClientResponse, status: int, kind: str) -> Fault:
    """The fault of an error answer, whose status and kind must be these."""
    content_type = MSGPACK if response.content_type == MSGPACK else JSON
    error = decode(await response.read(), content_type, ErrorBody).error
    assert (response.status, error.kind) == (status, kind), error
    return error


async def post(http: aiohttp.ClientSession, url: str, request: RolloutRequest) -> list[Any]:
    """Sends a rollout request as JSON and reads all frames."""
    async with http.post(f"{url}/v1/rollouts", data=encode(request, JSON)) as response:
        assert response.status == 200, await response.text()
        return await lines(response)
