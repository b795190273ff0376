"""The scripted engine behaves as engines/base.py says an engine does."""

import asyncio

import pytest

from rollout_sidecar.engines.base import GenerateRequest, WeightTensor
from rollout_sidecar.engines.scripted import ScriptedEngine, scripted_log_prob
from rollout_sidecar.protocol import SamplingParams


def request(trajectory_id="a", **kwargs):
    fields = {
        "ordinal": 0,
        "token_ids": [1, 2],
        "max_tokens": 100,
        "sampling": SamplingParams(),
        "stop_ids": frozenset({2}),
        "seed": 0,
    }
    return GenerateRequest(trajectory_id=trajectory_id, **{**fields, **kwargs})


async def test_texts_are_played_by_turn_and_end_with_the_end_of_turn(tiny_tokenizer):
    engine = ScriptedEngine(tiny_tokenizer, ["one", "two"])
    results = [await engine.generate(request(id)) for id in ("a", "b", "a")]
    for result, text in zip(results, ["one", "one", "two"], strict=True):
        assert result.token_ids == [*tiny_tokenizer.encode(text), tiny_tokenizer.end_of_turn_id]
        assert result.finish == "stop"
        assert result.log_probs == [scripted_log_prob(id) for id in result.token_ids]
    with pytest.raises(ValueError, match="the script has 2 turns, and turn 3 was asked"):
        await engine.generate(request("a"))
    await engine.release("a")
    assert tiny_tokenizer.decode((await engine.generate(request("a"))).token_ids) == "one<|im_end|>"


async def test_a_function_sees_the_request_and_the_turn(tiny_tokenizer):
    engine = ScriptedEngine(tiny_tokenizer, lambda request, turn: f"{request.seed}/{turn}")
    await engine.generate(request(seed=5))
    result = await engine.generate(request(seed=6))
    assert tiny_tokenizer.decode(result.token_ids) == "6/1<|im_end|>"


async def test_the_token_limit_cuts_and_an_exact_fit_stops(tiny_tokenizer):
    engine = ScriptedEngine(tiny_tokenizer, ["abc"] * 2)
    exact = await engine.generate(request(max_tokens=4))
    assert (len(exact.token_ids), exact.finish) == (4, "stop")
    cut = await engine.generate(request(max_tokens=3))
    assert (tiny_tokenizer.decode(cut.token_ids), cut.finish) == ("abc", "length")


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_an_abort_ends_the_generation_that_runs(tiny_tokenizer, how):
    engine = ScriptedEngine(tiny_tokenizer, ["abc"], delay_s=30)
    running = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0.01)
    await (engine.abort("a") if how == "abort" else engine.close())
    result = await running
    assert (result.finish, result.token_ids) == ("aborted", [])
    await engine.abort("unknown")


async def test_new_weights_are_the_version_of_what_comes_after(tiny_tokenizer):
    engine = ScriptedEngine(tiny_tokenizer, ["a", "b"])
    assert (await engine.generate(request())).policy_version == 0
    await engine.load_weights({"w": WeightTensor("w", "float32", (1,), memoryview(b"1234"))}, 3)
    assert (await engine.generate(request())).policy_version == 3
    assert engine.loaded == ["w"]
