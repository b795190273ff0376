"""SGLang's own memory on a real SGLang: hashes of what it holds, and memory released for a trainer (GPU only)."""

import asyncio
import os

import numpy as np
import pytest
import pytest_asyncio
from sglang_cases import (
    PROMPT,
    assert_log_probs_agree,
    dtype,
    engine_extra,
    make_model,
    on_gpu,
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

pytestmark = [
    real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # SGLang's own dependencies warn.
    pytest.mark.filterwarnings("ignore"),
]

KEPT = []
"""SGLang leaves its sockets open: found as garbage when another engine is there, they would be a warning."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    """The engine, with a memory saver where it can have one, and the model that it serves."""
    os.environ.update(only_llama())
    folder = tmp_path_factory.mktemp("sglang_model")
    model = make_model(folder)
    options = SglangOptions(
        dtype=dtype(),
        max_running=16,
        memory_fraction=0.2,
        bucket_bytes=2**17,
        memory_saver=on_gpu(),
        # Its counters can be made once in a process, and other tests want them.
        extra=engine_extra() | {"enable_metrics": False} | all_of_its_memory(),
    )
    engine = SglangEngine(str(folder), max_model_tokens=1024, options=options)
    await engine.start()
    yield engine, model
    KEPT.append((engine._tokenizer_manager, engine._processes._engine))
    await engine.close()


def all_of_its_memory():
    """The KV cache takes its whole share of the GPU: a small one would free too little to be seen."""
    return {"max_total_tokens": None} if on_gpu() else {}


def only_on_gpu():
    if not on_gpu():
        pytest.skip("SGLang's memory saver needs CUDA")


async def hand_over(engine, name, array):
    """Changes one tensor in SGLang's processes, and nowhere else."""
    from rollout_sidecar.engines.sglang_weights import finish

    tensors = {name: pushed_tensor(name, array)}
    (bucket,) = await asyncio.to_thread(finish, None, tensors, 0, 2**20, engine._device)
    async with engine._weight_update():
        await engine._hand_over(bucket)


async def test_what_sglang_holds_is_what_was_pushed(served):
    engine, model = served
    tensors = pushed(model)
    assert await engine.altered_tensors(tensors) == []  # as it was loaded from the folder
    await engine.load_weights(tensors, engine.policy_version + 1)
    assert await engine.altered_tensors(tensors) == []


async def test_a_tensor_changed_behind_the_manifests_back_is_named(served):
    engine, model = served
    tensors, arrays = pushed(model), tensors_of(model)
    for name, found in (
        ("model.norm.weight", ["model.norm.weight"]),
        ("model.layers.1.self_attn.o_proj.weight", ["model.layers.1.self_attn.o_proj.weight"]),
        # Fused in SGLang: all three are told.
        (
            "model.layers.0.self_attn.k_proj.weight",
            [f"model.layers.0.self_attn.{part}_proj.weight" for part in "kqv"],
        ),
    ):
        await hand_over(engine, name, arrays[name] * np.float32(1.5))
        assert await engine.altered_tensors(tensors) == found
        await engine.load_weights(tensors, engine.policy_version + 1)
        assert await engine.altered_tensors(tensors) == []


async def test_without_a_memory_saver_it_says_what_to_do(served):
    engine, _ = served
    if engine.options.memory_saver:
        pytest.skip("this engine has one")
    with pytest.raises(NotImplementedError, match="start the sidecar with --memory_saver"):
        await engine.release_memory()
    assert engine.fault == ""


async def test_memory_is_released_and_comes_back_with_a_push(served):
    """Generations under way when the memory goes are there afterwards, with the tokens that they had."""
    import torch

    only_on_gpu()

    engine, model = served
    tensors, version = pushed(model), engine.policy_version
    running = [asyncio.create_task(engine.generate(request(i, max_tokens=400))) for i in range(4)]
    await asyncio.sleep(0.3)
    held = torch.cuda.mem_get_info()[0]
    await engine.release_memory()
    await engine.release_memory()
    freed = torch.cuda.mem_get_info()[0] - held
    assert freed > 0.1 * torch.cuda.mem_get_info()[1]  # of the 20 % that it had
    with pytest.raises(ValueError, match="POST /v1/engine/resume, then push"):
        await engine.load_weights(tensors, version + 1)
    await engine.resume_memory()
    await engine.resume_memory()
    assert torch.cuda.mem_get_info()[0] - held < 0.5 * freed
    assert not all(task.done() for task in running)
    # Only one tensor is said to have changed, but the engine has none.
    await engine.load_weights(tensors, version + 1, frozenset({"model.norm.weight"}))
    assert await engine.altered_tensors(tensors) == []
    for result in await asyncio.gather(*running):
        expected = reference_log_probs(model, PROMPT, result.token_ids)
        assert_log_probs_agree(result.log_probs, expected)
    for _ in range(3):
        await engine.release_memory()
        await engine.resume_memory()
        await engine.load_weights(tensors, engine.policy_version + 1)
    after = await engine.generate(request(9))
    expected = reference_log_probs(model, PROMPT, after.token_ids)
    assert_log_probs_agree(after.log_probs, expected)


async def test_what_comes_while_memory_is_released_waits(served):
    only_on_gpu()
    engine, model = served
    await engine.release_memory()
    waiting = asyncio.create_task(engine.generate(request(1)))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await engine.resume_memory()
    await engine.load_weights(pushed(model), engine.policy_version + 1)
    assert (await waiting).token_ids
