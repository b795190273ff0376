"""AdamW by hand, its learning rate, and what does not decay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tolerance import tol
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.optimizer import Optimizer, decay_mask, make_optimizer

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.1,
    "warmup_steps": 0,
    "schedule": "constant",
    "total_steps": 10,
    "weight_decay": 0.0,
    "b1": 0.9,
    "b2": 0.99,
    "eps": 1e-8,
    "clip_norm": 1e9,
}


def new_optimizer(**changes: Any) -> Optimizer:
    return make_optimizer(**(SETTINGS | changes))


def rates(**changes: Any) -> list[float]:
    optimizer = new_optimizer(**changes)
    return [float(optimizer.learning_rate(jnp.int32(step))) for step in range(13)]


def test_warm_up_rises_linearly_and_then_stays():
    assert rates(warmup_steps=4) == pytest.approx([0.025, 0.05, 0.075] + [0.1] * 10)
    assert rates() == pytest.approx([0.1] * 13)


def test_cosine_falls_to_a_tenth_at_the_last_step_and_stays():
    # Steps 0 and 1 warm up; from 2 to 12 a half cosine: 0.1 (0.1 + 0.45 (1 + cos(pi k / 10))).
    expected = [0.05, 0.1] + [0.01 + 0.045 * (1 + np.cos(np.pi * k / 10)) for k in range(11)]
    assert rates(warmup_steps=2, schedule="cosine", total_steps=13) == pytest.approx(expected)
    assert rates(warmup_steps=0, schedule="cosine", total_steps=5)[4:] == pytest.approx([0.01] * 9)
    assert rates(warmup_steps=8, schedule="cosine", total_steps=5)[8] == pytest.approx(0.1)


def test_directions_are_those_of_adamw_in_float64():
    optimizer = new_optimizer(weight_decay=0.3, clip_norm=1.0)
    params = {"w": jnp.array([1.0, -2.0]), "q_norm": jnp.array([0.5])}
    state = optimizer.init(params)
    mu, nu = np.zeros(3), np.zeros(3)
    for step, raw in enumerate([[3.0, 0.0, 4.0], [0.1, -0.2, 0.2], [0.0, 0.3, 0.0]], start=1):
        gradients = {"w": jnp.array(raw[:2]), "q_norm": jnp.array(raw[2:])}
        found, state = optimizer.direction(gradients, state, params)
        g = np.array(raw) / max(1.0, np.linalg.norm(raw))  # the first has norm 5, clipped to 1
        mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * g * g
        adam = mu / (1 - 0.9**step) / (np.sqrt(nu / (1 - 0.99**step)) + 1e-8)
        decay = 0.3 * np.array([1.0, -2.0, 0.0])
        joined = np.concatenate([found["w"], found["q_norm"]])
        np.testing.assert_allclose(joined, adam + decay, **tol(np.float32, reduced=100))


def test_norm_scales_and_biases_do_not_decay():
    cfg = DecoderConfig(
        family="qwen2", vocab=5, embed=4, layers=1, q_heads=2, kv_heads=1, head_dim=2, ffw=4,
        rope_theta=1e4, norm_eps=1e-6, tied_head=False, max_positions=8, qkv_bias=True, qk_norm=True,
        dtype="float32",
    )  # fmt: skip
    params = nnx.split(Decoder(cfg, rngs=nnx.Rngs(0)))[1]
    masked = jax.tree_util.tree_leaves_with_path(decay_mask(params))
    names = {path[-2].key if path[-1] != path[-2] and hasattr(path[-2], "key") else path[-1].key: decays
             for path, decays in masked}  # fmt: skip
    assert {name for name, decays in names.items() if not decays} == {
        "attn_norm", "ffw_norm", "final_norm", "q_norm", "k_norm", "bq", "bk", "bv",
    }  # fmt: skip
    assert {name for name, decays in names.items() if decays} == {
        "embedding", "head", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down",
    }  # fmt: skip
