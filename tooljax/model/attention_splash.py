"""Attention by the splash kernel that JAX ships for TPUs (jax.experimental.pallas.ops.tpu.splash_attention).

The kernel skips blocks of later keys; segments are masked inside blocks. It takes one row at a time, heads first.

It knows equal and unequal segments only. Where segments share a trunk, that and its branches are one segment to it, and
what branches must not see of each other is in the scores: queries and keys get a few more dimensions, whose products
are exactly 0 within a branch and with the trunk, and so low between two branches that the softmax is exactly 0.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tooljax.model.remat import ATTENDED
from tooljax.sharding import Layout

_BLOCKS = (1024, 512, 256, 128)

_BRANCH_BITS = 7
"""Of a branch's number: a trunk has at most 127 branches in a row. Two more dimensions for each."""

_UNSEEN = 2.0**14
"""Taken off a score for each bit in which two branches' numbers differ. Exact in bfloat16."""


def reason_not(layout: Layout, q: Any, k: Any) -> str:
    """Why arrays of these shapes and dtype cannot be served; "" if they can."""
    del k
    if layout.platform != "tpu":
        return f"it needs TPUs, not {layout.platform}"
    if layout.ways("time") > 1:
        return "mesh.context splits the time axis"
    if q.shape[1] % _BLOCKS[-1]:
        return f"a row length of {q.shape[1]} is no multiple of {_BLOCKS[-1]}"
    return ""


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
    interpret: bool = False,
) -> Float[Array, "batch time q_heads head_dim"]:
    """See `tooljax.model.attention`; `first` is 0. `interpret` runs the kernel on any backend, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    del first
    time, heads, head_dim = q.shape[1:]
    block = next(size for size in _BLOCKS if time % size == 0)
    kernel = splash.make_splash_mha(
        mask=splash.MultiHeadMask([splash.CausalMask((time, time))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=min(block, 512),
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=min(block, 512),
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
    scaled = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
    if q_trunks is not None:
        scaled, k = _apart(scaled, k, q_segments - q_trunks)
        q_ids, k_ids = q_trunks, q_trunks
    else:
        q_ids, k_ids = q_segments, k_segments
    heads_first = partial(jnp.swapaxes, axis1=1, axis2=2)
    # Padding is a segment like the others to the kernel, so no softmax is empty.
    out: Any = jax.vmap(kernel)(
        heads_first(scaled),
        heads_first(k),
        heads_first(v),
        splash.SegmentIds(q_ids, k_ids),
    )
    out = jnp.where((q_segments != 0)[:, :, None, None], heads_first(out), jnp.zeros((), out.dtype))
    return out.astype(dtype)


def _apart(q: Array, k: Array, branch: Int[Array, "batch time"]) -> tuple[Array, Array]:
    """Queries and keys [batch time heads more], with scores of at most -_UNSEEN between two branches of a trunk.

    `branch` counts from 1 in each trunk; what is of no branch is 0, and its keys are seen by all. For each bit there
    are two dimensions, in which products are 0 if the bits are the same.
    """
    bits = (branch[..., None] >> jnp.arange(_BRANCH_BITS)[None, None]) & 1
    both = jnp.concatenate([bits, 1 - bits], axis=-1).astype(q.dtype)
    of_q = (both - 1) * _UNSEEN
    of_k = jnp.where((branch != 0)[..., None], both, jnp.zeros((), q.dtype))

    def widened(x: Array, more: Array) -> Array:
        shape = (*x.shape[:-1], more.shape[-1])
        return jnp.concatenate([x, jnp.broadcast_to(more[:, :, None], shape)], axis=-1)

    return widened(q, of_q), widened(k, of_k)
