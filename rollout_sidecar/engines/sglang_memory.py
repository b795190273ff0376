"""The memory of SGLang's processes: given up and taken again, and compared with the weights that were handed over.

Releasing kills SGLang (0.5.17 to 0.5.23) unless it is idle: the engine sees to that before it calls `release`.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from rollout_sidecar.engines.base import EMPTY, RELEASED, WeightTensor
from rollout_sidecar.engines.sglang_setup import SglangOptions, sglang_module

__all__ = ["EMPTY", "RELEASED", "altered", "check_can_release", "release", "resume"]

_log = logging.getLogger(__name__)

_IO = "srt.managers.io_struct"

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""What SGLang keeps as one tensor, rows below rows."""

LEAST_FREED = 0.01
"""Of the device's memory: an engine that serves holds more than this of it."""

VOCAB_PADDING = 64
"""Embedding and head are filled up with zeros to a multiple of so many rows."""


def check_can_release(options: SglangOptions) -> None:
    """NotImplementedError unless SGLang was started for it."""
    if not options.memory_saver:
        raise NotImplementedError(
            "SGLang cannot give its memory up: start the sidecar with --memory_saver (torch_memory_saver installed), "
            "or set sidecar.share_gpu = false"
        )


async def release(manager: Any) -> None:
    """Frees weights, KV cache and CUDA graphs, and what this process has kept for staging."""
    before = await asyncio.to_thread(free_memory)
    request = sglang_module(_IO).ReleaseMemoryOccupationReqInput()
    await manager.release_memory_occupation(request, None)
    await asyncio.to_thread(_free_staging)
    warn_if_kept(before, await asyncio.to_thread(free_memory))


async def resume(manager: Any) -> None:
    """Takes them again. The weights are garbage."""
    request = sglang_module(_IO).ResumeMemoryOccupationReqInput()
    await manager.resume_memory_occupation(request, None)


def warn_if_kept(before: tuple[int, int], after: tuple[int, int]) -> None:
    """Says so where SGLang took the request and kept its memory. Both are (free, all) bytes of the device."""
    freed, total = after[0] - before[0], before[1]
    if freed < LEAST_FREED * total:
        _log.warning(
            "SGLang said that it released its memory, and %d MiB of the device's %d MiB became free: "
            "torch_memory_saver has no effect in its processes. Unset PYTORCH_CUDA_ALLOC_CONF if it has "
            "expandable_segments, look for LD_PRELOAD in what SGLang's processes print, or give the trainer room with "
            "--memory_fraction and set sidecar.share_gpu = False",
            freed // 2**20,
            total // 2**20,
        )


def free_memory() -> tuple[int, int]:
    """Bytes of the device that are free, and all of them; zeros where there is no GPU."""
    import torch

    return torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)


def _free_staging() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


async def altered(
    manager: Any, tensors: Mapping[str, WeightTensor], dtype: str, device: str
) -> list[str] | None:
    """Names of tensors whose bytes in SGLang's memory are not those given; None if it cannot be known.

    SGLang hashes its parameters, and the same hash is made here of what they should be, fused and padded as it does it.
    On one GPU only: with more, each holds a part.
    """
    answer = await manager.check_weights(
        sglang_module(_IO).CheckWeightsReqInput(action="checksum"), None
    )
    success, message, ranks = answer[:3]
    if not success or not ranks or len(ranks) != 1:
        _log.warning("SGLang cannot tell which weights it holds: %s", message)
        return None
    held = ranks[0]["checksums"]
    expected = await asyncio.to_thread(_checksums, tensors, held, dtype, device)
    wrong = [name for name, digest in expected.items() if digest != held[name]]
    if 2 * len(wrong) > len(expected):
        # Rather packed or quantised than altered: that says nothing about the weights.
        _log.warning("SGLang keeps %d of %d tensors in a form of its own", len(wrong), len(held))
        return None
    return sorted(name for fused in wrong for name in parts_of(fused) if name in tensors)


def parts_of(name: str) -> list[str]:
    """Hugging Face's names of what SGLang calls so."""
    for fused, parts in FUSED.items():
        if fused in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def _checksums(
    tensors: Mapping[str, WeightTensor], names: Mapping[str, str], dtype: str, device: str
) -> dict[str, str]:
    """The hash that each of SGLang's tensors should have, of those that were pushed."""
    import torch

    from rollout_sidecar.engines.sglang_weights import DTYPES, as_bytes

    tensor_hash = sglang_module("srt.managers.mm_utils").tensor_hash
    expected = {}
    for name in names:
        parts = [tensors[part] for part in parts_of(name) if part in tensors]
        if len(parts) != len(parts_of(name)):
            continue
        whole = torch.cat(
            [as_bytes(p).view(DTYPES[p.dtype]).reshape(p.shape).to(DTYPES[dtype]) for p in parts]
        )
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            whole = torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % VOCAB_PADDING))
        expected[name] = f"{tensor_hash(whole.to(device)):016x}"
    return expected
