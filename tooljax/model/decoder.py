"""One decoder for the dense families: Llama 3, SmolLM2, Qwen2/2.5 and Qwen3, as a Flax NNX module.

Families differ in fields of `DecoderConfig` only: QKV bias, QK-norm, tied head, RoPE scaling. Weights of all layers
are stacked on a leading `layer` axis, so that training compiles one layer and scans it; the sampler calls the same
`block` on one layer's weights at a time. Every weight names its logical axes where it is declared
(`param.metadata`, read by `tooljax.sharding`).

Axes in einsum strings: B batch, T query time, S key time, D embed, N query heads, K key/value heads,
G query heads a key head serves, H head_dim, F ffw, V vocab, L layer.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from tooljax.model.adapters import Lora, adapted_product, adapter_shapes, initial_adapter
from tooljax.model.attention import Attend, segment_attention
from tooljax.model.precision import matmul_precision
from tooljax.model.remat import Remat, rematerialised
from tooljax.sharding import ONE_DEVICE, Layout

LayerParams = dict[str, Array]
"""The weights of one layer, or of all layers stacked, by the names used in `layer_shapes`."""


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
    lora: Lora | None = None
    """Adapters beside the weights. Hugging Face folders and engines know nothing of them: there they are merged."""

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
        for name, (shape, axes) in adapter_shapes(cfg.lora, layer_shapes(cfg)).items():
            value = initial_adapter(rngs.params(), name, (cfg.layers, *shape), jnp.dtype(cfg.dtype))
            setattr(self, name, nnx.LoRAParam(value, axes=("layer", *axes)))

    def stacked(self) -> LayerParams:
        """The weights by name, as arrays with a leading layer axis."""
        return {n: p[...] for n, p in vars(self).items() if isinstance(p, nnx.Param)}


class Decoder(nnx.Module):
    """Token ids in, final hidden states (and the head to turn them into logits) out."""

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.layout = ONE_DEVICE
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
        trunk_ids: Int[Array, "batch time"] | None = None,
        *,
        remat: Remat = "none",
    ) -> Float[Array, "batch time embed"]:
        """Hidden states after the final norm.

        Tokens attend to earlier tokens of their own segment; segment 0 is padding. `positions` count from 0 in each
        segment. With `trunk_ids` they attend to all of an earlier segment too, and their positions go on from its last
        (`tooljax.model.attention`). `remat` says what the backward pass computes again (`tooljax.model.remat`).
        `self.layout` spreads the work over a mesh.
        """
        cfg, layout = self.cfg, self.layout
        attend = segment_attention(segment_ids, layout, jnp.dtype(cfg.dtype), trunk_ids)
        cos, sin = rotary(cfg, positions)
        shapes = layer_shapes(cfg)
        shapes |= adapter_shapes(cfg.lora, shapes)
        axes = {name: axes for name, (_, axes) in shapes.items()}

        def layer(x: Array, params: LayerParams) -> tuple[Array, None]:
            params = {name: layout.gather(w, *axes[name]) for name, w in params.items()}
            x = block(cfg, params, x, cos, sin, attend, layout)
            return layout.pin(x, "batch", "time", "embed"), None

        with jax.named_scope("embedding"):
            x = layout.lookup(self.embedding[...], tokens)
        x = layout.pin(x, "batch", "time", "embed")
        x, _ = jax.lax.scan(rematerialised(layer, layout, remat), x, self.layers.stacked())
        scale = layout.gather(self.final_norm[...], "embed")
        return rms_norm(x, scale, cfg.norm_eps)

    def logits(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"],
    ) -> Float[Array, "batch time vocab"]:
        """Float32 logits of every token. For tests and tiny models: training never materialises them."""
        return project(self.hidden(tokens, positions, segment_ids), self.head_weight())


def block(
    cfg: DecoderConfig,
    params: LayerParams,
    x: Array,
    cos: Array,
    sin: Array,
    attend: Attend,
    layout: Layout = ONE_DEVICE,
) -> Float[Array, "batch time embed"]:
    """One decoder layer: x [B T D] plus attention plus gated feed-forward, both pre-normalised."""
    dense = partial(_dense, cfg, params, layout)
    y = rms_norm(x, params["attn_norm"], cfg.norm_eps)
    q = dense("TD,DNH->TNH", y, "wq")
    k = dense("TD,DNH->TNH", y, "wk")
    v = dense("TD,DNH->TNH", y, "wv")
    if cfg.qkv_bias:
        q, k, v = (
            q + params["bq"][None, None],
            k + params["bk"][None, None],
            v + params["bv"][None, None],
        )
    if cfg.qk_norm:
        q = rms_norm(q, params["q_norm"], cfg.norm_eps)
        k = rms_norm(k, params["k_norm"], cfg.norm_eps)
    with jax.named_scope("attention"):
        attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + dense("TNH,NHD->TD", attended, "wo")
    y = rms_norm(x, params["ffw_norm"], cfg.norm_eps)
    with jax.named_scope("feed_forward"):
        wide = jax.nn.silu(dense("TD,DF->TF", y, "w_gate"))
        wide = wide * dense("TD,DF->TF", y, "w_up")
        return x + dense("TF,FD->TD", wide, "w_down")


def _dense(
    cfg: DecoderConfig, params: LayerParams, layout: Layout, subscripts: str, x: Array, name: str
) -> Array:
    """einsum of x [B T ...] and a weight, with batch and time as one axis, T in `subscripts`; and of its adapter.

    One axis, because XLA on CPU computes the weight's gradient, a sum over both, three times slower over two.
    """
    rows = layout.merged(x)
    product = partial(jnp.einsum, precision=matmul_precision(x.dtype))
    if cfg.lora is None or f"{name}_a" not in params:
        return layout.parted(product(subscripts, rows, params[name]), x.shape[0])
    weight, a, b = (params[part] for part in (name, f"{name}_a", f"{name}_b"))
    inputs, outputs = subscripts.split(",")[0], subscripts.split("->")[1]
    summed = layer_shapes(cfg)[name][1][: len(inputs) - 1]
    # Inputs that are spread over devices cannot have those of B beside them.
    if x.dtype == jnp.bfloat16 and all(layout.ways(axis) == 1 for axis in summed):
        out = adapted_product(rows, weight, a, b, cfg.lora.scale, product)
    else:
        low = product(f"{inputs},{inputs[1:]}R->TR", rows, a) * cfg.lora.scale
        out = product(subscripts, rows, weight)
        out = out + product(f"TR,R{outputs[1:]}->{outputs}", low, b)
    return layout.parted(out, x.shape[0])


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


def _initial(
    rngs: nnx.Rngs, name: str, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype
) -> Array:
    """Norm scales start at 1, biases at 0, the rest normal with standard deviation fan_in**-0.5."""
    if name.endswith("norm"):
        return jnp.ones(shape, dtype)
    if name in ("bq", "bk", "bv"):
        return jnp.zeros(shape, dtype)
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)
