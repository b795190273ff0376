"""Attention block by block with an online softmax, forward and backward (arXiv:2112.05682, arXiv:2205.14135).

Blocks of queries meet blocks of keys one pair after the other; of the scores, one block [heads block block] is in
memory at a time. Forward keeps the output and the log of each softmax's denominator, from which backward makes the
probabilities again. Pairs of blocks in which nobody sees anybody are skipped: later keys, and keys of other segments
but the trunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tooljax.model.precision import matmul_precision
from tooljax.model.remat import attended
from tooljax.sharding import Layout

BLOCK = 512
_HIDDEN = -1e30


def reason_not(layout: Layout, q: Any, k: Any) -> str:
    """Why arrays of these shapes and dtype cannot be served; "" if they can."""
    del k
    time = q.shape[1] // layout.ways("time")
    if time > BLOCK and block_size(time) < 64:
        return f"rows of {time} tokens have no divisor from 64 to {BLOCK}"
    return ""


def block_size(time: int) -> int:
    """The largest divisor of `time` up to BLOCK."""
    return next(size for size in range(min(time, BLOCK), 0, -1) if time % size == 0)


def visible(
    q_segments: Int[Array, "batch time"],
    k_segments: Int[Array, "batch key_time"],
    q_first: int | Int[Array, ""],
    k_first: int | Int[Array, ""],
    q_trunks: Int[Array, "batch time"] | None = None,
) -> Bool[Array, "batch time key_time"]:
    """True where the query may see the key: of its own segment or of its trunk, not later, not padding."""
    same = q_segments[:, :, None] == k_segments[:, None, :]
    if q_trunks is not None:
        same |= q_trunks[:, :, None] == k_segments[:, None, :]
    q_index = q_first + jnp.arange(q_segments.shape[1])
    k_index = k_first + jnp.arange(k_segments.shape[1])
    causal = q_index[:, None] >= k_index[None, :]
    return same & causal[None] & (q_segments != 0)[:, :, None]


def attend(
    q: Float[Array, "batch time q_heads head_dim"],
    k: Float[Array, "batch key_time kv_heads head_dim"],
    v: Float[Array, "batch key_time kv_heads head_dim"],
    q_segments: Int[Array, "batch time"],
    k_segments: Int[Array, "batch key_time"],
    first: int | Int[Array, ""],
    *,
    dtype: jnp.dtype,
    q_trunks: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time q_heads head_dim"]:
    """See `tooljax.model.attention`."""
    batch, time, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, time, kv_heads, q_heads // kv_heads, head_dim)
    whole = isinstance(first, int) and first == 0
    ids = (q_segments, k_segments, q_trunks)
    out: Any = _attend(whole, grouped, k, v, ids, jnp.asarray(first, jnp.int32))
    return out.reshape(q.shape).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(whole: bool, q, k, v, ids, first) -> Array:
    return _forward(whole, q, k, v, ids, first)[0]


def _forward(whole: bool, q, k, v, ids, first):
    batch, time, kv_heads, groups, head_dim = q.shape
    sizes = block_size(time), block_size(k.shape[1])
    seen_by = partial(_seen, ids, first, sizes)
    shape = (batch, kv_heads, groups, time)
    start = (
        jnp.zeros((batch, time, kv_heads, groups, head_dim), jnp.float32),
        jnp.full(shape, _HIDDEN, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )

    def pair(carry: tuple, ij: Array) -> tuple[tuple, None]:
        i, j = ij[0] * sizes[0], ij[1] * sizes[1]
        seen = seen_by(i, j)

        def add(carry: tuple) -> tuple:
            total, highest, weight = (
                _cut(x, i, sizes[0], a) for x, a in zip(carry, (1, 3, 3), strict=True)
            )
            scores = _scores(_cut(q, i, sizes[0], 1), _cut(k, j, sizes[1], 1), seen)
            top = jnp.maximum(highest, scores.max(axis=-1))
            fade = jnp.exp(highest - top)
            p = jnp.where(seen[:, None, None], jnp.exp(scores - top[..., None]), 0.0)
            more = _product("BKGTS,BSKH->BTKGH", p.astype(v.dtype), _cut(v, j, sizes[1], 1))
            new = (
                total * jnp.moveaxis(fade, 3, 1)[..., None] + more,
                top,
                weight * fade + p.sum(axis=-1),
            )
            return tuple(_put(x, y, i, a) for x, y, a in zip(carry, new, (1, 3, 3), strict=True))

        return jax.lax.cond(seen.any(), add, lambda carry: carry, carry), None

    (total, highest, weight), _ = jax.lax.scan(pair, start, _pairs(whole, time, k.shape[1], sizes))
    safe = jnp.where(weight > 0, weight, 1.0)
    out = attended((total / jnp.moveaxis(safe, 3, 1)[..., None]).astype(q.dtype))
    log_weight = attended(highest + jnp.log(safe))
    return out, (q, k, v, ids, first, out, log_weight)


def _backward(whole: bool, saved: tuple, d_out: Array):
    q, k, v, ids, first, out, log_weight = saved
    sizes = block_size(q.shape[1]), block_size(k.shape[1])
    seen_by = partial(_seen, ids, first, sizes)
    delta = _product("BTKGH,BTKGH->BKGT", d_out, out)
    scale = q.shape[-1] ** -0.5

    def pair(carry: tuple, ij: Array) -> tuple[tuple, None]:
        i, j = ij[0] * sizes[0], ij[1] * sizes[1]
        seen = seen_by(i, j)

        def add(carry: tuple) -> tuple:
            dq, dk, dv = carry
            qi, doi = (_cut(x, i, sizes[0], 1) for x in (q, d_out))
            kj, vj = (_cut(x, j, sizes[1], 1) for x in (k, v))
            known = (_cut(x, i, sizes[0], 3)[..., None] for x in (log_weight, delta))
            log_weight_i, delta_i = known
            p = jnp.exp(_scores(qi, kj, seen) - log_weight_i)
            p = jnp.where(seen[:, None, None], p, 0.0)
            dp = _product("BTKGH,BSKH->BKGTS", doi, vj)
            ds = (p * (dp - delta_i) * scale).astype(q.dtype)
            return (
                _add(dq, _product("BKGTS,BSKH->BTKGH", ds, kj), i),
                _add(dk, _product("BKGTS,BTKGH->BSKH", ds, qi), j),
                _add(dv, _product("BKGTS,BTKGH->BSKH", p.astype(q.dtype), doi), j),
            )

        return jax.lax.cond(seen.any(), add, lambda carry: carry, carry), None

    start: Any = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    pairs = _pairs(whole, q.shape[1], k.shape[1], sizes)
    (dq, dk, dv), _ = jax.lax.scan(pair, start, pairs)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


def _pairs(whole: bool, q_time: int, k_time: int, sizes: tuple[int, int]) -> Array:
    """The pairs of blocks [pairs 2] that may see each other; all, where the first query's index is not known yet."""
    pairs = [
        (i, j)
        for i in range(q_time // sizes[0])
        for j in range(k_time // sizes[1])
        if not whole or (i + 1) * sizes[0] > j * sizes[1]
    ]
    return jnp.asarray(np.asarray(pairs, np.int32))


def _seen(ids: tuple, first, sizes: tuple[int, int], i: Array, j: Array) -> Array:
    """[batch block block] of one pair."""
    q_segments, k_segments, q_trunks = ids
    mine, theirs = _cut(q_segments, i, sizes[0], 1), _cut(k_segments, j, sizes[1], 1)
    trunks = None if q_trunks is None else _cut(q_trunks, i, sizes[0], 1)
    return visible(mine, theirs, first + i, j, trunks)


def _scores(q: Array, k: Array, seen: Array) -> Array:
    scores = _product("BTKGH,BSKH->BKGTS", q, k) * q.shape[-1] ** -0.5
    return jnp.where(seen[:, None, None], scores, _HIDDEN)


def _product(axes: str, a: Array, b: Array) -> Array:
    precision = matmul_precision(a.dtype)
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)


def _cut(x: Array, start: Array, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Array, part: Array, start: Array, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _add(x: Array, part: Array, start: Array) -> Array:
    return _put(x, _cut(x, start, part.shape[1], 1) + part, start, 1)
