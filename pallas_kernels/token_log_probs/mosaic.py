"""Kernels for TPUs: logits live in VMEM, one tile of the vocabulary by one block of tokens at a time.

A tile of logits is [columns, tokens]: the vocabulary lies along sublanes, tokens along lanes. So sums over the
vocabulary are sums of registers, and what is kept per token is dense in memory: 8 partial sums, one per sublane, which
are merged once, at the end. A head [embed, vocab] is turned in VMEM, one tile at a time, once for all tokens.

As many tokens as fit stay in VMEM while the head streams by: it is read once per so many tokens. Within a step, blocks
of tokens are a loop that can stop early, and the arithmetic of a block has no branch: a branch would keep the compiler
from overlapping it with the product.

T tokens, D embed, V vocab. A block is `Tiles.block` tokens, a tile `Tiles.columns` entries of the vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

MASKED = -1e30
"""The logit of a column beyond the vocabulary. Finite, so that differences are never NaN."""
LANES, SUBLANES = 128, 8


class Tiles(NamedTuple):
    """How a kernel cuts its work."""

    block: int = 512
    """Tokens in a product; a multiple of 128."""
    columns: int = 1024
    """Of the vocabulary in a product; a multiple of 128."""
    resident: int = 2048
    """Tokens that stay in VMEM while the head streams by; a multiple of block."""


class Run(NamedTuple):
    """Where a kernel runs."""

    vmem_bytes: int
    """Limit for the compiler."""
    interpret: Any = False


def statistics(
    x: Float[Array, "tokens embed"],
    head: Array,
    scale: Float[Array, " tokens"],
    targets: Int[Array, " tokens"],
    count: Int[Array, ""],
    *,
    vocab_major: bool,
    entropy: bool,
    tiles: Tiles,
    run: Run,
) -> dict[str, Float[Array, " tokens"]]:
    """highest, total, picked and weighted (with entropy) of op, from one pass over the head per resident tokens.

    Only blocks that hold one of the first `count` tokens are computed; the others' values are arbitrary. Whatever a
    token's hidden state holds stays in its own values.
    """
    tokens, embed = x.shape
    vocab = head.shape[0 if vocab_major else 1]
    blocks, groups = tiles.resident // tiles.block, tiles.columns // SUBLANES
    passes, steps = pl.cdiv(tokens, tiles.resident), pl.cdiv(vocab, tiles.columns)
    names = ("highest", "total", "picked", *(("weighted",) if entropy else ()))
    per_block = pl.BlockSpec((blocks, 1, tiles.block), lambda i, j, _: (i, 0, 0))
    per_token = jax.ShapeDtypeStruct((passes * blocks, 1, tiles.block), jnp.float32)
    read = x.nbytes + passes * head.nbytes + 4 * (2 + len(names)) * tokens
    options = {"vocab": vocab, "vocab_major": vocab_major, "entropy": entropy, "tiles": tiles}
    out = pl.pallas_call(
        functools.partial(_statistics_kernel, **options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, steps),
            in_specs=[
                residents_spec(embed, tiles),
                head_spec(embed, tiles, vocab_major, lambda i, j, _: j),
                per_block,
                per_block,
            ],
            out_specs=[per_block] * len(names),
            scratch_shapes=[
                pltpu.VMEM((groups, SUBLANES, tiles.block), jnp.float32),
                *[pltpu.VMEM((blocks, SUBLANES, tiles.block), jnp.float32) for _ in names],
                *turned_head(embed, tiles, vocab_major, head.dtype),
            ],
        ),
        out_shape=[per_token] * len(names),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=run.vmem_bytes
        ),
        cost_estimate=cost(x, head, products=1, read=read),
        interpret=run.interpret,
        name="token_log_probs_statistics",
    )(
        blocks_with_one(count, tiles),
        x,
        head,
        in_blocks(scale, tiles),
        in_blocks(targets.astype(jnp.int32), tiles),
    )
    return {name: values.reshape(-1)[:tokens] for name, values in zip(names, out, strict=True)}


def _statistics_kernel(count, x, head, scale, targets, *refs, vocab, vocab_major, entropy, tiles):
    kept = 4 if entropy else 3
    out, (logits, *state), turned = refs[:kept], refs[kept : 2 * kept + 1], refs[2 * kept + 1 :]
    step, steps = pl.program_id(1), pl.num_programs(1)
    blocks = tiles.resident // tiles.block

    @pl.when(step == 0)
    def _():
        state[0][...] = jnp.full_like(state[0], MASKED)
        for ref in state[1:]:
            ref[...] = jnp.zeros_like(ref)

    weights = vocab_major_tile(head, turned, vocab_major)
    start = step * tiles.columns

    def of_block(b, carry):
        _store_logits(logits, weights, x, b, scale[b], vocab - start, vocab, tiles)
        values = _with_tile([ref[b] for ref in state], logits, targets[b] - start, entropy=entropy)
        for ref, value in zip(state, values, strict=True):
            ref[b] = value
        return carry

    lax.fori_loop(0, jnp.clip(count[0] - pl.program_id(0) * blocks, 0, blocks), of_block, None)

    @pl.when(step == steps - 1)
    def _():
        def merge(b, carry):
            for ref, value in zip(out, _over_sublanes([ref[b] for ref in state]), strict=True):
                ref[b] = value
            return carry

        lax.fori_loop(0, blocks, merge, None)


def _store_logits(logits, weights, x, b, scale, left, vocab, tiles) -> None:
    """Tempered logits of block `b`, MASKED from column `left` of the tile on."""
    rows = x[pl.ds(pl.multiple_of(b * tiles.block, tiles.block), tiles.block), :]
    tile = product(weights[...], rows, 1, 1) * scale
    if vocab % tiles.columns:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
        tile = jnp.where(column < left, tile, MASKED)
    logits[...] = tile.reshape(logits.shape)


def _with_tile(state, logits, target, *, entropy: bool) -> list[Array]:
    """The state [8, block] of one block with one more tile: each sublane has its own maximum and sums."""
    groups = logits.shape[0]
    highest = state[0]
    for g in range(groups):
        highest = jnp.maximum(highest, logits[g])
    change = state[0] - highest
    fade = jnp.exp(change)
    total, picked = state[1] * fade, state[2]
    weighted = (state[3] + state[1] * change) * fade if entropy else None
    sublane = lax.broadcasted_iota(jnp.int32, highest.shape, 0)
    for g in range(groups):
        value = logits[g]
        below = value - highest
        power = jnp.exp(below)
        total = total + power
        if weighted is not None:
            weighted = weighted + power * below
        picked = jnp.where(sublane == target - SUBLANES * g, value, picked)
    return [highest, total, picked] + ([] if weighted is None else [weighted])


def _over_sublanes(state) -> list[Array]:
    """[1, block] of each: the state of all sublanes together."""
    highest = jnp.max(state[0], axis=0, keepdims=True)
    change = state[0] - highest
    fade = jnp.exp(change)
    sums = [state[1] * fade, state[2]]
    if len(state) > 3:
        sums.append((state[3] + state[1] * change) * fade)
    return [highest, *(jnp.sum(values, axis=0, keepdims=True) for values in sums)]


# --- parts ----------------------------------------------------------------------------------------------------------


def product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Summed in float32 over an axis of each; float32 operands are not rounded."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def cost(x: Array, head: Array, *, products: int, read: int) -> pl.CostEstimate:
    """For the compiler's scheduler: `products` of tokens and head, and bytes read and written."""
    return pl.CostEstimate(
        flops=2 * products * x.shape[0] * head.size,
        transcendentals=x.shape[0] * (head.size // x.shape[1]),
        bytes_accessed=read,
    )


def residents_spec(embed: int, tiles: Tiles) -> pl.BlockSpec:
    return pl.BlockSpec(
        (tiles.resident, embed), lambda *at: (at[0], 0), pipeline_mode=pl.Buffered(1)
    )


def head_spec(embed: int, tiles: Tiles, vocab_major: bool, tile_of) -> pl.BlockSpec:
    if vocab_major:
        return pl.BlockSpec((tiles.columns, embed), lambda *at: (tile_of(*at), 0))
    return pl.BlockSpec((embed, tiles.columns), lambda *at: (0, tile_of(*at)))


def turned_head(embed: int, tiles: Tiles, vocab_major: bool, dtype) -> list:
    """Scratch for a tile of the head as [columns, embed], if it does not come so."""
    return [] if vocab_major else [pltpu.VMEM((tiles.columns, embed), dtype)]


def vocab_major_tile(head, turned, vocab_major: bool):
    if vocab_major:
        return head
    turned[0][...] = head[...].T
    return turned[0]


def blocks_with_one(count: Array, tiles: Tiles) -> Int[Array, "1"]:
    """Blocks that hold one of the first `count` tokens."""
    return ((count.astype(jnp.int32) + tiles.block - 1) // tiles.block).reshape(1)


def in_blocks(values: Array, tiles: Tiles) -> Array:
    """[blocks, 1, block], with zeros up to whole passes."""
    padded = jnp.pad(values, (0, -values.shape[0] % tiles.resident))
    return padded.reshape(-1, 1, tiles.block)
