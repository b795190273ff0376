"""token_log_probs on TPUs: the kernels of mosaic.py.

Forward: one pass over the head for as many tokens as VMEM holds, logits in VMEM only.

D embed, V vocab, T tokens.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array

from pallas_kernels.token_log_probs import chunked, chunks, mosaic
from pallas_kernels.token_log_probs.chunks import Gradients, SlopeOf
from pallas_kernels.token_log_probs.mosaic import LANES, SUBLANES, Run, Tiles
from pallas_kernels.token_log_probs.problem import Head, Problem, Rows

_MIB = 2**20
VMEM_BYTES = {
    "TPU v5 lite": 100 * _MIB,
    "TPU v5": 56 * _MIB,
    "TPU v5p": 56 * _MIB,
    "TPU v6 lite": 100 * _MIB,
    "TPU7x": 56 * _MIB,
}
"""What a kernel may use, by device kind: of 128 MiB, or of 64 MiB a core. The compiler keeps the rest."""


class Device(NamedTuple):
    """Where kernels are compiled for."""

    kind: str
    interpret: Any = False
    tiles: Tiles | None = None
    """Overrides what fits."""


_device: Device | None = None


@contextlib.contextmanager
def compiled_for(device: Device) -> Iterator[None]:
    """Within it, kernels are traced for this device, whatever JAX runs on: to compile ahead of time, or to interpret."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def check(problem: Problem, hidden: Array, head: Array, bias: Array | None) -> None:
    """NotImplementedError without a TPU of a known kind, and for what the kernels do not do."""
    if _device is None and jax.default_backend() != "tpu":
        raise NotImplementedError(f"needs a TPU, and JAX runs on {jax.default_backend()}")
    kind = _here().kind
    if kind not in VMEM_BYTES:
        raise NotImplementedError(f"does not know the VMEM of {kind!r}")
    if bias is not None or problem.soft_cap is not None:
        raise NotImplementedError("has neither bias nor soft-cap")
    if hidden.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"multiplies bfloat16 and float32 only, not {hidden.dtype}")
    if not _here().interpret and not problem.vocab_major and hidden.shape[1] % LANES:
        raise NotImplementedError(
            f"embed={hidden.shape[1]} must be a multiple of {LANES} for it to turn a head [embed, vocab]"
        )


def _here() -> Device:
    return _device or Device(jax.devices()[0].device_kind)


# --- what fits ------------------------------------------------------------------------------------------------------


def forward_tiles(tokens: int, embed: int, dtype, vocab_major: bool, device: Device) -> Tiles:
    """Of statistics: as few passes over the head as VMEM allows, of equal length."""
    if device.tiles is not None:
        return device.tiles
    block = min(512, _up(tokens, LANES))
    row = _up(embed, LANES) * dtype.itemsize
    columns = 1024 if row <= 2048 * 2 else 512
    head = (2 if vocab_major else 3) * columns * row
    # Logits, and the compiler's own copies of them.
    logits = 3 * columns * block * 4
    each = row + 4 * SUBLANES * 4 + 2 * 6 * 4 * SUBLANES
    return _resident(tokens, block, columns, head + logits, each, device)


def _resident(
    tokens: int, block: int, columns: int, fixed: int, each: int, device: Device
) -> Tiles:
    """Tiles whose resident tokens, at `each` bytes, fit beside `fixed` bytes."""
    fit = (VMEM_BYTES[device.kind] - fixed) // (each * block)
    if fit < 1:
        raise NotImplementedError(f"a block of {block} tokens does not fit VMEM of {device.kind}")
    blocks = -(-tokens // block)
    passes = -(-blocks // fit)
    return Tiles(block, columns, -(-blocks // passes) * block)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# --- the implementation ---------------------------------------------------------------------------------------------


def statistics(problem: Problem, rows: Rows, head: Head) -> Rows:
    """See op."""
    device, weights, hidden = _here(), head[0], rows["hidden"]
    tokens, embed = hidden.shape
    tiles = forward_tiles(tokens, embed, hidden.dtype, problem.vocab_major, device)
    # Valid tokens in front: a block with none is not computed. One block is not worth the copy.
    order, count = None, jnp.int32(tokens)
    if "valid" in rows and tokens > tiles.block:
        rows, order, chunks_with_one = chunks.valid_first(rows, tiles.block)
        count = chunks_with_one * tiles.block
    out = _statistics(problem, tiles, device)(
        rows["hidden"], weights, rows["scale"], rows["targets"], count
    )
    return {name: chunks.restored(values, order, tokens) for name, values in out.items()}


def gradients(problem: Problem, rows: Rows, head: Head) -> Gradients:
    """See op."""
    return chunked.gradients(problem, rows, head)


def fused(problem: Problem, rows: Rows, head: Head, slope_of: SlopeOf) -> tuple[Gradients, Rows]:
    """See chunks.fused."""
    return chunked.fused(problem, rows, head, slope_of)


def _statistics(problem: Problem, tiles: Tiles, device: Device):
    """mosaic.statistics; under vmap, one member after the other."""
    return sequential_vmap(
        functools.partial(
            mosaic.statistics,
            vocab_major=problem.vocab_major,
            entropy=problem.entropy,
            tiles=tiles,
            run=Run(VMEM_BYTES[device.kind], device.interpret),
        )
    )
