"""Engines behind one sidecar, with scripted ones in their places. tests/sglang has real ones."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from rollout_sidecar.engines.base import GenerateRequest, WeightTensor
from rollout_sidecar.engines.replicated import ReplicatedEngine
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.protocol import SamplingParams

ZEROS = np.zeros(2, np.float32).view(np.uint8).data
WEIGHTS = {name: WeightTensor(name, "float32", (2,), ZEROS) for name in ("a", "b")}


@dataclass
class Log:
    """What happened to the engines, in order."""

    events: list[str] = field(default_factory=list)
    refusals: dict[str, Exception] = field(default_factory=dict)
    """What an engine raises at the next push."""


class Copy(ScriptedEngine):
    """A scripted engine that tells what is asked of it."""

    def __init__(self, name, log, tokenizer):
        super().__init__(tokenizer, [f"said by {name}"] * 9)
        self.label, self.log, self.changed = name, log, frozenset()
        self.altered: list[str] | None = []

    async def start(self):
        self.log.events.append(f"{self.label} starts")
        await asyncio.sleep(0)
        if error := self.log.refusals.pop(f"start {self.label}", None):
            raise error
        self.log.events.append(f"{self.label} started")

    async def close(self):
        self.log.events.append(f"{self.label} closed")

    async def load_weights(self, tensors, policy_version, changed=None):
        if error := self.log.refusals.pop(self.label, None):
            raise error
        self.changed = changed
        self.swap_s = {"pause": 0.1 if self.label == "left" else 0.3}
        await super().load_weights(tensors, policy_version, changed)

    async def altered_tensors(self, tensors):
        return self.altered


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def pair(log, tiny_tokenizer):
    return ReplicatedEngine([Copy(name, log, tiny_tokenizer) for name in ("left", "right")])


def request(name):
    return GenerateRequest(
        trajectory_id=name,
        ordinal=0,
        token_ids=[1, 2],
        max_tokens=100,
        sampling=SamplingParams(),
        stop_ids=frozenset({2}),
        seed=0,
    )


async def test_trajectories_stay_where_they_began_and_are_shared_out_evenly(pair, tiny_tokenizer):
    async def who(name):
        result = await pair.generate(request(name))
        return tiny_tokenizer.decode(result.token_ids).removesuffix("<|im_end|>").split()[-1]

    first = {name: await who(name) for name in "abcd"}
    assert sorted(first.values()) == ["left", "left", "right", "right"]
    assert {name: await who(name) for name in "abcd"} == first
    # The two on the left end: the next two go there.
    for name in [name for name, where in first.items() if where == "left"]:
        await pair.release(name)
    assert [await who(name) for name in "ef"] == ["left", "left"]
    assert pair.engines[0].released == [name for name in "abcd" if first[name] == "left"]


async def test_an_abort_reaches_the_engine_that_generates(log, tiny_tokenizer):
    slow = [Copy(name, log, tiny_tokenizer) for name in ("left", "right")]
    for engine in slow:
        engine.delay_s = 30
    pair = ReplicatedEngine(slow)
    running = [asyncio.create_task(pair.generate(request(name))) for name in "ab"]
    await asyncio.sleep(0.01)
    await pair.abort("b")
    await pair.abort("unknown")
    assert (await running[1]).finish == "aborted"
    assert not running[0].done()
    await pair.abort("a")
    assert (await running[0]).finish == "aborted"


async def test_they_start_one_after_the_other_and_all_or_none(pair, log):
    await pair.start()
    assert log.events == ["left starts", "left started", "right starts", "right started"]
    log.events.clear()
    log.refusals["start right"] = ValueError("SGLang did not start")
    with pytest.raises(ValueError, match="SGLang did not start"):
        await pair.start()
    assert log.events == [
        "left starts",
        "left started",
        "right starts",
        "left closed",
        "right closed",
    ]
    with pytest.raises(ValueError, match="needs at least one engine"):
        ReplicatedEngine([])


async def test_weights_go_to_all(pair):
    await pair.load_weights(WEIGHTS, 3, frozenset({"a"}))
    assert [engine.policy_version for engine in (pair, *pair.engines)] == [3, 3, 3]
    assert [engine.changed for engine in pair.engines] == [{"a"}, {"a"}]
    assert pair.swap_s == {"pause": 0.3}


async def test_what_is_staged_early_goes_to_all(pair, log):
    added = []

    class Staging:
        def add(self, tensors):
            added.append([tensor.name for tensor in tensors])

        def drop(self):
            added.append("dropped")

    for engine in pair.engines:
        engine.begin_staging = lambda tensors, version: Staging()
    staging = pair.begin_staging(list(WEIGHTS.values()), 1)
    staging.add(list(WEIGHTS.values()))
    staging.drop()
    assert added == [list(WEIGHTS), list(WEIGHTS), "dropped", "dropped"]
    log.refusals["right"] = RuntimeError("the swap failed half way")
    with pytest.raises(RuntimeError, match="1 of 2 engines took"):
        await pair.load_weights(WEIGHTS, 1, frozenset({"a"}))
    assert pair.begin_staging(list(WEIGHTS.values()), 1) is None  # all must load everything


async def test_what_all_refuse_changes_nothing(pair, log):
    log.refusals = {name: ValueError("the model has no tensor b") for name in ("left", "right")}
    with pytest.raises(ValueError, match="the model has no tensor b"):
        await pair.load_weights(WEIGHTS, 1)
    assert (pair.policy_version, pair.fault) == (0, "")
    assert (await pair.generate(request("a"))).policy_version == 0


async def test_half_a_push_stops_everything_until_all_have_the_same(pair, log):
    log.refusals["right"] = RuntimeError("the swap failed half way")
    with pytest.raises(RuntimeError, match=r"1 of 2 engines took version 1: push again \(the swap"):
        await pair.load_weights(WEIGHTS, 1, frozenset({"a"}))
    assert pair.policy_version == 0
    assert pair.fault == "1 of 2 engines took version 1: push again"
    with pytest.raises(RuntimeError, match="nothing can be generated: 1 of 2 engines took version"):
        await pair.generate(request("a"))
    # They do not hold the same any more: what changed since the last good push is not enough.
    await pair.load_weights(WEIGHTS, 1, frozenset({"a"}))
    assert [engine.changed for engine in pair.engines] == [None, None]
    assert (pair.policy_version, pair.fault) == (1, "")


async def test_the_fault_of_one_is_the_fault_of_all(pair):
    pair.engines[1].fault = "it was closed"
    assert pair.fault == "engine 2 of 2: it was closed"
    with pytest.raises(RuntimeError, match="engine 2 of 2: it was closed"):
        await pair.generate(request("a"))


async def test_tensors_that_any_of_them_holds_otherwise_are_told(pair):
    left, right = pair.engines
    assert await pair.altered_tensors(WEIGHTS) == []
    left.altered, right.altered = ["b"], ["a", "b"]
    assert await pair.altered_tensors(WEIGHTS) == ["a", "b"]
    right.altered = None
    assert await pair.altered_tensors(WEIGHTS) is None


async def test_memory_is_released_everywhere(pair):
    await pair.release_memory()
    assert [engine.released_memory for engine in pair.engines] == [True, True]
    assert "its memory is released" in pair.fault
    await pair.resume_memory()
    await pair.load_weights(WEIGHTS, 1)
    assert pair.fault == ""
