"""token_log_probs on TPUs: the kernels of mosaic.py.

Forward: one pass over the head for as many tokens as VMEM holds, logits in VMEM only. Backward: the same with both
gradients from each tile, 6 T D V operations. The loss in one pass: powers of a chunk of tokens by a kernel, the two
products with them by XLA (see chunks.fused), 6 T D V in all where the other two make 8.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.token_log_probs import chunks, mosaic, mosaic_gradients, tuned
from pallas_kernels.token_log_probs.chunks import Gradients, SlopeOf
from pallas_kernels.token_log_probs.mosaic import LANES, SUBLANES, Run, Tiles
from pallas_kernels.token_log_probs.problem import (
    Head,
    Problem,
    Rows,
    clean,
    highest_over_vocab,
)

_MIB = 2**20
VMEM_BYTES = {
    "TPU v5 lite": 100 * _MIB,
    "TPU v5": 56 * _MIB,
    "TPU v5p": 56 * _MIB,
    "TPU v6 lite": 100 * _MIB,
    "TPU7x": 56 * _MIB,
}
"""What a kernel may use, by device kind: of 128 MiB, or of 64 MiB a core. The compiler keeps the rest."""

_BLOCK = 512
"""Tokens in a product."""
PRODUCT_WIDTH = {"TPU v5 lite": 128, "TPU v5": 128, "TPU v5p": 128}
"""What the matrix unit sums at a time, else 256. A narrower tile leaves it idle: on a v6e, half of it."""
_CHUNK_ELEMENTS = 5 * 2**26
"""Of a chunk's powers: 640 MiB of bfloat16."""


class Device(NamedTuple):
    """Where kernels are compiled for."""

    kind: str
    interpret: Any = False
    tiles: Tiles | None = None
    """Overrides what fits."""


_device: Device | None = None


@contextlib.contextmanager
def compiled_for(device: Device) -> Iterator[None]:
    """Within it, kernels are traced for this device, whatever JAX runs on: to compile ahead, or to interpret."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def check(problem: Problem, hidden: Array, head: Array, bias: Array | None) -> None:
    """NotImplementedError without a TPU of a known kind, and for what the kernels do not do or VMEM does not hold."""
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
    tokens, embed = max(hidden.shape[0], 1), hidden.shape[1]
    forward_tiles(tokens, embed, hidden.dtype, problem.vocab_major, _here())
    gradient_tiles(tokens, embed, hidden.dtype, problem.vocab_major, _here())
    powers_tiles(tokens, embed, hidden.dtype, _here())


def _here() -> Device:
    return _device or Device(jax.devices()[0].device_kind)


# --- what fits ------------------------------------------------------------------------------------------------------


def forward_tiles(tokens: int, embed: int, dtype, vocab_major: bool, device: Device) -> Tiles:
    """Of mosaic.statistics."""
    block, row = _block(tokens, device), _row_bytes(embed, dtype)
    # Of a token: hidden state, four sums in 8 sublanes, six double-buffered values in a sublane each.
    each = row + 4 * SUBLANES * 4 + 6 * 2 * SUBLANES * 4
    buffers = 2 if vocab_major else 3
    widths = (1024, 512, 256) if row <= 2**12 else (512, 256)
    fixed = {}
    for columns in widths:
        # Half a tile more: the compiler keeps parts of it beside the product.
        parts = columns * row // 2 + _split(block + columns, row, dtype)
        fixed[block, columns] = columns * (buffers * row + 3 * block * 4) + parts
    return _fewest_passes(tokens, fixed, each, device)


def gradient_tiles(tokens: int, embed: int, dtype, vocab_major: bool, device: Device) -> Tiles:
    """Of mosaic_gradients.gradients."""
    row = _row_bytes(embed, dtype)
    row_sum = _row_bytes(embed, jnp.dtype(jnp.float32))
    each = row + row_sum + (2 * SUBLANES) * 4
    turned = 0 if vocab_major else row + row_sum
    fixed = {}
    blocks = sorted({_block(tokens, device), min(_block(tokens, device), 256)}, reverse=True)
    for block, columns in itertools.product(blocks, (512, 256, 128)):
        if columns >= PRODUCT_WIDTH.get(device.kind, 256):
            products = 4 * columns * block * 4 + (columns + block) * mosaic_gradients.DEPTH * 4
            products += _split(block + columns, row, dtype)
            fixed[block, columns] = (2 * row + 4 * row_sum + turned) * columns + products
    found = _fewest_passes(tokens, fixed, each, device)
    known = tuned.compiled("tpu gradients", device.kind, embed, jnp.dtype(dtype).name)
    if known is None or not vocab_major or device.tiles is not None:
        return found
    known = _balanced(tokens, known.block, known.columns, known.resident // known.block)
    return min(found, known, key=lambda tiles: pl.cdiv(tokens, tiles.resident))


def _split(rows: int, row: int, dtype) -> int:
    """Bytes of float32 operands while a product has them in bfloat16 parts."""
    return 2 * rows * row if dtype == jnp.float32 else 0


def _fewest_passes(
    tokens: int, fixed: dict[tuple[int, int], int], each: int, device: Device
) -> Tiles:
    """The tiles that stream the head by the fewest times, and of these the first: the largest, whose products are fast.

    `fixed` are bytes beside the resident tokens, by block and columns; `each` are those of a token.
    """
    found = []
    for (block, columns), size in fixed.items():
        with contextlib.suppress(NotImplementedError):
            found.append(_resident(tokens, block, columns, size, each, device))
    if not found:
        raise NotImplementedError(f"tokens of {each} bytes do not fit VMEM of {device.kind}")
    return min(found, key=lambda tiles: pl.cdiv(tokens, tiles.resident))


def powers_tiles(tokens: int, embed: int, dtype, device: Device) -> Tiles:
    """Of mosaic_gradients.powers."""
    block, row, columns = _block(tokens, device), _row_bytes(embed, dtype), 512
    # Of a token: hidden state, its powers, two sums, and four values that fill 128 lanes; double-buffered.
    each = row + 2 * columns * dtype.itemsize + (2 + 4 * 2) * LANES * 4
    fixed = 2 * columns * row + 3 * columns * block * 4
    return _resident(tokens, block, columns, fixed, each, device)


def _resident(
    tokens: int, block: int, columns: int, fixed: int, each: int, device: Device
) -> Tiles:
    """Tiles whose resident tokens, at `each` bytes, fit beside `fixed` bytes."""
    if device.tiles is not None:
        return device.tiles
    # Two MiB are for what the compiler puts on its stack.
    fit = (VMEM_BYTES[device.kind] - 2 * _MIB - fixed) // (each * block)
    if fit < 1:
        raise NotImplementedError(f"a block of {block} tokens does not fit VMEM of {device.kind}")
    return _balanced(tokens, block, columns, fit)


def _balanced(tokens: int, block: int, columns: int, fit: int) -> Tiles:
    """Tiles whose passes, of at most `fit` blocks, are the fewest and as even as can be."""
    blocks = pl.cdiv(tokens, block)
    passes = pl.cdiv(blocks, fit)
    return Tiles(block, columns, pl.cdiv(blocks, passes) * block)


def _block(tokens: int, device: Device) -> int:
    return device.tiles.block if device.tiles else min(_BLOCK, _up(tokens, LANES))


def _row_bytes(embed: int, dtype) -> int:
    return _up(embed, LANES) * dtype.itemsize


def _up(value: int, multiple: int) -> int:
    return pl.cdiv(value, multiple) * multiple


# --- the implementation ---------------------------------------------------------------------------------------------


def statistics(problem: Problem, rows: Rows, head: Head) -> Rows:
    """See op."""
    return _one_by_one(_statistics, problem)(rows, head)


def gradients(problem: Problem, rows: Rows, head: Head) -> Gradients:
    """See op."""
    return _one_by_one(_gradients, problem)(rows, head)


def fused(problem: Problem, rows: Rows, head: Head, slope_of: SlopeOf) -> tuple[Gradients, Rows]:
    """See chunks.fused."""
    tokens, vocab = rows["targets"].shape[0], problem.vocab(head[0])
    chunk = min(problem.chunk_tokens or default_chunk_tokens(vocab), tokens)
    # XLA for TPUs scatters into a copy in another layout, and back: two more arrays of the chunk.
    return chunks.fused(problem, rows, head, chunk, _powers, slope_of, chunks.selected)


def default_chunk_tokens(vocab: int) -> int:
    """Tokens of a chunk of powers: whole blocks, as many as the memory allowed holds."""
    return max(_CHUNK_ELEMENTS // vocab // _BLOCK, 1) * _BLOCK


def _one_by_one(function, problem: Problem):
    """Under vmap, one member after the other."""
    return sequential_vmap(functools.partial(function, problem, _here()))


def _statistics(problem: Problem, device: Device, rows: Rows, head: Head) -> Rows:
    weights, hidden = head[0], rows["hidden"]
    tokens, embed = hidden.shape
    tiles = forward_tiles(tokens, embed, hidden.dtype, problem.vocab_major, device)
    # Valid tokens in front: a block with none is not computed. One block is not worth the copy.
    order, count = None, jnp.int32(tokens)
    if "valid" in rows and tokens > tiles.block:
        rows, order, blocks = chunks.valid_first(rows, tiles.block)
        count = blocks * tiles.block
    out = mosaic.statistics(
        rows["hidden"],
        weights,
        rows["scale"],
        rows["targets"],
        count,
        vocab_major=problem.vocab_major,
        entropy=problem.entropy,
        tiles=tiles,
        run=_run(device),
    )
    return {name: chunks.restored(values, order, tokens) for name, values in out.items()}


def _gradients(problem: Problem, device: Device, rows: Rows, head: Head) -> Gradients:
    weights, hidden = head[0], rows["hidden"]
    tokens, embed = hidden.shape
    tiles = gradient_tiles(tokens, embed, hidden.dtype, problem.vocab_major, device)
    run = functools.partial(
        mosaic_gradients.gradients,
        vocab_major=problem.vocab_major,
        tiles=tiles,
        run=_run(device),
    )
    dtype = problem.gradient_dtype(hidden)
    rows, order, blocks = chunks.valid_first(_factors(rows), tiles.block)
    count = blocks * tiles.block
    rows = {name: _padded(values, tiles.resident) for name, values in rows.items()}
    x, targets = clean(rows), rows["targets"].reshape(-1, 1, tiles.block)
    factors = mosaic_gradients.factors_in_blocks(rows, tiles)
    per_pass = tiles.resident // tiles.block

    def one_pass(i: Array | int, d_head: Array | None) -> tuple[Array, Array]:
        cut = functools.partial(lax.dynamic_slice_in_dim, axis=0)
        return run(
            cut(x, i * tiles.resident, tiles.resident),
            weights,
            cut(factors, i * per_pass, per_pass),
            cut(targets, i * per_pass, per_pass),
            count - i * tiles.resident,
            d_head,
        )

    # The first pass makes the head's gradient, if only of zeros; the others add to it.
    first, d_head = one_pass(0, None)
    d_hidden = _padded(first.astype(dtype), x.shape[0])

    def more(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = carry
        part, d_head = one_pass(i, d_head)
        start = i * tiles.resident
        return lax.dynamic_update_slice_in_dim(d_hidden, part.astype(dtype), start, 0), d_head

    if x.shape[0] > tiles.resident:
        passes = pl.cdiv(count, tiles.resident)
        d_hidden, d_head = lax.fori_loop(1, passes, more, (d_hidden, d_head))
    return Gradients(chunks.restored(d_hidden, order, tokens), d_head, None)


def _factors(rows: Rows) -> Rows:
    """hidden, targets, valid and mosaic_gradients.FACTORS; all zeros where not valid."""
    out = {name: rows[name] for name in ("hidden", "targets", "valid") if name in rows}
    for name in mosaic_gradients.FACTORS:
        values = rows.get(name, jnp.zeros_like(rows["scale"]))
        if name in ("level", "slope", "pick"):
            values = values * rows["scale"]
        # Of a token that is not valid, highest and log_total may be anything.
        out[name] = jnp.where(rows["valid"], values, 0.0) if "valid" in rows else values
    return out


def _powers(problem: Problem, rows: Rows, head: Head, again: Array) -> Rows:
    """Relative to the target's logit, which costs no maximum; relative to the maximum when asked again."""
    device = _here()

    def highest(rows: Rows) -> Array:
        got = statistics(problem, rows, head)["highest"]
        # What is not valid may not have been computed.
        got = jnp.where(rows["valid"], got, 0.0) if "valid" in rows else got
        return highest_over_vocab(problem, got, rows)

    shift = lax.cond(again, highest, lambda rows: rows["picked"], rows)

    def run(x: Array, weights: Array, scale: Array, shift: Array) -> Rows:
        return mosaic_gradients.powers(
            x,
            weights,
            scale,
            shift,
            vocab_major=problem.vocab_major,
            entropy=problem.entropy,
            tiles=powers_tiles(x.shape[0], x.shape[1], x.dtype, device),
            run=_run(device),
        )

    out = sequential_vmap(run)(clean(rows), head[0], rows["scale"], shift)
    return out | {"shift": shift}


def _run(device: Device) -> Run:
    return Run(VMEM_BYTES[device.kind], device.interpret)


def _padded(values: Array, multiple: int) -> Array:
    """With zeros at the end."""
    padding = -values.shape[0] % multiple
    if not padding:
        return values
    return jnp.pad(values, [(0, padding)] + [(0, 0)] * (values.ndim - 1))
