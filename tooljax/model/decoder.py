"""One decoder for the dense families: Llama 3, SmolLM2, Qwen2/2.5 and Qwen3, as a Flax NNX module.

Families differ in fields of `DecoderConfig` only: QKV bias, QK-norm, tied head, RoPE scaling. Weights of all layers
are stacked on a leading `layer` axis, so that training compiles one layer and scans it; the sampler calls the same
`block` on one layer's weights at a time. Every weight names its logical axes where it is declared
(`param.metadata`, read by `tooljax.sharding`).

Axes in einsum strings: B batch, T query time, S key time, D embed, N query heads, K key/value heads,
G query heads a key head serves, H head_dim, F ffw, V vocab, L layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

LayerParams = dict[str, Array]
"""The weights of one layer, or of all layers stacked, by the names used in `layer_shapes`."""

Attend = Callable[[Array, Array, Array], Array]
"""(q [B T N H], k [B T K H], v [B T K H]) -> [B T N H]; where keys come from is the caller's business."""


@dataclass(frozen=True)
class Llama3RopeScaling:
    """RoPE frequencies stretched for long contexts, as Llama 3.1 does."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. `tooljax.model.hf` fills it from a Hugging Face config.json."""

    family: Literal["llama", "qwen2", "qwen3"]
    vocab: int
    embed: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffw: int
    rope_theta: float
    norm_eps: float
    tied_head: bool
    max_positions: int
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: Llama3RopeScaling | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights and of activations between operations. Softmax, norms and logits are float32 always."""

    def __post_init__(self):
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads={self.q_heads} must be a multiple of kv_heads={self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")


def layer_shapes(cfg: DecoderConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and logical axes of each weight of one layer."""
    d, n, k, h, f = cfg.embed, cfg.q_heads, cfg.kv_heads, cfg.head_dim, cfg.ffw
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "attn_norm": ((d,), ("embed",)),
        "wq": ((d, n, h), ("embed", "q_heads", "head_dim")),
        "wk": ((d, k, h), ("embed", "kv_heads", "head_dim")),
        "wv": ((d, k, h), ("embed", "kv_heads", "head_dim")),
        "wo": ((n, h, d), ("q_heads", "head_dim", "embed")),
        "ffw_norm": ((d,), ("embed",)),
        "w_gate": ((d, f), ("embed", "ffw")),
        "w_up": ((d, f), ("embed", "ffw")),
        "w_down": ((f, d), ("ffw", "embed")),
    }
    if cfg.qkv_bias:
        shapes["bq"] = ((n, h), ("q_heads", "head_dim"))
        shapes["bk"] = ((k, h), ("kv_heads", "head_dim"))
        shapes["bv"] = ((k, h), ("kv_heads", "head_dim"))
    if cfg.qk_norm:
        shapes["q_norm"] = ((h,), ("head_dim",))
        shapes["k_norm"] = ((h,), ("head_dim",))
    return shapes


class DecoderLayers(nnx.Module):
    """The weights of all layers, each stacked on a leading `layer` axis."""

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs):
        for name, (shape, axes) in layer_shapes(cfg).items():
            fan_in = {"wo": cfg.q_heads * cfg.head_dim, "w_down": cfg.ffw}.get(name, cfg.embed)
            value = _initial(rngs, name, (cfg.layers, *shape), fan_in, jnp.dtype(cfg.dtype))
            setattr(self, name, nnx.Param(value, axes=("layer", *axes)))

    def stacked(self) -> LayerParams:
        """The weights by name, as arrays with a leading layer axis."""
        return {n: p[...] for n, p in vars(self).items() if isinstance(p, nnx.Param)}


class Decoder(nnx.Module):
    """Token ids in, final hidden states (and the head to turn them into logits) out."""

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        dtype = jnp.dtype(cfg.dtype)
        embedding = _initial(rngs, "embedding", (cfg.vocab, cfg.embed), cfg.embed, dtype)
        self.embedding = nnx.Param(embedding, axes=("vocab", "embed"))
        self.layers = DecoderLayers(cfg, rngs=rngs)
        self.final_norm = nnx.Param(jnp.ones((cfg.embed,), dtype), axes=("embed",))
        if not cfg.tied_head:
            head = _initial(rngs, "head", (cfg.vocab, cfg.embed), cfg.embed, dtype)
            self.head = nnx.Param(head, axes=("vocab", "embed"))

    def head_weight(self) -> Float[Array, "vocab embed"]:
        """The LM head; the embedding itself when the two are tied."""
        return self.embedding[...] if self.cfg.tied_head else self.head[...]

    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"],
        *,
        remat: bool = False,
    ) -> Float[Array, "batch time embed"]:
        """Hidden states after the final norm.

        Tokens attend to earlier tokens of their own segment; segment 0 is padding. `positions` count from 0 in each
        segment. `remat` recomputes each layer in the backward pass instead of keeping its activations.
        """
        attend = partial(attention, mask=segment_mask(segment_ids), dtype=jnp.dtype(self.cfg.dtype))
        cos, sin = rotary(self.cfg, positions)

        def layer(x: Array, params: LayerParams) -> tuple[Array, None]:
            return block(self.cfg, params, x, cos, sin, attend), None

        x = embed(self.embedding[...], tokens)
        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, self.layers.stacked())
        return rms_norm(x, self.final_norm[...], self.cfg.norm_eps)

    def logits(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"],
    ) -> Float[Array, "batch time vocab"]:
        """Float32 logits of every token. For tests and tiny models: training never materialises them."""
        return project(self.hidden(tokens, positions, segment_ids), self.head_weight())


def block(
    cfg: DecoderConfig, params: LayerParams, x: Array, cos: Array, sin: Array, attend: Attend
) -> Float[Array, "batch time embed"]:
    """One decoder layer: x [B T D] plus attention plus gated feed-forward, both pre-normalised."""
    y = rms_norm(x, params["attn_norm"], cfg.norm_eps)
    q = dense("ND,DKH->NKH", y, params["wq"])
    k = dense("ND,DKH->NKH", y, params["wk"])
    v = dense("ND,DKH->NKH", y, params["wv"])
    if cfg.qkv_bias:
        q, k, v = (
            q + params["bq"][None, None],
            k + params["bk"][None, None],
            v + params["bv"][None, None],
        )
    if cfg.qk_norm:
        q = rms_norm(q, params["q_norm"], cfg.norm_eps)
        k = rms_norm(k, params["k_norm"], cfg.norm_eps)
    attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + dense("NKH,KHD->ND", attended, params["wo"])
    y = rms_norm(x, params["ffw_norm"], cfg.norm_eps)
    gate = jax.nn.silu(dense("ND,DF->NF", y, params["w_gate"]))
    return x + dense("NF,FD->ND", gate * dense("ND,DF->NF", y, params["w_up"]), params["w_down"])


def dense(subscripts: str, x: Array, weight: Array) -> Array:
    """einsum of x [B T ...] and a weight, with batch and time as one axis, N in `subscripts`.

    One axis, because XLA on CPU computes the weight's gradient, a sum over both, three times slower over two.
    """
    batch, time = x.shape[:2]
    flat = x.reshape(batch * time, *x.shape[2:])
    out = jnp.einsum(subscripts, flat, weight, precision=matmul_precision(x.dtype))
    return out.reshape(batch, time, *out.shape[1:])


def attention(
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
    visible = mask[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores * head_dim**-0.5, -1e30), axis=-1)
    weights = jnp.where(visible, weights, 0.0)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(dtype), v, precision=precision)
    return out.reshape(batch, time, q_heads, head_dim)


def segment_mask(segment_ids: Int[Array, "batch time"]) -> Bool[Array, "batch time time"]:
    """True where the query (second axis) may see the key (third): same segment, not later, not padding.

    Segments 1 1 2 2 0 give
        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . . . .
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = jnp.tril(jnp.ones((segment_ids.shape[1],) * 2, bool))
    return same & causal[None] & (segment_ids != 0)[:, :, None]


def embed(embedding: Float[Array, "vocab embed"], tokens: Int[Array, "batch time"]) -> Array:
    """Looks token ids up: [B T D]."""
    return jnp.take(embedding, tokens, axis=0)


def project(hidden: Float[Array, "*rows embed"], head: Float[Array, "vocab embed"]) -> Array:
    """Float32 logits [*rows V]: products are accumulated, and kept, in float32."""
    return jnp.einsum(
        "...D,VD->...V",
        hidden,
        head,
        precision=matmul_precision(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def rotary(cfg: DecoderConfig, positions: Int[Array, "batch time"]) -> tuple[Array, Array]:
    """cos and sin of the rotary angles, float32 [B T 1 head_dim/2]."""
    frequencies = jnp.asarray(rope_frequencies(cfg), jnp.float32)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rope_frequencies(cfg: DecoderConfig) -> np.ndarray:
    """Angular frequency of each rotary pair [head_dim/2] in float64, after Llama-3 scaling if the model has it."""
    base = cfg.rope_theta ** (-np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim)
    scaling = cfg.rope_scaling
    if scaling is None:
        return base
    # Wavelengths above `longest` are stretched by `factor`, below `shortest` kept, between them blended.
    wavelength = 2 * np.pi / base
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / span
    between = (1 - blend) * base / scaling.factor + blend * base
    return np.where(
        wavelength > longest, base / scaling.factor, np.where(wavelength < shortest, base, between)
    )


def rotate(x: Float[Array, "batch time heads head_dim"], cos: Array, sin: Array) -> Array:
    """Rotates pairs (i, i + head_dim/2), Hugging Face's layout, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32 on every backend: TPUs and GPUs would otherwise round float32 operands."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _initial(
    rngs: nnx.Rngs, name: str, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype
) -> Array:
    """Norm scales start at 1, biases at 0, the rest normal with standard deviation fan_in**-0.5."""
    if name.endswith("norm"):
        return jnp.ones(shape, dtype)
    if name in ("bq", "bk", "bv"):
        return jnp.zeros(shape, dtype)
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)
