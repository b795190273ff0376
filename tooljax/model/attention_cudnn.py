"""Attention by cuDNN's fused kernels, which are told where each segment of a packed row begins and how long it is.

`jax.nn.dot_product_attention` reaches the same kernels, but for segments it takes a mask [batch 1 time time] only: half
a gigabyte for a row of 16k tokens. The packed form is in JAX's private module, so it is used only where that module
has it, and the mask otherwise, for rows whose mask is small. Where segments share a trunk, the packed form takes two
passes (`tooljax.model.attention_trunks`).
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tooljax.model.attention_blockwise import visible
from tooljax.model.attention_trunks import Kernel, Spans, merged, own_spans, trunk_spans
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
    inside = (q_segments != 0)[:, :, None, None]
    if not _packed(Layout()):
        mask = visible(q_segments, k_segments, 0, 0, q_trunks)[:, None]
        # Padding sees itself, so that no softmax is empty.
        mask = mask | jnp.eye(q.shape[1], dtype=bool)[None, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")
        return jnp.where(inside, out, jnp.zeros((), out.dtype))
    assert _cudnn is not None, "checked by _packed"
    # cuDNN leaves what lies outside all segments as it was in memory: keep it out of values and gradients.
    q, k, v = (jnp.where(inside, x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    own = own_spans(q_segments, MOST_SEGMENTS)
    if q_trunks is None:
        out = _call(q, k, v, own, causal=True)
    else:
        trunk = trunk_spans(q_segments, q_trunks, MOST_SEGMENTS)
        out: Any = merged(Kernel(_forward, _backward), q, k, v, own, trunk)
    too_many = jnp.max(q_segments, axis=1)[:, None, None, None] > MOST_SEGMENTS
    out = jnp.where(inside, out, jnp.zeros((), out.dtype))
    return jnp.where(too_many, jnp.asarray(jnp.nan, out.dtype), out)


def _call(q: Array, k: Array, v: Array, spans: Spans, *, causal: bool, logs: bool = False) -> Any:
    """The output, and with `logs` those of the softmaxes' denominators. Has gradients if those of `logs` are 0."""
    assert _cudnn is not None, "checked by _packed"
    mask_type = _cudnn.MaskType.PADDING_CAUSAL if causal else _cudnn.MaskType.PADDING
    return _cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=spans.q_lengths,
        kv_seqlen=spans.k_lengths,
        q_offsets=spans.q_starts,
        kv_offsets=spans.k_starts,
        scale=q.shape[-1] ** -0.5,
        mask_type=mask_type,
        return_residual=logs,
    )


def _forward(q: Array, k: Array, v: Array, spans: Spans, causal: bool) -> tuple[Array, Array]:
    out, logs = _call(q, k, v, spans, causal=causal, logs=True)
    return out, logs


def _backward(
    q: Array,
    k: Array,
    v: Array,
    spans: Spans,
    causal: bool,
    out: Array,
    logs: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """Of a softmax that is larger than this pass's: JAX has no public way to give cuDNN its denominator."""
    cudnn: Any = _cudnn
    none = jnp.zeros(0, q.dtype)
    settings = {
        "scale": q.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters:
        settings["score_mod"] = None
    lengths = (spans.q_lengths, spans.k_lengths, spans.q_starts, spans.k_starts)
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, none, *lengths, none, none, logs, out, d_out, **settings
    )
    return dq, dk, dv
