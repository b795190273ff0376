"""Operations counted by formula: by hand, and against what XLA counts of a decoder of one layer."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from update_cases import CONFIG

from tooljax.model.decoder import Decoder
from tooljax.model.flops import (
    executed_flops,
    forward_flops,
    layer_weights,
    update_flops,
    visible_pairs,
)


def test_by_hand():
    # D 8, two query heads and one key head of 4, F 12, two layers: q 64, k and v 32 each, o 64, three of 96.
    assert layer_weights(CONFIG) == 2 * (64 + 32 + 32 + 64 + 3 * 96) == 960
    # 5 tokens, one segment of 3 and one of 2: 6 + 3 pairs, 4 x 2 layers x 8 of each; 2 x 8 x 19 a predicted token.
    assert forward_flops(CONFIG, 5, 9, 2) == 2 * 960 * 5 + 64 * 9 + 304 * 2
    assert update_flops(CONFIG, 5, 9, 2) == 3 * forward_flops(CONFIG, 5, 9, 2)
    products, attention = 2 * 960 * 5, 64 * 9
    again: dict[Any, int]
    again = {
        "none": 0,
        "dots_attention": 0,
        "dots": attention,
        "offload": attention,
    }
    again |= {"attention": products, "full": products + attention}
    for remat, flops in again.items():
        assert executed_flops(CONFIG, 5, 9, 2, remat=remat) == update_flops(CONFIG, 5, 9, 2) + flops


def test_pairs_are_those_of_segments():
    assert visible_pairs(np.asarray([[1, 1, 1, 2, 2], [1, 0, 0, 0, 0]], np.int32)) == 6 + 3 + 1
    assert visible_pairs(np.zeros((2, 4), np.int32)) == 0


def test_xla_counts_the_same_of_one_layer():
    """Wide enough that products are nearly all; plain attention computes all pairs, not only those that are seen."""
    cfg = replace(
        CONFIG, layers=1, embed=256, q_heads=4, kv_heads=2, head_dim=64, ffw=768, vocab=512
    )
    decoder = nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(decoder)
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def logits(params, ids):
        return nnx.merge(graphdef, params).logits(ids, ids, ids)

    cost = jax.jit(logits).lower(params, ids).compile().cost_analysis()
    assert cost is not None
    expected = forward_flops(cfg, 2 * 128, 2 * 128 * 128, 2 * 128)
    assert cost["flops"] == pytest.approx(expected, rel=0.05)
