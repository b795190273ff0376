"""The engine on a real SGLang, on a GPU where there is one and on a CPU elsewhere. `make test-sglang` runs this.

Needs SGLang, torch and transformers; skipped where SGLang is not installed. On a CPU, SGLang also needs a stand-in for
its CUDA kernels: see tests/sglang/README.md.
"""

import asyncio
import importlib.util
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from rollout_sidecar.engines.base import GenerateRequest, WeightTensor
from rollout_sidecar.engines.sglang import SglangEngine, read_output
from rollout_sidecar.engines.sglang_setup import SglangOptions, check_version
from rollout_sidecar.protocol import SamplingParams

HAVE_SGLANG = importlib.util.find_spec("sglang") is not None
real = pytest.mark.skipif(not HAVE_SGLANG, reason="SGLang is not installed (make test-sglang)")
VOCAB, STOP = 512, 7
PROMPT = list(range(20, 60))

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # SGLang's own dependencies warn.
    pytest.mark.filterwarnings("ignore"),
]


def make_model(folder, seed=0):
    """A random Llama in a Hugging Face folder; returns it as transformers' float32 model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=STOP,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


def reference_log_probs(model, prompt, sampled, temperature=1.0):
    """float32 log-probs of `sampled` after `prompt`."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0].float() / temperature
    log_probs = torch.log_softmax(logits, -1)
    start = len(prompt) - 1
    return [log_probs[start + i, token].item() for i, token in enumerate(sampled)]


def pushed(model):
    """The model's weights as a push brings them."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            data = np.ascontiguousarray(tensor.numpy())
            view = memoryview(data.reshape(-1).view(np.uint8)).toreadonly()
            tensors[name] = WeightTensor(name, "float32", data.shape, view)
    return tensors


def request(number, prompt=PROMPT, **changes):
    made = GenerateRequest(
        trajectory_id=f"trajectory {number}",
        ordinal=number,
        token_ids=list(prompt),
        max_tokens=24,
        sampling=SamplingParams(),
        stop_ids=frozenset({STOP}),
        seed=number,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    if not HAVE_SGLANG:
        pytest.skip("SGLang is not installed (make test-sglang)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = tmp_path_factory.mktemp("sglang_model")
    return folder, make_model(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_folder):
    """The engine, started once, and the transformers model that it should agree with."""
    import torch

    folder, model = model_folder
    extra = {"max_total_tokens": 8192, "disable_cuda_graph": True}
    if torch.cuda.is_available():
        extra |= {"attention_backend": "triton", "disable_prefill_cuda_graph": True}
    else:
        extra |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
        }
    options = SglangOptions(
        dtype="float32", max_running=16, memory_fraction=0.2, bucket_bytes=2**17, extra=extra
    )
    engine = SglangEngine(str(folder), max_model_tokens=1024, options=options)
    await engine.start()
    yield engine, model
    await engine.close()


async def test_log_probs_are_those_of_the_weights(served):
    engine, model = served
    for number, temperature in enumerate((1.0, 0.7, 0.0)):
        sampling = SamplingParams(temperature=temperature)
        result = await engine.generate(request(number, sampling=sampling))
        expected = reference_log_probs(model, PROMPT, result.token_ids, temperature or 1.0)
        np.testing.assert_allclose(result.log_probs, expected, atol=1e-3)


async def test_a_second_turn_prefills_only_what_is_new(served):
    engine, _ = served
    first = await engine.generate(request(0, sampling=SamplingParams(temperature=0.0)))
    context = PROMPT + first.token_ids + [5, 6, 8]
    second = await engine.generate(request(0, context, sampling=SamplingParams(temperature=0.0)))
    # All but the last sampled token, whose keys and values are made with the next one's.
    assert second.cached_tokens >= len(PROMPT) + len(first.token_ids) - 1


async def test_the_stop_id_is_there_once(served):
    engine, _ = served
    results = await asyncio.gather(*(engine.generate(request(i, max_tokens=400)) for i in range(8)))
    stopped = [result for result in results if result.finish == "stop"]
    assert stopped, "400 tokens of a random model of 512 tokens nearly always hold one of them"
    for result in results:
        assert result.token_ids.count(STOP) == (result.finish == "stop")
        assert result.finish == "length" or result.token_ids[-1] == STOP
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
            np.testing.assert_allclose(result.log_probs[span.start : span.end], expected, atol=1e-3)
    # No prefix of the old version is read any more, and going back works as well.
    after = await engine.generate(request(9))
    expected = reference_log_probs(other, PROMPT, after.token_ids)
    np.testing.assert_allclose(after.log_probs, expected, atol=1e-3)
    await engine.load_weights(pushed(model), version + 1)
    back = await engine.generate(request(9))
    expected = reference_log_probs(model, PROMPT, back.token_ids)
    np.testing.assert_allclose(back.log_probs, expected, atol=1e-3)


async def test_only_what_changed_is_handed_over(served):
    engine, model = served
    before = engine.policy_version
    tensors = pushed(model)
    norm = tensors["model.norm.weight"]
    data = np.frombuffer(norm.data, np.float32) * np.float32(0.5)
    view = memoryview(data.view(np.uint8))
    halved = tensors | {"model.norm.weight": replace(norm, data=view)}
    await engine.load_weights(halved, before + 1, frozenset({"model.norm.weight"}))
    result = await engine.generate(request(0))
    expected = reference_log_probs(model, PROMPT, result.token_ids, temperature=2.0)
    np.testing.assert_allclose(result.log_probs, expected, atol=1e-3)
    await engine.load_weights(tensors, before + 2, frozenset({"model.norm.weight"}))


async def test_an_aborted_turn_keeps_what_it_has(served):
    engine, _ = served
    task = asyncio.create_task(engine.generate(request(1, max_tokens=900, stop_ids=frozenset())))
    await asyncio.sleep(0.5)
    await engine.abort("trajectory 1")
    result = await task
    if result.finish != "stop":  # the model's own end of sequence ends it too
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
    norm = tensors["model.norm.weight"]
    nan = np.full(128, math.nan, np.float32)
    bad = tensors | {"model.norm.weight": replace(norm, data=memoryview(nan.view(np.uint8)))}
    with pytest.raises(RuntimeError, match="give the log-prob"):
        await engine.load_weights(bad, version)
    with pytest.raises(RuntimeError, match="SGLang cannot generate: weights"):
        await engine.generate(request(0))
    await engine.load_weights(tensors, version + 1)
    result = await engine.generate(request(0))
    expected = reference_log_probs(model, PROMPT, result.token_ids)
    np.testing.assert_allclose(result.log_probs, expected, atol=1e-3)


# --- without SGLang -----------------------------------------------------------------------------------------------


def answer(pairs, reason):
    return {
        "meta_info": {
            "finish_reason": reason,
            "output_token_logprobs": [[log_prob, token, None] for token, log_prob in pairs],
            "cached_tokens": 3,
        }
    }


async def test_an_answer_is_read_with_its_stop_id_once():
    stop = {"type": "stop", "matched": 7}
    for tokens in ([4, 5, 7], [4, 5, 7, 7]):
        part = read_output(answer([(t, -0.5) for t in tokens], stop), frozenset({7}))
        assert (part.token_ids, part.log_probs) == ([4, 5, 7], [-0.5] * 3)
        assert (part.finish, part.cached_tokens) == ("stop", 3)
    with pytest.raises(RuntimeError, match="SGLang stopped at 7, which is not in its answer"):
        read_output(answer([(4, -0.5)], stop), frozenset({7}))


async def test_a_refusal_is_an_error_and_an_abort_is_not():
    refused = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(RuntimeError, match="SGLang refused the request: too long"):
        read_output(answer([], refused), frozenset({7}))
    part = read_output(answer([(4, -0.5)], {"type": "abort"}), frozenset({7}))
    assert (part.token_ids, part.finish) == ([4], "abort")


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "needs SGLang: pip install"), ("0.4.9", "SGLang 0.4.9 is installed, and this sidecar")],
)
async def test_other_releases_are_refused(monkeypatch, found, message):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(ValueError, match=message):
        check_version(any_version=False)
    if found:
        check_version(any_version=True)
