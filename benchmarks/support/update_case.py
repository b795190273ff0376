"""What both sides of benchmarks/update_mfu.py train on: the sizes, one packed batch, and how an update is timed."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from support import random_model

SIZES = random_model.SIZES | {
    "tiny": {"vocab": 1024, "embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffw": 128},
}

SEGMENTS = (4096, 3072, 2560, 2048, 1536, 1280, 1024, 768)
"""Tokens of the trajectories that fill each row of 16384, without padding."""
PROMPT = 0.25
"""Share of a trajectory at its start that is not in the loss."""
OBSERVED = 0.1
"""And of tools' results in its middle."""


class Case(NamedTuple):
    """Rows of packed trajectories, all of the same lengths."""

    lengths: tuple[int, ...]
    tokens: np.ndarray
    """int32 [rows, time]."""
    mask: np.ndarray
    """bool [rows, time]: in the loss."""
    advantages: np.ndarray
    """float32 [rows, segments]."""


def make_case(size: str, rows: int) -> Case:
    """The same for every side; a tiny model gets rows of 256."""
    rng = np.random.default_rng(0)
    lengths = tuple(n // 64 for n in SEGMENTS) if size == "tiny" else SEGMENTS
    mask = np.concatenate([_mask(n) for n in lengths])
    tokens = rng.integers(0, SIZES[size]["vocab"], (rows, sum(lengths)), dtype=np.int32)
    advantages = rng.standard_normal((rows, len(lengths))).astype(np.float32)
    return Case(lengths, tokens, np.broadcast_to(mask, tokens.shape), advantages)


def _mask(length: int) -> np.ndarray:
    mask = np.ones(length, bool)
    mask[: max(1, int(PROMPT * length))] = False
    middle = length // 2
    mask[middle : middle + int(OBSERVED * length)] = False
    return mask


def timed(update: Callable[[], Any], *, warm_up: int, steps: int) -> dict[str, Any]:
    """Seconds of updates that return when the device is done; the first ones, with compilation, apart."""
    begun = time.perf_counter()
    for _ in range(warm_up):
        update()
    warm = time.perf_counter() - begun
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - begun)
    return {
        "step_s": statistics.median(seconds),
        "step_s_lowest": min(seconds),
        "step_s_highest": max(seconds),
        "warm_up_s": warm,
    }


def category(kernel: str) -> str:
    """What a kernel on a GPU does, by its name."""
    name = kernel.lower()
    kinds = {
        "attention": ("flash", "fmha", "sdpa", "attention", "cudnn"),
        "head kernel": ("softmax_statistics", "mosaic", "hopper"),
        "product": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "wgmma", "dot", "_mm"),
        "communication": ("nccl", "all-gather", "all-reduce", "reduce-scatter", "allreduce"),
        "copy": ("memcpy", "memset", "copy"),
    }
    return next((k for k, words in kinds.items() if any(w in name for w in words)), "elementwise")
