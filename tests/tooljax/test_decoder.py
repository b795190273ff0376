import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoder import in_dtype, random_decoder

from tolerance import tol
from tooljax.model.attention import masked_attention, segment_mask
from tooljax.model.decoder import (
    Decoder,
    DecoderConfig,
    Llama3RopeScaling,
    block,
    embed,
    rms_norm,
    rope_frequencies,
    rotary,
    rotate,
)

CONFIG = DecoderConfig(
    family="qwen3",
    vocab=31,
    embed=16,
    layers=3,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    ffw=24,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tied_head=True,
    max_positions=64,
    qkv_bias=True,
    qk_norm=True,
    dtype="float32",
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(CONFIG)


logits_of = nnx.jit(
    lambda model, tokens, positions, segments: model.logits(tokens, positions, segments)
)


def rows(*lengths: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One row of random tokens: segments of these lengths one after the other, with their positions."""
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab, sum(lengths))
    positions = np.concatenate([np.arange(n) for n in lengths])
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return tuple(jnp.asarray(a[None], jnp.int32) for a in (tokens, positions, segments))  # type: ignore[return-value]


def test_rms_norm_by_hand():
    # mean of squares of (3, 4) is 12.5; times scale (1, 2)
    out = rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(out, [[3 / 12.5**0.5, 8 / 12.5**0.5]], **tol(jnp.float32))


def test_rms_norm_of_zeros_is_zero_and_epsilon_counts():
    assert not rms_norm(jnp.zeros((1, 4)), jnp.ones(4), 1e-6).any()
    # mean of squares 1, epsilon 3: divided by 2
    out = rms_norm(jnp.ones((1, 4)), jnp.ones(4), 3.0)
    np.testing.assert_allclose(out, np.full((1, 4), 0.5), **tol(jnp.float32))


def test_rms_norm_of_bfloat16_rounds_once():
    # Squares or means rounded to 8 bits would move the last bit of many of these 512 values.
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(jnp.bfloat16)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True))
    out = rms_norm(jnp.asarray(x), jnp.ones(8, jnp.bfloat16), 0.0)
    np.testing.assert_array_equal(out, expected.astype(jnp.bfloat16))


def test_rotate_turns_pairs_half_a_head_apart():
    # One head of 4: pairs (x0, x2) and (x1, x3). Angles 90 and 180 degrees: (x0, x2) -> (-x2, x0), (x1, x3) -> minus.
    cos = jnp.array([0.0, -1.0]).reshape(1, 1, 1, 2)
    sin = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    out = rotate(jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4), cos, sin)
    np.testing.assert_array_equal(out.ravel(), [-3.0, -2.0, 1.0, -4.0])


def test_rotary_scores_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, CONFIG.head_dim))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, *rotary(CONFIG, jnp.array([[p]], jnp.int32)))
            for x, p in ((q, query_position), (k, key_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_rope_frequencies_by_hand():
    # theta 10000, head_dim 8: 10000 ** (0, -1/4, -1/2, -3/4)
    np.testing.assert_allclose(rope_frequencies(CONFIG), [1.0, 0.1, 0.01, 0.001], rtol=1e-12)


def test_llama3_scaling_by_hand():
    # Wavelengths 2 pi (1, 10, 100, 1000). Context 64 with factors 0.5 and 4: below 16 kept, above 128 stretched 8-fold.
    # Between, at 62.83: blend = (64 / 62.83 - 0.5) / 3.5 = 0.148168, so 0.1 * (0.148168 + 0.851832 / 8).
    scaling = Llama3RopeScaling(8.0, 0.5, 4.0, 64)
    frequencies = rope_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling))
    blend = (64 / (20 * math.pi) - 0.5) / 3.5
    expected = [1.0, 0.1 * (blend + (1 - blend) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)


def test_segment_mask_looks_as_drawn():
    drawn = """
        1 . . . .
        1 1 . . .
        . . 1 . .
        . . 1 1 .
        . . . . .
    """
    mask = segment_mask(jnp.array([[1, 1, 2, 2, 0]], jnp.int32))[0]
    assert [["1" if seen else "." for seen in row] for row in mask] == [
        line.split() for line in drawn.strip().splitlines()
    ]


def slow_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, group: int
) -> np.ndarray:
    """Attention one query at a time, in float64."""
    out = np.zeros(q.shape, np.float64)
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        if len(seen):
            scores = k[b, seen, n // group].astype(np.float64) @ q[b, t, n] / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
    return out


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_attention_equals_the_slow_reference(q_heads: int, kv_heads: int):
    rng = np.random.default_rng(q_heads)
    q = rng.standard_normal((2, 7, q_heads, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 7, kv_heads, 8)).astype(np.float32)
    mask = np.asarray(
        segment_mask(jnp.array([[1, 1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 2, 3, 3]], jnp.int32))
    )
    arrays = (jnp.asarray(x) for x in (q, k, v))
    out = masked_attention(*arrays, mask=jnp.asarray(mask), dtype=jnp.dtype(jnp.float32))
    expected = slow_attention(q, k, v, mask, q_heads // kv_heads)
    np.testing.assert_allclose(out, expected, **tol(jnp.float32, reduced=7))
    np.testing.assert_array_equal(out[0, 6], np.zeros((q_heads, 8)))  # padding sees no key


def test_attention_with_nothing_to_see_has_finite_gradients():
    x = jax.random.normal(jax.random.key(0), (1, 2, 2, 4))
    mask = jnp.array([[[False, False], [True, True]]])

    def total(x: jax.Array) -> jax.Array:
        return masked_attention(x, x, x, mask=mask, dtype=jnp.dtype(jnp.float32)).sum()

    gradient = jax.grad(total)(x)
    assert jnp.isfinite(gradient).all()
    assert jnp.abs(gradient).max() > 0.1


def test_packed_segments_equal_separate_rows(decoder: Decoder):
    tokens, positions, segments = rows(5, 3, 4)
    packed = logits_of(decoder, tokens, positions, segments)
    start = 0
    for length in (5, 3, 4):
        part = slice(start, start + length)
        ones = jnp.ones((1, length), jnp.int32)
        alone = logits_of(decoder, tokens[:, part], positions[:, part], ones)
        np.testing.assert_allclose(packed[:, part], alone, **tol(jnp.float32, reduced=100))
        start += length


def test_later_tokens_and_padding_do_not_move_a_logit(decoder: Decoder):
    tokens, positions, segments = rows(6, 6)
    before = logits_of(decoder, tokens, positions, segments)
    changed = logits_of(decoder, tokens.at[0, 3].add(1) % CONFIG.vocab, positions, segments)
    np.testing.assert_array_equal(changed[0, :3], before[0, :3])
    np.testing.assert_array_equal(changed[0, 6:], before[0, 6:])
    assert (jnp.abs(changed - before)[0, 3:6].max(axis=-1) > 1e-3).all()


def test_scanned_layers_equal_a_loop(decoder: Decoder):
    tokens, positions, segments = rows(6)
    mask = segment_mask(segments)
    attend = partial(masked_attention, mask=mask, dtype=jnp.dtype(jnp.float32))
    x = embed(decoder.embedding[...], tokens)
    for layer in range(CONFIG.layers):
        params = {name: w[layer] for name, w in decoder.layers.stacked().items()}
        x = jax.jit(partial(block, CONFIG, attend=attend))(params, x, *rotary(CONFIG, positions))
    x = rms_norm(x, decoder.final_norm[...], CONFIG.norm_eps)
    scanned = nnx.jit(Decoder.hidden)(decoder, tokens, positions, segments)
    np.testing.assert_allclose(scanned, x, **tol(jnp.float32, reduced=100))


def test_gradient_equals_a_finite_difference(decoder: Decoder):
    batch = rows(5, 2)
    graph, params = nnx.split(decoder)

    @jax.jit
    def loss(params: Any) -> Any:
        log_probs = jax.nn.log_softmax(nnx.merge(graph, params).logits(*batch))
        return -jnp.mean(log_probs[..., 7])

    rng = np.random.default_rng(1)
    directions = jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32), params)
    gradient = jax.jit(jax.grad(loss))(params)
    pairs = zip(*map(jax.tree.leaves, (gradient, directions)), strict=True)
    slope = sum(np.vdot(np.asarray(g, np.float64), d) for g, d in pairs)
    step = 1e-3
    ahead, behind = (
        float(loss(jax.tree.map(lambda p, d, s=s: p + s * d, params, directions)))
        for s in (step, -step)
    )
    # float32 rounding of the loss (1e-6) over 2e-3, plus the third derivative times step**2
    assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-2, abs=2e-3)


def test_bfloat16_weights_stay_close_to_float32(decoder: Decoder):
    batch = rows(12, 8)
    small = dataclasses.replace(CONFIG, dtype="bfloat16")
    rounded = in_dtype(decoder, small)
    logits = logits_of(rounded, *batch)
    assert logits.dtype == jnp.float32
    log_probs = jax.nn.log_softmax(logits)
    assert jnp.isfinite(log_probs).all()
    gap = jnp.abs(log_probs - jax.nn.log_softmax(logits_of(decoder, *batch)))
    # Measured: mean 0.019, max 0.126, from three layers of activations with 8 bits.
    assert gap.mean() < 0.04
    assert gap.max() < 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "q_heads=4 must be a multiple of kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
