"""How the decoder's weights are called and laid out in Hugging Face checkpoints.

A linear weight is [out, in] there and [in..., out...] here, with heads as axes of their own; transposing and
reshaping takes one to the other. Embedding, head, norms and biases differ in their names only.
"""

import math
from collections.abc import Iterator
from typing import TypeVar

from tooljax.model.adapters import input_axes
from tooljax.model.decoder import DecoderConfig, layer_shapes

Axis = TypeVar("Axis")

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffw_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
"""Name of each weight of `decoder.layer_shapes` below model.layers.<i>."""


def layer_tensor(layer: int, name: str) -> str:
    """Hugging Face name of one layer's weight."""
    return f"model.layers.{layer}.{LAYER_NAMES[name]}"


def is_linear(name: str) -> bool:
    """Whether a layer's weight is a matrix, which Hugging Face stores the other way round."""
    return name.startswith("w")


def flat_axes(name: str, shape: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], ...]:
    """The axes of a layer's weight that are one axis in a checkpoint, for each axis there: outputs, then inputs."""
    if not is_linear(name):
        return (shape,)
    inputs = input_axes(name)
    return (shape[inputs:], shape[:inputs])


def flat_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a layer's weight in a checkpoint."""
    return tuple(math.prod(axes) for axes in flat_axes(name, shape))


def tensor_names(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the model's checkpoint, in the order in which they are written."""
    return dict(_tensors(cfg))


def _tensors(cfg: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield EMBEDDING, (cfg.vocab, cfg.embed)
    for layer in range(cfg.layers):
        for name, (shape, _) in layer_shapes(cfg).items():
            yield layer_tensor(layer, name), flat_shape(name, shape)
    yield FINAL_NORM, (cfg.embed,)
    if not cfg.tied_head:
        yield HEAD, (cfg.vocab, cfg.embed)
