"""Mosaic GPU kernel for Hopper: softmax statistics of hidden @ head.T, tile by tile, with logits in registers only.

One persistent block per multiprocessor, with three warpgroups. The third only issues copies (TMA) of hidden and head
tiles into a ring of shared-memory slots; the other two multiply them (wgmma) into a tile of logits each, one below the
other, and reduce it. A block keeps its rows for a whole run of vocabulary tiles, so the statistics live in registers
and leave once a run:

    rows of a block ──▶  [run 0: tiles 0..r-1] [run 1: tiles r..2r-1] ...  ──▶  (highest, total, weighted)[runs, tokens]

With `cluster=2`, two blocks with different rows walk the same vocabulary tiles, and each head tile is read from L2 once
for both (multicast).

With b = (logit - highest) * scale * log2(e), a difference first, so that large logits lose no digits that matter,

    highest = max logit,   total = sum 2**b,   weighted = sum 2**b * b

With `shift` given, also a logit before its scale, the maximum is not computed: shift takes its place, and the powers
2**b are also written, as a [tokens, vocab] array in the dtype of hidden: a softmax up to a factor per row, as a
gradient needs it, rounded relative to each value. With `slope` too, (level + slope * b) 2**b is written instead, and
nothing is summed: the gradient of a log-prob and an entropy.

Only whole tiles of vocabulary are covered: what is left (less than tile_n columns) is the caller's.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

MASK = -1e30
"""Lower than any logit, and finite: (-inf) - (-inf) would be NaN."""

MAX_POWER = 80.0
"""Powers relative to a given shift stop at 2**80, so that sums and products of them stay finite."""

ALIGN = 64
"""What the columns of a [embed, vocab] head or of powers must be a multiple of, for the copy unit."""

ALIGN_ROWS = 8
"""What the rows of a [vocab, embed] head must be a multiple of."""

_SMEM_BYTES = 227 * 1024
_WARPGROUPS = 2
"""Those that compute."""


class Tiles(NamedTuple):
    """What a block works on at a time. A block has 2 * tile_m rows."""

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    slots: int = 4
    """Of the ring of operand tiles."""
    cluster: int = 2
    """Blocks that share their head tiles: 1 or 2."""
    rows_in_step: int = 8
    """Row blocks that walk the vocabulary side by side, so that the head is read from L2."""
    delay: int = 1
    """Products in flight while the next ones are issued: 0 or 1."""
    out_n: int = 32
    """Columns of powers that leave at a time."""

    @property
    def rows(self) -> int:
        """Rows of a cluster: hidden must have a multiple."""
        return self.cluster * _WARPGROUPS * self.tile_m


DEFAULT_TILES = Tiles()


def run_tiles(row_blocks: int, vocab_tiles: int, clusters: int, max_runs: int) -> int:
    """Vocabulary tiles per run: the number that leaves the fewest clusters idle, in at most `max_runs` runs."""
    best, best_cost = vocab_tiles, math.inf
    for tiles in range(max(-(-vocab_tiles // max_runs), 1), vocab_tiles + 1):
        items = row_blocks * -(-vocab_tiles // tiles)
        # A run costs about a third of a tile beyond its tiles; long runs lose L2 locality only slowly.
        cost = -(-items // clusters) * (tiles + 0.3)
        if cost < best_cost:
            best, best_cost = tiles, cost
        if items <= clusters:
            break
    return best


def softmax_statistics(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "..."],
    scale: Float[Array, " tokens"],
    shift: Float[Array, " tokens"] | None = None,
    level: Float[Array, " tokens"] | None = None,
    slope: Float[Array, " tokens"] | None = None,
    *,
    vocab_major: bool = True,
    entropy: bool = True,
    tiles: Tiles = DEFAULT_TILES,
    max_runs: int = 128,
    multiprocessors: int = 132,
    interpret: Any = None,
) -> dict[str, Array]:
    """`highest` (without shift), `total` and (with entropy) `weighted`, all [runs, tokens]; with shift also `powers`.

    `head` is [vocab, embed], or [embed, vocab] if not vocab_major. `scale` multiplies the logits, in base e.
    powers has the columns of the vocabulary if they are a multiple of ALIGN, else those of its whole tiles; what is
    beyond the whole tiles is not written.
    `level` and `slope` go together.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    tokens, embed = hidden.shape
    vocab = head.shape[0] if vocab_major else head.shape[1]
    row_blocks, vocab_tiles, steps = (
        tokens // tiles.rows,
        vocab // tiles.tile_n,
        embed // tiles.tile_k,
    )
    clusters = multiprocessors // tiles.cluster
    per_run = run_tiles(row_blocks, vocab_tiles, clusters, max_runs)
    runs = -(-vocab_tiles // per_run)
    stats = ["total"] + (["weighted"] if entropy else [])
    if shift is None:
        stats.append("highest")
    if slope is not None:
        stats = []
    out = {name: jax.ShapeDtypeStruct((runs, tokens), jnp.float32) for name in stats}
    if shift is not None:
        columns = vocab_tiles * tiles.tile_n if vocab % ALIGN else vocab
        out["powers"] = jax.ShapeDtypeStruct((tokens, columns), hidden.dtype)
    plan = _Plan(tiles, row_blocks, vocab_tiles, per_run, runs, steps, vocab_major, tuple(stats))
    rows = {"scale": scale * math.log2(math.e), "shift": shift, "level": level, "slope": slope}
    rows = {name: values for name, values in rows.items() if values is not None}
    extra: dict[str, Any] = {} if interpret is None else {"interpret": interpret}
    kernel = plgpu.kernel(
        functools.partial(_body, plan, plgpu),
        out_type=out,
        grid=(clusters,),
        grid_names=("clusters",),
        cluster=(tiles.cluster,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **extra,
    )
    return kernel(hidden, head, rows)


class _Plan(NamedTuple):
    tiles: Tiles
    row_blocks: int
    vocab_tiles: int
    per_run: int
    runs: int
    steps: int
    vocab_major: bool
    stats: tuple[str, ...]


def _body(plan: _Plan, plgpu, hidden, head, rows, out) -> None:
    tiles = plan.tiles
    swizzled = functools.partial(_swizzled, plgpu, dtype=hidden.dtype)
    head_tile = (tiles.tile_n, tiles.tile_k) if plan.vocab_major else (tiles.tile_k, tiles.tile_n)
    scratch = {
        "hidden_ring": swizzled((tiles.slots, _WARPGROUPS * tiles.tile_m, tiles.tile_k)),
        "head_ring": swizzled((tiles.slots, *head_tile)),
        "row_values": plgpu.SMEM((_WARPGROUPS, len(rows), tiles.tile_m), jnp.float32),
        "row_stats": plgpu.SMEM((_WARPGROUPS, max(len(plan.stats), 1), tiles.tile_m), jnp.float32),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=tiles.slots),
        "used": _used_barrier(plgpu, tiles),
        "rows_filled": plgpu.Barrier(num_arrivals=len(rows), num_barriers=_WARPGROUPS),
    }
    if "powers" in out:
        scratch["staging"] = swizzled((_WARPGROUPS, tiles.tile_m, tiles.out_n))

    def scoped(**refs):
        group = lax.axis_index("warpgroup")

        @pl.when(group < _WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            _each_item(plan, functools.partial(_compute_item, plan, plgpu, group, rows, out, refs))
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        @pl.when(group == _WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")
            done = _each_item(plan, functools.partial(_copy_item, plan, plgpu, hidden, head, refs))
            # Nobody may leave while the other block of the cluster still signals here.
            for back in range(tiles.slots, 0, -1):
                pl.when(done >= back)(
                    functools.partial(
                        plgpu.barrier_wait, refs["used"].at[lax.rem(done - back, tiles.slots)]
                    )
                )

    pl.run_scoped(scoped, **scratch, collective_axes="warpgroup")


def _used_barrier(plgpu, tiles: Tiles):
    sizes = {"num_arrivals": _WARPGROUPS, "num_barriers": tiles.slots}
    if tiles.cluster == 1:
        return plgpu.Barrier(**sizes)
    return plgpu.ClusterBarrier(collective_axes=("cluster",), **sizes)


def _swizzled(plgpu, shape: tuple[int, ...], dtype):
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tile = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def _each_item(plan: _Plan, item):
    """Calls item(row block, first vocabulary tile, number of tiles, run, steps done before) for each of this cluster's.

    Returns the number of steps done. Copying and computing warpgroups take the same items in the same order.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    items = plan.row_blocks * plan.runs
    clusters = lax.axis_size("clusters")
    first = lax.axis_index("clusters")
    count = lax.div(items - first + clusters - 1, clusters)

    def step(i, done):
        row_block, run = plgpu.planar_snake(
            first + i * clusters, (plan.row_blocks, plan.runs), 0, plan.tiles.rows_in_step
        )
        tile = run * plan.per_run
        number = jnp.minimum(plan.vocab_tiles - tile, plan.per_run)
        item(row_block, tile, number, run, done)
        return done + number * plan.steps

    return lax.fori_loop(0, count, step, jnp.int32(0))


def _copy_item(
    plan: _Plan, plgpu, hidden, head, refs, row_block, first_tile, number, run, done
) -> None:
    tiles = plan.tiles
    block_rows = _WARPGROUPS * tiles.tile_m
    start = row_block * tiles.rows + lax.axis_index("cluster") * block_rows
    collective = {"collective_axes": "cluster"} if tiles.cluster > 1 else {}

    def step(i, _):
        slot = lax.rem(done + i, tiles.slots)
        tile, k = first_tile + lax.div(i, plan.steps), lax.rem(i, plan.steps)
        pl.when(done + i >= tiles.slots)(
            functools.partial(plgpu.barrier_wait, refs["used"].at[slot])
        )
        along = pl.ds(k * tiles.tile_k, tiles.tile_k)
        columns = pl.ds(tile * tiles.tile_n, tiles.tile_n)
        head_tile = head.at[columns, along] if plan.vocab_major else head.at[along, columns]
        filled = refs["filled"].at[slot]
        plgpu.copy_gmem_to_smem(
            hidden.at[pl.ds(start, block_rows), along], refs["hidden_ring"].at[slot], filled
        )
        plgpu.copy_gmem_to_smem(head_tile, refs["head_ring"].at[slot], filled, **collective)

    lax.fori_loop(0, number * plan.steps, step, None)


def _compute_item(
    plan: _Plan, plgpu, group, rows, out, refs, row_block, first_tile, number, run, done
) -> None:
    tiles = plan.tiles
    start = (
        row_block * tiles.rows + (lax.axis_index("cluster") * _WARPGROUPS + group) * tiles.tile_m
    )
    mine = pl.ds(start, tiles.tile_m)
    for i, values in enumerate(rows.values()):
        plgpu.copy_gmem_to_smem(
            values.at[mine], refs["row_values"].at[group, i], refs["rows_filled"].at[group]
        )
    plgpu.barrier_wait(refs["rows_filled"].at[group])
    given = {name: _load_row(plgpu, refs["row_values"].at[group, i]) for i, name in enumerate(rows)}

    def tile_step(i, stats):
        acc = pl.run_scoped(
            functools.partial(_logits, plan, plgpu, group, refs, done + i * plan.steps),
            plgpu.ACC((tiles.tile_m, tiles.tile_n), jnp.float32),
        )
        stats, powers = _reduce_tile(acc, dict(stats), given)
        if "powers" in out:
            _store_powers(plan, plgpu, group, refs, powers, out["powers"], mine, first_tile + i)
        return stats

    def row_of(value: float):
        return plgpu.layout_cast(
            jnp.full((tiles.tile_m,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
        )

    begin = {name: row_of(MASK if name == "highest" else 0.0) for name in plan.stats}
    stats = lax.fori_loop(0, number, tile_step, begin)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, name in enumerate(plan.stats):
        refs["row_stats"][group, i] = stats[name]
    plgpu.commit_smem()
    for i, name in enumerate(plan.stats):
        plgpu.copy_smem_to_gmem(refs["row_stats"].at[group, i], out[name].at[run, mine])


def _reduce_tile(acc, stats, given):
    """The statistics with one more tile of logits, and the powers of that tile."""
    if "shift" in given:
        highest = given["shift"]
    else:
        highest = jnp.maximum(stats["highest"], jnp.max(acc, axis=1))
        stats = _recentred(stats, highest, given["scale"])
    below = (acc - _across(highest, acc)) * _across(given["scale"], acc)
    if "shift" in given:
        below = jnp.minimum(below, MAX_POWER)
    powers = jnp.exp2(below)
    if "total" in stats:
        stats["total"] = stats["total"] + jnp.sum(powers, axis=1)
    if "weighted" in stats:
        stats["weighted"] = stats["weighted"] + jnp.sum(powers * below, axis=1)
    if "slope" in given:
        powers = powers * (_across(given["level"], acc) + _across(given["slope"], acc) * below)
    return stats, powers


def _recentred(stats, highest, scale):
    """The sums of powers relative to a new maximum."""
    change = (stats["highest"] - highest) * scale
    fade = jnp.exp2(change)
    stats = stats | {"highest": highest, "total": stats["total"] * fade}
    if "weighted" in stats:
        # Before the first tile total is 0, and change is lower than any logit but finite.
        stats["weighted"] = fade * stats["weighted"] + change * stats["total"]
    return stats


def _logits(plan: _Plan, plgpu, group, refs, done, acc):
    """One tile of logits. `done` is the number of steps before it."""
    tiles = plan.tiles
    mine = pl.ds(group * tiles.tile_m, tiles.tile_m)

    def step(k, _):
        slot = lax.rem(done + k, tiles.slots)
        plgpu.barrier_wait(refs["filled"].at[slot])
        head_tile = refs["head_ring"].at[slot]
        head_tile = head_tile.transpose((1, 0)) if plan.vocab_major else head_tile
        plgpu.wgmma(acc, refs["hidden_ring"].at[slot, mine], head_tile)
        plgpu.wgmma_wait(tiles.delay)
        if tiles.delay:
            pl.when(k > 0)(
                functools.partial(
                    plgpu.barrier_arrive, refs["used"].at[lax.rem(done + k - 1, tiles.slots)]
                )
            )
        else:
            plgpu.barrier_arrive(refs["used"].at[slot])

    # At least one step is behind a later wait: slots > delay.
    lax.fori_loop(0, plan.steps, step, None)
    if tiles.delay:
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs["used"].at[lax.rem(done + plan.steps - 1, tiles.slots)])
    return acc[...]


def _store_powers(plan: _Plan, plgpu, group, refs, powers, out, mine, tile) -> None:
    tiles = plan.tiles
    rounded = powers.astype(out.dtype)
    for column in range(0, tiles.tile_n, tiles.out_n):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs["staging"][group] = rounded[:, column : column + tiles.out_n]
        plgpu.commit_smem()
        columns = pl.ds(tile * tiles.tile_n + column, tiles.out_n)
        plgpu.copy_smem_to_gmem(refs["staging"].at[group], out.at[mine, columns])


def _load_row(plgpu, ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def _across(row, tile):
    """A value per row, for each column."""
    return lax.broadcast_in_dim(row, tile.shape, (0,))
