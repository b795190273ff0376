"""Operations that a decoder takes: multiplications and additions of its products, as MFU counts them.

Of one token, forward: 2 for each weight of a layer's products, and 2 x D x V for the head where its log-prob is wanted.
Attention adds 4 x N x H for each pair of a query and a key that it sees. Backward takes twice as many, but for weights
that adapters stand beside, which have no gradient of their own: as many. Norms, rotations and softmax are left out, as
are operations that are computed a second time: what the algorithm needs, not what an implementation does (PaLM,
arXiv:2204.02311, appendix B, with causal pairs and the head counted as they are).
"""

import math

import numpy as np
from jaxtyping import Int

from tooljax.model.adapters import adapter_shapes
from tooljax.model.decoder import DecoderConfig, layer_shapes
from tooljax.model.remat import Remat


def layer_weights(cfg: DecoderConfig) -> int:
    """Weights of all layers that take part in products: norms and biases do not."""
    heads = (2 * cfg.q_heads + 2 * cfg.kv_heads) * cfg.head_dim
    return cfg.layers * cfg.embed * (heads + 3 * cfg.ffw)


def adapter_weights(cfg: DecoderConfig) -> int:
    """Weights of all layers' adapters."""
    shapes = adapter_shapes(cfg.lora, layer_shapes(cfg))
    return cfg.layers * sum(math.prod(shape) for shape, _ in shapes.values())


def forward_flops(cfg: DecoderConfig, tokens: int, pairs: int, predicted: int) -> float:
    """Of so many tokens, pairs of a query and a key that it sees, and tokens whose log-prob is wanted."""
    attention = 4.0 * cfg.layers * cfg.q_heads * cfg.head_dim * pairs
    head = 2.0 * cfg.embed * cfg.vocab * predicted
    return 2.0 * (layer_weights(cfg) + adapter_weights(cfg)) * tokens + attention + head


def update_flops(cfg: DecoderConfig, tokens: int, pairs: int, predicted: int) -> float:
    """The same with the backward pass."""
    frozen = 0.0
    if cfg.lora is not None:
        frozen = 2.0 * layer_weights(cfg) * tokens + 2.0 * cfg.embed * cfg.vocab * predicted
    return 3.0 * forward_flops(cfg, tokens, pairs, predicted) - frozen


def executed_flops(
    cfg: DecoderConfig, tokens: int, pairs: int, predicted: int, *, remat: Remat
) -> float:
    """What an update computes: of the layers' forward pass, a second time what `remat` does not keep; the head only
    once either way."""
    again = {
        "none": 0.0,
        "dots_attention": 0.0,
        "dots": forward_flops(cfg, 0, pairs, 0),
        "attention": forward_flops(cfg, tokens, 0, 0),
        "offload": forward_flops(cfg, 0, pairs, 0),
        "full": forward_flops(cfg, tokens, pairs, 0),
    }[remat]
    return update_flops(cfg, tokens, pairs, predicted) + again


def visible_pairs(
    segment_ids: Int[np.ndarray, "rows time"],
    trunk_ids: Int[np.ndarray, "rows time"] | None = None,
) -> int:
    """Pairs of a query and a key that it sees: n (n + 1) / 2 of a segment of n tokens, and n times the tokens of the
    trunk that it goes on from. 0 is padding."""
    pairs = 0
    trunks = segment_ids if trunk_ids is None else trunk_ids
    for row, trunk in zip(np.asarray(segment_ids), np.asarray(trunks), strict=True):
        lengths = np.bincount(row).astype(np.int64)
        pairs += int(np.sum((lengths * (lengths + 1) // 2)[1:]))
        pairs += int(np.sum(lengths[trunk[trunk != row]]))
    return pairs
