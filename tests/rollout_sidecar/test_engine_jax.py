"""The embedded engine on a tiny model: turns, aborts, weights, and what happens when its thread fails."""

import asyncio
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rollout_sidecar.engines.base import GenerateRequest, WeightTensor
from rollout_sidecar.engines.jax import JaxEngine
from rollout_sidecar.protocol import SamplingParams
from tooljax.model import hf
from tooljax.model.decoder import Decoder, DecoderConfig

CFG = DecoderConfig(
    family="llama",
    vocab=64,
    embed=16,
    layers=2,
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    ffw=32,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied_head=True,
    max_positions=512,
    dtype="float32",
)
PROMPT = [5, 9, 33, 2, 60, 21]


@cache
def decoder(seed: int = 0) -> Decoder:
    return Decoder(CFG, rngs=nnx.Rngs(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return hf.save(decoder(), tmp_path_factory.mktemp("model"))


@pytest.fixture
async def engine(folder):
    engine = make_engine(folder)
    await engine.start()
    yield engine
    await engine.close()


def make_engine(folder: Path) -> JaxEngine:
    return JaxEngine(str(folder), dtype="float32", slots=3, max_model_tokens=400)


def request(name: str = "a", tokens=PROMPT, *, max_tokens: int = 10, **options) -> GenerateRequest:
    return GenerateRequest(
        trajectory_id=name,
        ordinal=0,
        token_ids=tokens,
        max_tokens=max_tokens,
        sampling=options.pop("sampling", SamplingParams()),
        stop_ids=options.pop("stop_ids", frozenset()),
        seed=options.pop("seed", 3),
        **options,
    )


def endless(name: str) -> GenerateRequest:
    """A turn that runs until something stops it: nothing does before 390 tokens."""
    return request(name, max_tokens=390)


def tensors_of(seed: int, dtype: str = "float32", factor: float = 1.0) -> dict[str, WeightTensor]:
    tensors = {}
    for name, tensor in hf.to_hf(CFG, decoder(seed)):
        data = (np.asarray(tensor) * np.float32(factor)).astype(jnp.dtype(dtype))
        tensors[name] = WeightTensor(name, dtype, data.shape, memoryview(data.tobytes()))
    return tensors


async def until_running(engine: JaxEngine, turns: int) -> None:
    while engine._sampler.running < turns:
        await asyncio.sleep(0.001)


async def test_a_turn_and_the_next(engine):
    assert engine.vocab_size == 64
    first = await engine.generate(request())
    assert (first.finish, len(first.token_ids), len(first.log_probs)) == ("length", 10, 10)
    assert (first.policy_version, first.cached_tokens) == (0, 0)
    context = [*PROMPT, *first.token_ids, 7, 8]
    second = await engine.generate(request(tokens=context, seed=4))
    assert second.cached_tokens == len(PROMPT) + 9
    stop = second.token_ids[2]
    await engine.release("a")
    ended = await engine.generate(request("b", tokens=context, seed=4, stop_ids=frozenset({stop})))
    assert ended.finish == "stop"
    assert ended.token_ids == second.token_ids[: second.token_ids.index(stop) + 1]


async def test_sampling_parameters_arrive(engine):
    greedy = await engine.generate(request("a", sampling=SamplingParams(temperature=0)))
    top_1 = await engine.generate(request("b", sampling=SamplingParams(top_k=1)))
    top_p = await engine.generate(request("c", sampling=SamplingParams(top_p=1e-6)))
    assert greedy.token_ids == top_1.token_ids == top_p.token_ids
    assert top_1.log_probs == top_p.log_probs == [0.0] * 10
    assert max(greedy.log_probs) < 0


async def test_many_at_once_give_what_each_gives_alone(engine):
    alone = {}
    for i in range(8):
        alone[i] = await engine.generate(request(str(i), seed=i))
        await engine.release(str(i))

    async def late(i: int):
        await asyncio.sleep(0.003 * (7 - i))
        result = await engine.generate(request(str(i), seed=i))
        await engine.release(str(i))
        return result

    assert await asyncio.gather(*(late(i) for i in range(8))) == list(alone.values())


async def test_a_context_too_long_is_the_callers_mistake(engine):
    with pytest.raises(ValueError, match="context of 400 tokens: the engine takes 1 to 399"):
        await engine.generate(request(tokens=[1] * 400))
    assert (await engine.generate(request())).finish == "length"


async def test_abort_ends_the_running_turn(engine):
    whole = await engine.generate(endless("whole"))
    running = asyncio.create_task(engine.generate(endless("a")))
    await until_running(engine, 1)
    await engine.abort("a")
    await engine.abort("unknown")
    result = await running
    assert result.finish == "aborted"
    assert len(result.token_ids) < 390
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]


async def test_cancelling_the_call_aborts_the_turn(engine):
    running = asyncio.create_task(engine.generate(endless("a")))
    await until_running(engine, 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    again = await engine.generate(request("a"))  # the same trajectory is free for another turn
    assert again.finish == "length"


async def test_a_released_slot_goes_to_the_next_in_line(engine):
    for name in "abc":
        await engine.generate(request(name))
    waiting = asyncio.create_task(engine.generate(request("d")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await engine.release("b")
    assert (await waiting).finish == "length"


async def test_new_weights_serve_as_if_they_had_been_loaded(engine, tmp_path):
    before = await engine.generate(request())
    await engine.load_weights(tensors_of(1), policy_version=4)
    assert engine.policy_version == 4
    after = await engine.generate(request())
    other = make_engine(hf.save(decoder(1), tmp_path / "other"))
    await other.start()
    fresh = await other.generate(request())
    await other.close()
    assert (after.policy_version, after.cached_tokens) == (4, 0)
    assert (after.token_ids, after.log_probs) == (fresh.token_ids, fresh.log_probs)
    assert after.log_probs != before.log_probs


async def test_running_turns_end_under_the_old_weights_and_later_ones_wait(engine):
    whole = await engine.generate(endless("whole"))
    running = asyncio.create_task(engine.generate(endless("a")))
    await until_running(engine, 1)
    loading = asyncio.create_task(engine.load_weights(tensors_of(1), policy_version=1))
    while not engine._sampler.paused:  # the weights are on the device, and wait for the turn to end
        await asyncio.sleep(0)
    waiting = asyncio.create_task(engine.generate(request("b")))
    old, new, _ = await asyncio.gather(running, waiting, loading)
    assert (old.policy_version, old.log_probs) == (0, whole.log_probs)
    assert new.policy_version == 1
    assert engine.swap_s["pause"] > 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors missing"),
        (lambda t: t.update(tensors_of(1, "bfloat16")), "is bfloat16 .* the model takes float32"),
        (
            lambda t: t.update(
                {"model.norm.weight": WeightTensor("x", "float32", (16,), memoryview(b"1234"))}
            ),
            "tensor x has 4 bytes; float32 .16. takes 64",
        ),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(engine, spoil, message):
    before = await engine.generate(request("a"))
    tensors = tensors_of(1)
    spoil(tensors)
    with pytest.raises(ValueError, match=message):
        await engine.load_weights(tensors, policy_version=1)
    assert engine.policy_version == 0
    after = await engine.generate(request("b"))
    assert after.log_probs == before.log_probs


async def test_weights_that_give_nan_are_reported_not_served(engine):
    await engine.load_weights(tensors_of(0, factor=float("nan")), policy_version=1)
    with pytest.raises(RuntimeError, match="log-probs are not finite: weights 1 hold or give inf"):
        await engine.generate(request("a"))
    await engine.load_weights(tensors_of(0), policy_version=2)
    assert np.isfinite((await engine.generate(request("a"))).log_probs).all()


async def test_a_failure_of_the_thread_reaches_everyone_who_waits(engine, monkeypatch):
    calls = [asyncio.create_task(engine.generate(endless(name))) for name in "abcd"]
    await until_running(engine, 3)

    def fail():
        raise MemoryError("the device is full")

    monkeypatch.setattr(engine._sampler, "_sample", fail)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in results] == ["the device is full"] * 4
    with pytest.raises(RuntimeError, match="the embedded engine has stopped: the device is full"):
        await engine.generate(request())


async def test_close_ends_turns_as_aborted(folder):
    engine = make_engine(folder)
    await engine.start()
    calls = [asyncio.create_task(engine.generate(endless(name))) for name in "abcd"]
    await until_running(engine, 3)
    await engine.close()
    assert [(await call).finish for call in calls] == ["aborted"] * 4
    await engine.close()
    await engine.abort("a")
    with pytest.raises(RuntimeError, match="the embedded engine has stopped: it was closed"):
        await engine.generate(request())


async def test_close_before_and_during_start(folder):
    await make_engine(folder).close()
    engine = make_engine(folder)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    await engine.close()
    assert engine._thread is not None
    assert not engine._thread.is_alive()


async def test_a_model_that_cannot_be_loaded_fails_the_start(tmp_path):
    engine = make_engine(tmp_path / "nothing")
    with pytest.raises((OSError, ValueError), match="nothing"):
        await engine.start()
    await engine.close()
