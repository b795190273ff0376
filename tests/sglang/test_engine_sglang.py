"""The engine on a real SGLang, on a GPU where there is one and on a CPU elsewhere. `make test-sglang` runs this.

Needs SGLang, torch and transformers; skipped where SGLang is not installed. On a CPU, SGLang also needs a stand-in for
its CUDA kernels: see tests/sglang/README.md.
"""

import asyncio
import math
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from sglang_cases import (
    PROMPT,
    STOP,
    assert_log_probs_agree,
    dtype,
    engine_extra,
    make_model,
    only_llama,
    pushed,
    pushed_tensor,
    real,
    reference_log_probs,
    request,
    tensors_of,
)

from rollout_sidecar.engines.sglang import SglangEngine
from rollout_sidecar.engines.sglang_setup import SglangOptions
from rollout_sidecar.protocol import SamplingParams

pytestmark = [
    real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # SGLang's own dependencies warn.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    os.environ.update(only_llama())
    folder = tmp_path_factory.mktemp("sglang_model")
    return folder, make_model(folder)


def options(**changes):
    made = {"max_running": 16, "memory_fraction": 0.2, "bucket_bytes": 2**17}
    return SglangOptions(dtype=dtype(), extra=engine_extra(), **(made | changes))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_folder):
    """The engine, started once, and the transformers model that it should agree with."""
    folder, model = model_folder
    failures = []
    engine = SglangEngine(
        str(folder), max_model_tokens=1024, options=options(), on_failure=failures.append
    )
    await engine.start()
    yield engine, model
    await engine.close()
    if failures:
        print(*engine.log_lines(), sep="\n", file=sys.stderr)
    assert not failures


def assert_log_probs(result, model, prompt=PROMPT, **sampling):
    expected = reference_log_probs(model, prompt, result.token_ids, **sampling)
    assert_log_probs_agree(result.log_probs, expected)


async def test_log_probs_are_those_of_the_weights(served):
    engine, model = served
    for number, temperature in enumerate((1.0, 0.7, 0.0)):
        sampling = SamplingParams(temperature=temperature)
        result = await engine.generate(request(number, sampling=sampling))
        assert_log_probs(result, model, temperature=temperature or 1.0)


async def test_tools_can_start_processes_beside_it(served):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    assert await process.wait() == 0


async def test_log_probs_of_a_cut_distribution_are_renormalised(served):
    engine, model = served
    for top_k, top_p in ((3, 1.0), (20, 0.6)):
        sampling = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p)
        result = await engine.generate(request(0, sampling=sampling))
        assert_log_probs(result, model, temperature=0.7, top_k=top_k, top_p=top_p)
        untouched = reference_log_probs(model, PROMPT, result.token_ids, temperature=0.7)
        assert np.mean(result.log_probs) > np.mean(untouched) + 0.05


async def test_a_cut_whose_log_probs_sglang_does_not_give_is_refused(served):
    engine, _ = served
    with pytest.raises(ValueError, match=r"top_p=0\.9 without a top_k: .* set sampling\.top_k too"):
        await engine.generate(request(0, sampling=SamplingParams(top_p=0.9)))
    greedy = SamplingParams(temperature=0.0, top_p=0.9)  # top_p changes nothing
    assert (await engine.generate(request(0, sampling=greedy))).token_ids


async def test_a_second_turn_prefills_only_what_is_new(served):
    engine, _ = served
    first = await engine.generate(request(0, sampling=SamplingParams(temperature=0.0)))
    context = PROMPT + first.token_ids + [5, 6, 8]
    second = await engine.generate(request(0, context, sampling=SamplingParams(temperature=0.0)))
    # All but the last sampled token, whose keys and values are made with the next one's.
    assert second.cached_tokens >= len(PROMPT) + len(first.token_ids) - 1


async def test_the_stop_id_is_there_once(served):
    engine, _ = served
    stops = frozenset(range(STOP, STOP + 32))  # so many that turns are short
    requests = [request(i, max_tokens=100, stop_ids=stops) for i in range(8)]
    results = await asyncio.gather(*map(engine.generate, requests))
    assert "stop" in {result.finish for result in results}
    for result in results:
        found = [token for token in result.token_ids if token in stops]
        assert found == ([result.token_ids[-1]] if result.finish == "stop" else [])
        assert len(result.log_probs) == len(result.token_ids)


async def test_weights_are_swapped_between_two_tokens(served, tmp_path):
    engine, model = served
    other = make_model(tmp_path, seed=1)
    version = engine.policy_version + 1
    running = [
        asyncio.create_task(engine.generate(request(i, max_tokens=300, stop_ids=frozenset({STOP}))))
        for i in range(4)
    ]
    await asyncio.sleep(0.5)
    await engine.load_weights(pushed(other), version)
    for result in await asyncio.gather(*running):
        spans = result.version_spans
        assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert (spans[0].start, spans[-1].end) == (0, len(result.token_ids))
        for span in spans:
            weights = other if span.policy_version == version else model
            context = PROMPT + result.token_ids[: span.start]
            tokens = result.token_ids[span.start : span.end]
            expected = reference_log_probs(weights, context, tokens)
            assert_log_probs_agree(result.log_probs[span.start : span.end], expected)
    # No prefix of the old version is read any more, and going back works as well.
    after = await engine.generate(request(9))
    assert_log_probs(after, other)
    await engine.load_weights(pushed(model), version + 1)
    back = await engine.generate(request(9))
    assert_log_probs(back, model)


async def test_only_what_changed_is_handed_over(served):
    engine, model = served
    before = engine.policy_version
    tensors = pushed(model)
    norm = tensors_of(model)["model.norm.weight"]
    halved = tensors | {"model.norm.weight": pushed_tensor("model.norm.weight", norm * 0.5)}
    await engine.load_weights(halved, before + 1, frozenset({"model.norm.weight"}))
    result = await engine.generate(request(0))
    assert_log_probs(result, model, temperature=2.0)
    await engine.load_weights(tensors, before + 2, frozenset({"model.norm.weight"}))


async def test_an_aborted_turn_keeps_what_it_has(served):
    engine, _ = served
    task = asyncio.create_task(engine.generate(request(1, max_tokens=900, stop_ids=frozenset())))
    await asyncio.sleep(0.5)
    await engine.abort("trajectory 1")
    result = await task  # without stop ids, the model's own end of sequence ends nothing
    assert result.finish == "aborted"
    assert 0 < len(result.token_ids) < 900


async def test_a_cancelled_turn_leaves_nothing(served):
    engine, _ = served
    task = asyncio.create_task(engine.generate(request(1, max_tokens=900)))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine._turns == {}
    assert (await engine.generate(request(2))).token_ids


async def test_what_does_not_fit_changes_nothing(served):
    engine, model = served
    before = engine.policy_version
    tensors = pushed(model)
    short = {name: tensor for name, tensor in tensors.items() if "norm" not in name}
    with pytest.raises(ValueError, match="tensors of the model are missing, the first is model"):
        await engine.load_weights(short, before + 1)
    with pytest.raises(ValueError, match=r"the model has no tensor model\.extra"):
        await engine.load_weights(
            tensors | {"model.extra": tensors["model.norm.weight"]}, before + 1
        )
    wrong = tensors | {"model.norm.weight": replace(tensors["model.norm.weight"], shape=(2, 64))}
    with pytest.raises(ValueError, match=r"the shape \[2, 64\], the model's is \[128\]"):
        await engine.load_weights(wrong, before + 1)
    assert engine.policy_version == before
    assert (await engine.generate(request(0))).token_ids


async def test_weights_that_are_not_finite_are_refused_until_better_ones_come(served):
    engine, model = served
    version = engine.policy_version + 1
    tensors = pushed(model)
    nan = pushed_tensor("model.norm.weight", np.full(128, math.nan))
    bad = tensors | {"model.norm.weight": nan}
    with pytest.raises(RuntimeError, match="give the log-prob"):
        await engine.load_weights(bad, version)
    with pytest.raises(RuntimeError, match="SGLang cannot generate: weights"):
        await engine.generate(request(0))
    await engine.load_weights(tensors, version + 1)
    result = await engine.generate(request(0))
    assert_log_probs(result, model)


async def test_closing_ends_what_runs_as_aborted(served):
    """The last of this file: the engine is gone afterwards."""
    engine, model = served
    endless = [request(i, max_tokens=900, stop_ids=frozenset()) for i in range(4)]
    running = [asyncio.create_task(engine.generate(each)) for each in endless]
    await asyncio.sleep(0.5)
    await engine.close()
    for result in await asyncio.gather(*running):
        assert result.finish == "aborted"
        assert 0 < len(result.token_ids) < 900
        assert_log_probs(result, model)
    with pytest.raises(RuntimeError, match="SGLang cannot generate: it was closed"):
        await engine.generate(request(0))
