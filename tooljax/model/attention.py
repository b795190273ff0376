"""Causal attention within the segments of packed rows: one chooser over the ways to compute it.

    plain      scores of all pairs at once, [time time] for each head: short rows, and the reference of the others
    blockwise  the softmax block by block (attention_blockwise.py): nothing of [time time], any backend
    cudnn      NVIDIA's fused kernels, told where segments begin (attention_cudnn.py)
    splash     the TPU kernel of jax.experimental.pallas (attention_splash.py)

All take queries [B T N H], keys and values [B S K H], the segment ids of queries [B T] and of keys [B S], and
`first`, the index of the first query among the keys: with the time axis split over devices, each has its own queries
and everybody's keys. A query with no key to see gets zeros, not NaN.

With `q_trunks` [B T] a query also sees all of an earlier segment, its trunk: the prompt that samples share. It holds
the trunk's segment id, or the query's own where it continues nothing. Of a row, the segments that continue a trunk
(its branches) follow it without a gap.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from tooljax.model import attention_blockwise, attention_cudnn, attention_splash
from tooljax.model.precision import matmul_precision
from tooljax.model.remat import attended
from tooljax.sharding import Layout

Attend = Callable[[Array, Array, Array], Array]
"""(q [B T N H], k [B T K H], v [B T K H]) -> [B T N H]; where keys come from is the caller's business."""

LONGEST_PLAIN = 1024
"""Row length above which the scores of a row are not held as a whole."""


def segment_attention(
    segment_ids: Int[Array, "batch time"],
    layout: Layout,
    dtype: jnp.dtype,
    trunk_ids: Int[Array, "batch time"] | None = None,
) -> Attend:
    """Attention over rows with these segments, spread over the layout's mesh: by rows, heads and (queries) time.
    `trunk_ids` are as `q_trunks` above.

    `layout.attention` names an implementation, or "auto" takes the best that can serve. NotImplementedError: the one
    that is named cannot, and why.
    """
    rows, keys = layout.spec("batch", "time"), layout.spec("batch")
    queries = layout.spec("batch", "time", "q_heads")

    def attend(q: Array, k: Array, v: Array) -> Array:
        heads = k.shape[2]
        by_heads = layout.splits("kv_heads", heads)
        # Every device has the keys of all its rows' tokens, also where `context` splits the queries.
        values = PartitionSpec(layout.splits("batch") or None, None, by_heads or None)
        shared = layout.splits("q_heads") if not by_heads else ()
        name = chosen(layout, q, k)
        compute = partial(_IMPLEMENTATIONS[name], dtype=dtype)

        trunks = () if trunk_ids is None else (trunk_ids,)

        def part(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array, *trunks: Array) -> Array:
            split = layout.splits("time")
            first = jax.lax.axis_index(split) * q.shape[1] if split else 0
            if shared:  # fewer heads than devices: each has all, and takes the one of its queries
                mine = jax.lax.axis_index(shared) * heads // layout.ways("q_heads")
                k, v = (jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k, v))
            return compute(q, k, v, q_ids, k_ids, first, q_trunks=trunks[0] if trunks else None)

        places = (queries, values, values, rows, keys, *(rows for _ in trunks))
        return layout.spread(part, places, queries)(q, k, v, segment_ids, segment_ids, *trunks)

    return attend


def chosen(layout: Layout, q: Any, k: Any) -> str:
    """The implementation that serves these shapes on this layout's devices."""
    reasons = {
        "cudnn": attention_cudnn.reason_not(layout, q, k),
        "splash": attention_splash.reason_not(layout, q, k),
        "blockwise": attention_blockwise.reason_not(layout, q, k),
        "plain": "",
    }
    name = layout.attention
    if name != "auto":
        if name not in reasons:
            raise ValueError(f"attention={name!r} is unknown; choose one of {['auto', *reasons]}")
        if reasons[name]:
            raise NotImplementedError(
                f"attention={name!r} cannot serve: {reasons[name]}; set model.attention = 'auto'"
            )
        return name
    if not reasons["cudnn"]:
        return "cudnn"
    if not reasons["splash"]:
        return "splash"
    return "plain" if q.shape[1] <= LONGEST_PLAIN or reasons["blockwise"] else "blockwise"


def plain(
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
    """All scores at once, with a float32 softmax."""
    mask = attention_blockwise.visible(q_segments, k_segments, first, 0, q_trunks)
    return masked_attention(q, k, v, mask=mask, dtype=dtype)


def masked_attention(
    q: Float[Array, "batch time q_heads head_dim"],
    k: Float[Array, "batch key_time kv_heads head_dim"],
    v: Float[Array, "batch key_time kv_heads head_dim"],
    *,
    mask: Bool[Array, "batch time key_time"],
    dtype: jnp.dtype,
) -> Float[Array, "batch time q_heads head_dim"]:
    """Plain grouped-query attention with a float32 softmax. A query with no key to see gets zeros, not NaN."""
    batch, time, q_heads, head_dim = q.shape
    grouped = q.reshape(batch, time, k.shape[2], q_heads // k.shape[2], head_dim)
    precision = matmul_precision(q.dtype)
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    seen = mask[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * head_dim**-0.5, -1e30), axis=-1)
    weights = jnp.where(seen, weights, 0.0)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(dtype), v, precision=precision)
    return attended(out.reshape(batch, time, q_heads, head_dim))


def segment_mask(
    segment_ids: Int[Array, "batch time"], trunk_ids: Int[Array, "batch time"] | None = None
) -> Bool[Array, "batch time time"]:
    """True where the query (second axis) may see the key (third): same segment or its trunk, not later, not padding.

    Segments 1 1 2 2 0 give
        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . . . .
    and segments 1 1 2 2 3 3 with trunks 1 1 1 1 1 1
        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 1 1 1 . .
        1 1 . . 1 .
        1 1 . . 1 1
    """
    return attention_blockwise.visible(segment_ids, segment_ids, 0, 0, trunk_ids)


_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "plain": plain,
    "blockwise": attention_blockwise.attend,
    "cudnn": attention_cudnn.attend,
    "splash": attention_splash.attend,
}
