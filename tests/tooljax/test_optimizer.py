"""AdamW by hand, its learning rate, what does not decay, and steps that are too small for bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tolerance import tol
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.optimizer import Optimizer, decays, make_optimizer, rounded_at_random

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


GRADIENTS = ([3.0, 0.0, 4.0], [0.1, -0.2, 0.2], [0.0, 0.3, 0.0], [0.5, 0.5, -0.5])
START = [1.0, -2.0, 0.5]


def adamw(start: list[float], gradients: Any, *, rate: float, decay: float, clip: float) -> list:
    """The weights after each update in float64, the slow way; the last one is a norm's scale, which does not decay."""
    weights, mu, nu = np.array(start), np.zeros(len(start)), np.zeros(len(start))
    out = []
    for step, raw in enumerate(gradients, start=1):
        g = np.array(raw) * min(1.0, clip / np.linalg.norm(raw))
        mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * g * g
        adam = mu / (1 - 0.9**step) / (np.sqrt(nu / (1 - 0.99**step)) + 1e-8)
        weights = weights - rate * (adam + decay * np.append(weights[:-1], 0.0))
        out.append(weights)
    return out


def run(optimizer: Optimizer, params: Any, gradients: Any, *, made=lambda step: True) -> list:
    """Weights and state after each update."""

    @jax.jit
    def update(params, gradients, state, step, made):
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        return optimizer.update(params, gradients, state, step=step, norm=norm, made=made)

    state, out = optimizer.init(params), []
    for step, gradient in enumerate(gradients):
        now = jnp.int32(step), jnp.asarray(made(step))
        params, state = update(params, gradient, state, *now)
        out.append((params, state))
    return out


def as_tree(values: Any, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {"w": jnp.array(values[:2], dtype), "q_norm": jnp.array(values[2:], dtype)}


def joined(tree: Any) -> np.ndarray:
    return np.concatenate([tree["w"], tree["q_norm"]]).astype(np.float64)


def test_weights_are_those_of_adamw_in_float64():
    optimizer = new_optimizer(weight_decay=0.3, clip_norm=1.0)  # the first gradient has norm 5
    expected = adamw(START, GRADIENTS, rate=0.1, decay=0.3, clip=1.0)
    found = run(optimizer, as_tree(START), map(as_tree, GRADIENTS))
    for (params, state), wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(joined(params), wanted, **tol(np.float32, reduced=100))
        assert state.master is None


def test_master_weights_are_those_of_adamw_in_float64_and_the_weights_are_they_rounded():
    optimizer = new_optimizer(weight_decay=0.3, clip_norm=1.0)
    expected = adamw(START, GRADIENTS, rate=0.1, decay=0.3, clip=1.0)
    found = run(optimizer, as_tree(START, jnp.bfloat16), map(as_tree, GRADIENTS))
    for (params, state), wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(joined(state.master), wanted, **tol(np.float32, reduced=100))
        for name, value in params.items():
            np.testing.assert_array_equal(value, state.master[name].astype(jnp.bfloat16))


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_a_skipped_update_changes_nothing_and_is_not_counted(rounding):
    optimizer = new_optimizer(rounding=rounding)
    start, gradients = as_tree(START, jnp.bfloat16), [as_tree(g) for g in GRADIENTS[:2]]
    skipped, after = run(optimizer, start, gradients, made=lambda step: step > 0)
    first = optimizer.init(start)
    for leaf, wanted in zip(*map(jax.tree.leaves, (skipped, (start, first))), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    assert (skipped[1].count, after[1].count) == (0, 1)
    # As if it had been the first one; a rounding is drawn anew.
    (straight,) = run(optimizer, start, gradients[1:])
    np.testing.assert_array_equal(joined(after[1].mu), joined(straight[1].mu))


MANY = 40_000


def far_below_the_spacing(rounding: str, steps: int = 20) -> tuple[np.ndarray, Any]:
    """Weights of 1.5, whose neighbours in bfloat16 are 2**-7 away, after steps of 1e-4 each, downwards."""
    optimizer = new_optimizer(rounding=rounding, learning_rate=1e-4)
    found = run(
        optimizer, {"w": jnp.full(MANY, 1.5, jnp.bfloat16)}, [{"w": jnp.ones(MANY)}] * steps
    )
    params, state = found[-1]
    return np.asarray(params["w"]).astype(np.float64), state


def test_steps_far_below_the_spacing_add_up_in_master_weights():
    weights, state = far_below_the_spacing("master")
    # A constant gradient's direction is 1 from the first step on.
    np.testing.assert_allclose(state.master["w"], 1.5 - 20e-4, rtol=1e-6)
    np.testing.assert_array_equal(weights, 1.5)  # the nearest is still 1.5


def test_steps_far_below_the_spacing_are_right_on_average_without_master_weights():
    weights, state = far_below_the_spacing("stochastic")
    assert state.master is None
    # Each is on the grid: 1.5, 1.5 - 2**-7 and a few below; 1.498 lies between the first two.
    assert set(np.unique((1.5 - weights) * 2**7)) <= {0.0, 1.0, 2.0, 3.0, 4.0}
    # Of one step the mean is exact and the standard deviation below 2**-8; of 20, below that times sqrt(20).
    deviation = 2**-8 * np.sqrt(20 / MANY)
    assert abs(weights.mean() - (1.5 - 20e-4)) < 4 * deviation < 20e-4 / 5


def test_random_rounding_takes_a_neighbour_as_often_as_it_is_near():
    # A quarter of the way from 1 to 1 + 2**-7, above and below 0.
    x = jnp.concatenate([jnp.full(MANY, 1 + 2**-9), jnp.full(MANY, -1 - 2**-9)])
    found = np.asarray(rounded_at_random(x, jax.random.key(0), jnp.dtype("bfloat16")))
    up = np.abs(found.astype(np.float64)).reshape(2, MANY) == 1 + 2**-7
    assert set(np.unique(found.astype(np.float64))) == {1.0, 1 + 2**-7, -1.0, -1 - 2**-7}
    # Binomial: p = 1/4, so 4 standard deviations of the mean are 4 sqrt(3/16 / 40000) = 0.0087.
    np.testing.assert_allclose(up.mean(axis=1), 0.25, atol=0.0087)


def test_random_rounding_leaves_all_values_that_bfloat16_has():
    values = np.arange(2**16, dtype=np.uint32) << 16
    x = jax.lax.bitcast_convert_type(jnp.asarray(values), jnp.float32)
    found = rounded_at_random(x, jax.random.key(1), jnp.dtype("bfloat16"))
    numbers = ~np.isnan(np.asarray(x))
    back = np.asarray(found).view(np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(back[numbers], values[numbers])
    assert np.isnan(np.asarray(found).astype(np.float32)[~numbers]).all()
    # A NaN that has all lower bits set would become -0 by the addition.
    odd = jax.lax.bitcast_convert_type(jnp.full(8, 0x7FFFFFFF, jnp.uint32), jnp.float32)
    found = rounded_at_random(odd, jax.random.key(2), jnp.dtype("bfloat16"))
    assert np.isnan(np.asarray(found).astype(np.float32)).all()


def test_random_rounding_is_drawn_from_seed_step_and_weight():
    def drawn(seed: int) -> list[dict[str, np.ndarray]]:
        optimizer = new_optimizer(rounding="stochastic", learning_rate=1e-4, seed=seed)
        start = {name: jnp.full(64, 1.5, jnp.bfloat16) for name in ("wq", "wo")}
        constant = {name: jnp.ones(64) for name in start}
        found = run(optimizer, start, [constant] * 3)
        return [
            {name: np.asarray(x, np.float32) for name, x in params.items()} for params, _ in found
        ]

    one, again, other = drawn(1), drawn(1), drawn(2)
    for a, b in zip(one, again, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    assert (one[2]["wq"] != other[2]["wq"]).any()
    assert (one[2]["wq"] != one[2]["wo"]).any()
    # The second step draws anew: of those that the first took down, not all go on.
    assert len({tuple(x["wq"]) for x in one}) == 3


def test_norm_scales_and_biases_do_not_decay():
    names = ["embedding", "head", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"]
    others = ["attn_norm", "ffw_norm", "final_norm", "q_norm", "k_norm", "bq", "bk", "bv"]
    assert all(decays(("layers", name)) for name in names)
    assert not any(decays(("layers", name)) for name in others)
    cfg = DecoderConfig(
        family="qwen2", vocab=5, embed=4, layers=1, q_heads=2, kv_heads=1, head_dim=2, ffw=4,
        rope_theta=1e4, norm_eps=1e-6, tied_head=False, max_positions=8, qkv_bias=True, qk_norm=True,
        dtype="float32",
    )  # fmt: skip
    paths = nnx.to_flat_state(nnx.split(Decoder(cfg, rngs=nnx.Rngs(0)))[1])
    assert {path[-1] for path, _ in paths} == {*names, *others}
