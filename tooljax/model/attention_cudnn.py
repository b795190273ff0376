"""Attention by cuDNN's fused kernels, which are told where each segment of a packed row begins and how long it is.

`jax.nn.dot_product_attention` reaches the same kernels, but for segments it takes a mask [batch 1 time time] only: half
a gigabyte for a row of 16k tokens. The packed form is in JAX's private module, so it is used only where that module
has it, and the mask otherwise, for rows whose mask is small.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tooljax.model.attention_blockwise import visible
from tooljax.sharding import Layout

MOST_SEGMENTS = 128
"""Of one packed row; cuDNN is given room for so many. A row with more of them would give NaN."""

LARGEST_MASK_BYTES = 1 << 28

try:
    from jax._src.cudnn import fused_attention_stablehlo as _cudnn
except ImportError:  # a later JAX may move it
    _cudnn = None


def reason_not(layout: Layout, q: Any, k: Any) -> str:
    """Why arrays of these shapes and dtype cannot be served; "" if they can."""
    del k
    if layout.platform not in ("gpu", "cuda"):
        return f"it needs NVIDIA GPUs, not {layout.platform}"
    if q.dtype != jnp.bfloat16:
        return f"it computes in bfloat16, not {q.dtype}"
    if layout.ways("time") > 1:
        return "mesh.context splits the time axis"
    if q.shape[-1] > 128 or q.shape[-1] % 8:
        return f"head_dim={q.shape[-1]} is above 128 or no multiple of 8"
    batch, time = q.shape[:2]
    mask_bytes = 2 * batch // layout.ways("batch") * time * time
    if not _packed(layout) and mask_bytes > LARGEST_MASK_BYTES:
        return f"before Hopper it needs a mask, here of {mask_bytes} bytes"
    return ""


def _packed(layout: Layout) -> bool:
    """Whether the packed form is there: Hopper GPUs or later, and the private module."""
    device = layout.device
    return _cudnn is not None and float(getattr(device, "compute_capability", 0)) >= 9.0


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
    """See `tooljax.model.attention`; `first` is 0."""
    del first, dtype
    scale = q.shape[-1] ** -0.5
    inside = (q_segments != 0)[:, :, None, None]
    if not _packed(Layout()):
        mask = visible(q_segments, k_segments, 0, 0, q_trunks)[:, None]
        # Padding sees itself, so that no softmax is empty.
        mask = mask | jnp.eye(q.shape[1], dtype=bool)[None, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")
        return jnp.where(inside, out, jnp.zeros((), out.dtype))
    assert _cudnn is not None, "checked by _packed"
    if q_trunks is not None:
        raise NotImplementedError("prompts cannot be shared yet; set batch.shared_prompts = 'off'")
    # cuDNN leaves what lies outside all segments as it was in memory: keep it out of values and gradients.
    q, k, v = (jnp.where(inside, x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    lengths, offsets = segment_spans(q_segments)
    out: Any = _cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=_cudnn.MaskType.PADDING_CAUSAL,
    )
    too_many = jnp.max(q_segments, axis=1)[:, None, None, None] > MOST_SEGMENTS
    out = jnp.where(inside, out, jnp.zeros((), out.dtype))
    return jnp.where(too_many, jnp.asarray(jnp.nan, out.dtype), out)


def segment_spans(segment_ids: Int[Array, "batch time"]) -> tuple[Array, Array]:
    """Lengths [batch segments] and starts [batch segments + 1] of each row's segments, -1 where there are none.

    Segments 1 1 2 2 2 0 give lengths 2 3 -1 ... and starts 0 2 -1 -1 ...: JAX moves what is not -1 of all rows together
    before cuDNN reads it, so that a row with one start more than lengths would shift every row after it.
    """
    ids = jnp.arange(1, MOST_SEGMENTS + 1, dtype=jnp.int32)
    lengths = jnp.sum(segment_ids[:, :, None] == ids[None, None], axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(lengths, axis=1, dtype=jnp.int32)
    known = lengths > 0
    starts = jnp.where(known, ends - lengths, -1)
    return jnp.where(known, lengths, -1), jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
