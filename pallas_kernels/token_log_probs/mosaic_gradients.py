"""Kernels for TPUs whose result is a gradient, or what one is made of. See mosaic.py for the layout.

`gradients` makes both gradients from one recomputation of a tile's logits (6 T D V operations): hidden states and
their gradient stay in VMEM for as many tokens as fit, while tiles of the head and of its gradient stream by. Each
further set of tokens adds to the head's gradient in place.

`powers` writes what the gradient of a chunk's logits is made of, for a loss whose gradient is taken in one pass.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.token_log_probs.chunks import MAX_POWER
from pallas_kernels.token_log_probs.mosaic import (
    LANES,
    SUBLANES,
    Run,
    Tiles,
    blocks_with_one,
    cost,
    head_spec,
    product,
    residents_spec,
    turned_head,
    vocab_major_tile,
)

FACTORS = ("scale", "highest", "log_total", "level", "slope", "pick")
"""Of each token: d_logit = softmax (level + slope log softmax) + pick [is target], for logits without temperature, so
level, slope and pick are already multiplied by scale = 1 / temperature."""
DEPTH = 512
"""Columns of embed that a product adds at a time: bounds its temporary."""


def gradients(
    x: Float[Array, "tokens embed"],
    head: Array,
    factors: Float[Array, "blocks 8 block"],
    targets: Int[Array, "blocks 1 block"],
    count: Int[Array, ""],
    d_head: Array | None,
    *,
    vocab_major: bool,
    tiles: Tiles,
    run: Run,
) -> tuple[Float[Array, "tokens embed"], Float[Array, "..."]]:
    """The gradients of hidden and head in float32, the head's added to `d_head` (in place) if given.

    Tokens are exactly those that stay in VMEM, with finite hidden states. Only blocks that hold one of the first
    `count` are computed; the others' gradient is 0. `factors` are FACTORS, then zeros.
    """
    tokens, embed = x.shape
    assert tokens == tiles.resident, (tokens, tiles)
    vocab = head.shape[0 if vocab_major else 1]
    steps = pl.cdiv(vocab, tiles.columns)
    tile = head_spec(embed, tiles, vocab_major, lambda j, _: j)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape), pipeline_mode=pl.Buffered(1))

    more = [] if d_head is None else [d_head]
    options = {"vocab": vocab, "vocab_major": vocab_major, "adds": bool(more), "tiles": tiles}
    turned_sum = [] if vocab_major else [pltpu.VMEM((tiles.columns, embed), jnp.float32)]
    read = x.nbytes + 4 * tokens * embed + head.nbytes + factors.nbytes + targets.nbytes
    out = pl.pallas_call(
        functools.partial(_gradients_kernel, **options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[
                whole(tokens, embed),
                whole(*factors.shape),
                whole(*targets.shape),
                tile,
                *([tile] * len(more)),
            ],
            out_specs=[whole(tokens, embed), tile],
            scratch_shapes=[*turned_head(embed, tiles, vocab_major, head.dtype), *turned_sum],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, embed), jnp.float32),
            jax.ShapeDtypeStruct(head.shape, jnp.float32),
        ],
        input_output_aliases={5: 1} if more else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=run.vmem_bytes
        ),
        cost_estimate=cost(x, head, products=3, read=read + 4 * (1 + len(more)) * head.size),
        interpret=run.interpret,
        name="token_log_probs_gradients",
    )(blocks_with_one(count, tiles), x, factors, targets, head, *more)
    return out[0], out[1]


def _gradients_kernel(count, x, factors, targets, head, *refs, vocab, vocab_major, adds, tiles):
    before, (d_hidden, d_head, *scratch) = (refs[0], refs[1:]) if adds else (None, refs)
    step = pl.program_id(0)
    start = step * tiles.columns

    @pl.when(step == 0)
    def _():
        d_hidden[...] = jnp.zeros_like(d_hidden)

    if vocab % tiles.columns:

        @pl.when(step == pl.num_programs(0) - 1)
        def _():
            # Beyond the vocabulary the tile holds anything, NaN too: it would reach hidden's gradient.
            axis = 0 if vocab_major else 1
            inside = lax.broadcasted_iota(jnp.int32, head.shape, axis) < vocab - start
            head[...] = jnp.where(inside, head[...], jnp.zeros((), head.dtype))

    weights = vocab_major_tile(head, scratch, vocab_major)
    total = d_head if vocab_major else scratch[1]
    if before is None:
        total[...] = jnp.zeros_like(total)
    else:
        total[...] = before[...] if vocab_major else before[...].T

    def of_block(b, carry):
        at = pl.ds(pl.multiple_of(b * tiles.block, tiles.block), tiles.block)
        d_logits = _d_logits(weights, x[at, :], factors, b, targets[b] - start).astype(x.dtype)
        turned = d_logits.T
        for d in range(0, x.shape[1], DEPTH):
            part = slice(d, min(d + DEPTH, x.shape[1]))
            total[:, part] += product(d_logits, x[at, part], 1, 0)
            d_hidden[at, part] += product(turned, weights[:, part], 1, 0)
        return carry

    lax.fori_loop(0, jnp.minimum(count[0], tiles.resident // tiles.block), of_block, None)
    if not vocab_major:
        d_head[...] = total[...].T


def _d_logits(weights, rows, factors, b, target) -> Array:
    """[columns, block]."""
    scale, highest, log_total, level, slope, pick = (
        factors[b, i : i + 1, :] for i in range(len(FACTORS))
    )
    # In two steps: large logits lose no digits that matter.
    log_softmax = product(weights[...], rows, 1, 1) * scale - highest - log_total
    values = jnp.exp(log_softmax) * (level + slope * log_softmax)
    column = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    return values + jnp.where(column == target, pick, 0.0)


def powers(
    x: Float[Array, "tokens embed"],
    head: Array,
    scale: Float[Array, " tokens"],
    shift: Float[Array, " tokens"],
    *,
    vocab_major: bool,
    entropy: bool,
    tiles: Tiles,
    run: Run,
) -> dict[str, Array]:
    """q = exp(logits - shift) [tokens, vocab] in x's dtype, its sums total, and weighted = sum q (logits - shift).

    Powers are cut off at e^MAX_POWER. Here a tile is [tokens, columns], as the products that follow want it.
    """
    tokens, embed = x.shape
    vocab = head.shape[0 if vocab_major else 1]
    passes, steps = pl.cdiv(tokens, tiles.resident), pl.cdiv(vocab, tiles.columns)
    per_row = pl.BlockSpec((tiles.resident, 1), lambda i, j: (i, 0))
    sums = 2 if entropy else 1
    out = pl.pallas_call(
        functools.partial(_powers_kernel, vocab=vocab, vocab_major=vocab_major, tiles=tiles),
        grid=(passes, steps),
        in_specs=[
            residents_spec(embed, tiles),
            head_spec(embed, tiles, vocab_major, lambda i, j: j),
            per_row,
            per_row,
        ],
        out_specs=[
            pl.BlockSpec((tiles.resident, tiles.columns), lambda i, j: (i, j)),
            *([per_row] * sums),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((tokens, vocab), x.dtype),
            *[jax.ShapeDtypeStruct((tokens, 1), jnp.float32) for _ in range(sums)],
        ],
        scratch_shapes=[pltpu.VMEM((tiles.resident, LANES), jnp.float32) for _ in range(sums)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=run.vmem_bytes
        ),
        cost_estimate=cost(
            x,
            head,
            products=1,
            read=x.nbytes
            + passes * head.nbytes
            + tokens * (vocab * x.dtype.itemsize + 4 * (2 + sums)),
        ),
        interpret=run.interpret,
        name="token_log_probs_powers",
    )(x, head, scale[:, None], shift[:, None])
    names = ("powers", "total", "weighted")[: 1 + sums]
    return {
        name: value if name == "powers" else value[:, 0]
        for name, value in zip(names, out, strict=True)
    }


def _powers_kernel(x, head, scale, shift, out, *refs, vocab, vocab_major, tiles):
    sums_out, sums = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    def of_block(b, carry):
        at = pl.ds(pl.multiple_of(b * tiles.block, tiles.block), tiles.block)
        logits = product(x[at, :], head[...], 1, 1 if vocab_major else 0)
        logits = jnp.minimum(logits * scale[at, :] - shift[at, :], MAX_POWER)
        raised = jnp.exp(logits)
        if vocab % tiles.columns:
            column = lax.broadcasted_iota(jnp.int32, raised.shape, 1)
            raised = jnp.where(column < vocab - step * tiles.columns, raised, 0.0)
            # Their powers are 0, but 0 NaN is not.
            logits = jnp.where(raised > 0, logits, 0.0)
        out[at, :] = raised.astype(out.dtype)
        kept = [ref[at, :] for ref in sums]
        for c in range(0, tiles.columns, LANES):
            part = raised[:, c : c + LANES]
            kept[0] = kept[0] + part
            if len(kept) > 1:
                kept[1] = kept[1] + part * logits[:, c : c + LANES]
        for ref, value in zip(sums, kept, strict=True):
            ref[at, :] = value
        return carry

    lax.fori_loop(0, tiles.resident // tiles.block, of_block, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        for ref, value in zip(sums_out, sums, strict=True):
            ref[...] = jnp.sum(value[...], axis=1, keepdims=True)


def factors_in_blocks(rows: dict[str, Array], tiles: Tiles) -> Float[Array, "blocks 8 block"]:
    """FACTORS of rows, whole passes of them."""
    zero = jnp.zeros_like(rows["scale"])
    stacked = jnp.stack(
        [rows.get(name, zero) for name in FACTORS] + [zero] * (SUBLANES - len(FACTORS))
    )
    return stacked.reshape(SUBLANES, -1, tiles.block).transpose(1, 0, 2)
