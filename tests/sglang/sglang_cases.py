"""What the tests on a real SGLang share: a small random model, and the settings that fit this machine."""

import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_sidecar.engines.base import GenerateRequest, WeightTensor
from rollout_sidecar.protocol import SamplingParams

VOCAB, STOP = 512, 7
PROMPT = list(range(20, 60))


def have_sglang() -> bool:
    """Not importlib.util.find_spec: it would find this folder."""
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def only_llama() -> dict[str, str]:
    """Environment in which SGLang imports one model family of its 239: some seconds a start."""
    models = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang/srt/models")))
    names = {file.stem for file in models.glob("*.py")} - {"__init__", "llama", "registry"}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(names)), "HF_HUB_OFFLINE": "1"}


real = pytest.mark.skipif(not have_sglang(), reason="SGLang is not installed (make test-sglang)")


def dtype() -> str:
    """float32 where the arithmetic allows a close comparison. SGLang's GPU kernels are made for bfloat16."""
    return "bfloat16" if on_gpu() else "float32"


def assert_log_probs_agree(found: Sequence[float], expected: Sequence[float]) -> None:
    """Those of an engine and those of the float32 reference, for the same tokens.

    On a CPU 1.3e-5 was measured. In bfloat16 a logit of 30 is rounded by 0.06, and where a cut falls between two tokens
    of nearly equal rank the reference may have none: most must be near, not all. Other weights are off by nats.
    """
    assert len(found) == len(expected)
    off = np.abs(np.asarray(found) - np.asarray(expected))
    if not on_gpu():
        assert np.all(off <= 1e-3), f"off by up to {off.max()} nats"
        return
    assert np.median(off) <= 0.1, f"off by {np.median(off)} nats in the median"
    assert np.mean(off <= 0.3) >= 0.9, f"of {len(off)} log-probs off: {np.sort(off)[::-1][:20]}"


def engine_extra() -> dict[str, Any]:
    """More arguments of sglang.Engine: small pools; on a CPU, what SGLang has for CPUs. Others by an environment
    variable, TOOLJAX_TEST_SGLANG_ARGS, as JSON."""
    extra: dict[str, Any] = {"max_total_tokens": 8192, "disable_cuda_graph": True}
    if not on_gpu():
        extra |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
        }
    return extra | json.loads(os.environ.get("TOOLJAX_TEST_SGLANG_ARGS", "{}"))


def make_model(
    folder: Path,
    *,
    vocab: int = VOCAB,
    stop: int = STOP,
    seed: int = 0,
    scale: float = 0.2,
    alter: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> Any:
    """A random Llama in a Hugging Face folder, in the dtype that is served; returns it as transformers' float32 model.

    Its weights are bfloat16 numbers in any case: what is served and what is compared with are the same.

    Args:
        scale: standard deviation of the weights.
        alter: changes the arrays before they are rounded. The head is one of them then; else it is tied.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=alter is None,
        bos_token_id=1,
        eos_token_id=stop,
        pad_token_id=None,
        initializer_range=scale,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        if alter is not None:
            alter({name: each.numpy() for name, each in model.state_dict().items()})
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    stored = {name: each.to(getattr(torch, dtype())) for name, each in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=stored, safe_serialization=True)
    return model


def reference_log_probs(
    model: Any,
    prompt: Sequence[int],
    sampled: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[float]:
    """float32 log-probs of `sampled` after `prompt`, under the distribution that they are sampled from."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0].float() / temperature
    log_probs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    if top_k or top_p < 1:
        ordered, order = log_probs.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = (before <= top_p) & (torch.arange(ordered.shape[-1]) < (top_k or ordered.shape[-1]))
        cut = torch.log_softmax(ordered.masked_fill(~kept, -torch.inf), -1)
        log_probs = torch.empty_like(cut).scatter_(-1, order, cut)
    return [log_probs[i, token].item() for i, token in enumerate(sampled)]


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """NumPy float32 arrays under their Hugging Face names."""
    tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
    return {name: each.numpy() for name, each in model.state_dict().items() if name != tied}


def pushed(model: Any) -> dict[str, WeightTensor]:
    """The model's weights as a push brings them."""
    return {name: pushed_tensor(name, array) for name, array in tensors_of(model).items()}


def pushed_tensor(name: str, array: np.ndarray) -> WeightTensor:
    data = np.ascontiguousarray(array, np.float32)
    return WeightTensor(name, "float32", data.shape, data.reshape(-1).view(np.uint8).data)


def request(number: int, prompt: Sequence[int] = PROMPT, **changes: Any) -> GenerateRequest:
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
