"""Tokens drawn from logits: the distribution after temperature, top-k and top-p, and what a draw depends on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tolerance import tol
from tooljax.model.sampling import SamplingRows, draw, kept_tokens, split_seed

_draw = jax.jit(draw)


def draw_rows(
    logits,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    seeds=None,
    positions=None,
):
    """Draws one token a row; a scalar setting counts for all rows."""
    logits = np.asarray(logits, np.float32)
    batch = len(logits)
    seeds = range(batch) if seeds is None else seeds
    rows = SamplingRows(
        np.broadcast_to(np.float32(temperature), (batch,)),
        np.broadcast_to(np.int32(top_k), (batch,)),
        np.broadcast_to(np.float32(top_p), (batch,)),
        np.stack([split_seed(seed) for seed in seeds]),
    )
    at = np.zeros(batch, np.int32) if positions is None else np.asarray(positions, np.int32)
    tokens, log_probs = _draw(jnp.asarray(logits), rows, jnp.asarray(at))
    return np.asarray(tokens), np.asarray(log_probs)


def slow_probs(logits, temperature, top_k, top_p):
    """The distribution of one row in float64, the obvious way."""
    logits = np.asarray(logits, np.float64) / temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    likeliest_first = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        likeliest_first = likeliest_first[:top_k]
    total = sum(probs[i] for i in likeliest_first)
    kept, mass = [], 0.0
    for i in likeliest_first:
        if kept and mass >= top_p:
            break
        kept.append(i)
        mass += probs[i] / total
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def test_temperature_sharpens():
    # logits (0, ln 3) at T = 1/2 are (0, ln 9): probabilities 1/10 and 9/10
    tokens, log_probs = draw_rows([[0, np.log(3)]] * 64, temperature=0.5)
    expected = np.where(tokens == 1, np.log(9 / 10), np.log(1 / 10))
    assert set(tokens) == {0, 1}
    np.testing.assert_allclose(log_probs, expected, **tol(np.float32))


def test_top_p_keeps_the_fewest_tokens_that_hold_it():
    # of (0.6, 0.3, 0.1), 0.8 needs {0, 1}: renormalised 2/3 and 1/3
    tokens, log_probs = draw_rows([np.log([0.6, 0.3, 0.1])] * 64, top_p=0.8)
    expected = np.where(tokens == 0, np.log(2 / 3), np.log(1 / 3))
    assert set(tokens) == {0, 1}
    np.testing.assert_allclose(log_probs, expected, **tol(np.float32))


def test_top_p_counts_within_top_k():
    # top-2 of (0.5, 0.25, 0.25) is (2/3, 1/3): 0.6 needs token 0 only, though its share of everything is 0.5
    tokens, log_probs = draw_rows([np.log([0.5, 0.25, 0.25])] * 16, top_k=2, top_p=0.6)
    assert set(tokens) == {0}
    np.testing.assert_allclose(log_probs, 0, **tol(np.float32))


def test_equal_logits_do_not_widen_top_k():
    kept = kept_tokens(jnp.zeros((1, 5)), jnp.array([3]), jnp.array([1.0]))
    np.testing.assert_array_equal(kept, [[True, True, True, False, False]])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (7, 0.4), (1, 1.0)])
def test_log_probs_match_float64(temperature, top_k, top_p):
    logits = np.random.default_rng(1).normal(0, 2, (64, 37)).astype(np.float32)
    tokens, log_probs = draw_rows(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    probs = np.stack([slow_probs(row, temperature, top_k, top_p) for row in logits])
    expected = np.log(probs[np.arange(64), tokens])  # -inf, were a dropped token drawn
    np.testing.assert_allclose(log_probs, expected, **tol(np.float32, reduced=37))


def test_greedy_takes_the_likeliest_and_reports_the_whole_distribution():
    logits = np.random.default_rng(2).normal(0, 2, (16, 37)).astype(np.float32)
    tokens, log_probs = draw_rows(logits, temperature=0, top_k=3, top_p=0.5)
    np.testing.assert_array_equal(tokens, logits.argmax(1))
    wide = logits.astype(np.float64)
    expected = wide.max(1) - np.log(np.exp(wide).sum(1))
    np.testing.assert_allclose(log_probs, expected, **tol(np.float32, reduced=37))


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_come_as_often_as_they_should(vary):
    draws = 20_000
    probs = np.array([0.4, 0.3, 0.2, 0.08, 0.02])
    numbers = range(draws)
    seeds, positions = (numbers, [7] * draws) if vary == "seed" else ([7] * draws, numbers)
    tokens, _ = draw_rows([np.log(probs)] * draws, seeds=seeds, positions=positions)
    counts = np.bincount(tokens, minlength=5)
    chi_square = ((counts - draws * probs) ** 2 / (draws * probs)).sum()
    assert chi_square < 18.47  # 4 degrees of freedom: exceeded once in 1000 times by chance


def test_a_plain_row_is_the_same_beside_a_filtered_one():
    logits = np.random.default_rng(3).normal(0, 2, (8, 37)).astype(np.float32)
    alone = draw_rows(logits)
    beside = draw_rows(logits, top_k=[0, 0, 5, 0, 0, 0, 0, 5], top_p=[1, 1, 1, 0.5, 1, 1, 1, 0.5])
    plain = [0, 1, 4, 5, 6]
    np.testing.assert_array_equal(alone[0][plain], beside[0][plain])
    np.testing.assert_array_equal(alone[1][plain], beside[1][plain])


@pytest.mark.parametrize("vocab", [37, 512])
def test_a_row_does_not_depend_on_its_place(vocab):
    logits = np.random.default_rng(4).normal(0, 2, (13, vocab)).astype(np.float32)
    seeds, positions = np.arange(13) + 2**40, np.arange(13) * 3
    settings = {
        "temperature": np.array([1, 0, 0.7, *[1.0] * 10]),
        "top_k": np.array([0, 0, 4, *[0] * 10]),
    }
    tokens, log_probs = draw_rows(logits, seeds=map(int, seeds), positions=positions, **settings)
    for shift in range(1, 13):
        order = np.roll(np.arange(13), shift)
        moved = draw_rows(
            logits[order],
            seeds=map(int, seeds[order]),
            positions=positions[order],
            **{name: value[order] for name, value in settings.items()},
        )
        np.testing.assert_array_equal(moved[0], tokens[order])
        np.testing.assert_array_equal(moved[1], log_probs[order])


def test_seeds_use_all_their_bits():
    np.testing.assert_array_equal(split_seed(2**63 - 1), [0x7FFFFFFF, 0xFFFFFFFF])
    np.testing.assert_array_equal(split_seed(5 * 2**32 + 9), [5, 9])
    low, _ = draw_rows(np.zeros((1, 1000)), seeds=[1])
    high, _ = draw_rows(np.zeros((1, 1000)), seeds=[1 + 2**32])
    assert low != high


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match=rf"seed={seed} must be at least 0 and below 2\*\*63"):
        split_seed(seed)
