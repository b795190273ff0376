"""token_log_probs against NumPy in float64: values, gradients, padding, chunks, extremes, and the chooser."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.token_log_probs import api, chunked, token_log_probs
from pallas_kernels.token_log_probs.shapes import SHAPES, SMALL_SHAPES, Shape
from tolerance import tol

IMPLEMENTATIONS = ["chunked", "reference"]


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Logits of order 1, every fifth token not valid; values exact in the shape's dtype."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    arrays = {
        "hidden": rng.normal(size=(shape.tokens, shape.embed)).astype(dtype),
        "head": (rng.normal(size=(shape.vocab, shape.embed)) * shape.embed**-0.5).astype(dtype),
        "targets": rng.integers(0, shape.vocab, shape.tokens).astype(np.int32),
        "valid": np.arange(shape.tokens) % 5 != 4,
    }
    return {name: jnp.asarray(values) for name, values in arrays.items()}


def exact(hidden, head, targets, valid, temperature=1.0):
    """Log-probs, entropy and softmax in float64."""
    hidden, head = (np.asarray(x, np.float64) for x in (hidden, head))
    logits = (
        hidden
        @ head.T
        / np.broadcast_to(np.asarray(temperature, np.float64), hidden.shape[:1])[:, None]
    )
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    entropy = -(np.exp(log_softmax) * log_softmax).sum(axis=1)
    picked = log_softmax[np.arange(len(targets)), np.asarray(targets)]
    return np.where(valid, picked, 0.0), np.where(valid, entropy, 0.0), log_softmax


def exact_gradients(hidden, head, targets, valid, d_log_probs, d_entropy, temperature=1.0):
    """Gradients of sum(d_log_probs log_probs + d_entropy entropy) in float64, one token after the other."""
    _, entropy, log_softmax = exact(hidden, head, targets, valid, temperature)
    hidden, head = (np.asarray(x, np.float64) for x in (hidden, head))
    targets, temperature = np.asarray(targets), np.broadcast_to(temperature, hidden.shape[:1])
    d_hidden, d_head = np.zeros_like(hidden), np.zeros_like(head)
    for t in np.flatnonzero(valid):
        softmax = np.exp(log_softmax[t])
        d_logits = -d_log_probs[t] * softmax
        d_logits[targets[t]] += d_log_probs[t]
        d_logits -= d_entropy[t] * softmax * (log_softmax[t] + entropy[t])
        d_logits /= temperature[t]
        d_hidden[t] = d_logits @ head
        d_head += np.outer(d_logits, hidden[t])
    return d_hidden, d_head


@partial(jax.jit, static_argnums=0)
def run_chunked(chunk_tokens, hidden, head, targets, valid, temperature=1.0):
    """The chunked implementation with chunks small enough to need several."""
    rows = jnp.full(targets.shape, temperature, jnp.float32)
    return chunked.token_log_probs(
        *(jnp.asarray(values) for values in (hidden, head, targets, rows, valid)),
        chunk_tokens=chunk_tokens,
    )


def test_a_case_worked_by_hand():
    # Logits (0, ln 3) at temperature 0.5 are (0, ln 9): p = (1/10, 9/10), log p(1) = ln 0.9 = -0.10536,
    # entropy = -(0.1 ln 0.1 + 0.9 ln 0.9) = 0.32508.
    hidden = jnp.ones((1, 1), jnp.float32)
    head = jnp.array([[0.0], [np.log(3.0)]], jnp.float32)
    log_probs, entropy = token_log_probs(hidden, head, jnp.array([1], jnp.int32), temperature=0.5)
    np.testing.assert_allclose(log_probs, [-0.1053605], **tol(np.float32))
    np.testing.assert_allclose(entropy, [0.3250830], **tol(np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SMALL_SHAPES)
def test_values_are_those_of_float64(name, implementation):
    shape = SMALL_SHAPES[name]
    given = inputs(shape)
    log_probs, entropy = token_log_probs(**given, temperature=0.7, implementation=implementation)
    expected_log_probs, expected_entropy, _ = exact(**given, temperature=0.7)
    # Products of bfloat16 are exact in float32, so both dtypes keep float32's tolerance.
    close = tol(np.float32, reduced=shape.embed + shape.vocab)
    np.testing.assert_allclose(log_probs, expected_log_probs, **close)
    np.testing.assert_allclose(entropy, expected_entropy, **close)
    assert log_probs.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SMALL_SHAPES)
def test_gradients_are_those_of_float64(name, implementation):
    shape = SMALL_SHAPES[name]
    given = inputs(shape)
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(2, shape.tokens)).astype(np.float32)

    def loss(hidden, head):
        log_probs, entropy = token_log_probs(
            **(given | {"hidden": hidden, "head": head}),
            temperature=0.7,
            implementation=implementation,
        )
        return jnp.sum(weights[0] * log_probs + weights[1] * entropy)

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(
        *map(jnp.asarray, (given["hidden"], given["head"]))
    )
    expected = exact_gradients(
        **given, d_log_probs=weights[0], d_entropy=weights[1], temperature=0.7
    )
    for gradient, slow in zip(found, expected, strict=True):
        assert gradient.dtype == given["hidden"].dtype
        close = tol(shape.dtype, reduced=shape.tokens, gradient=True)
        np.testing.assert_allclose(np.asarray(gradient, np.float64), slow, **close)


@pytest.mark.parametrize("chunk_tokens", [7, 64, 1000])
def test_the_size_of_a_chunk_does_not_matter(chunk_tokens):
    given = inputs(SMALL_SHAPES["ragged"])
    weights = np.random.default_rng(1).normal(size=(2, 301)).astype(np.float32)

    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(hidden, head):
        out = run_chunked(chunk_tokens, **(given | {"hidden": hidden, "head": head}))
        return jnp.sum(weights[0] * out[0] + weights[1] * out[1]), out

    (_, out), gradients = jax.jit(loss)(given["hidden"], given["head"])
    close = tol(np.float32, reduced=1235)
    for found, slow in zip(out, exact(**given)[:2], strict=True):
        np.testing.assert_allclose(found, slow, **close)
    expected = exact_gradients(**given, d_log_probs=weights[0], d_entropy=weights[1])
    for found, slow in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, slow, **tol(np.float32, reduced=301, gradient=True))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_valid_tokens_may_be_anywhere(share):
    given = inputs(SMALL_SHAPES["ragged"])
    given["valid"] = jnp.asarray(np.random.default_rng(2).random(301) < share)
    expected = exact(**given)
    for found, slow in zip(run_chunked(32, **given), expected[:2], strict=True):
        np.testing.assert_allclose(found, slow, **tol(np.float32, reduced=1235))
        np.testing.assert_array_equal(np.asarray(found)[~np.asarray(given["valid"])], 0)


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_what_padding_holds_cannot_reach_values_or_gradients(chunk_tokens):
    given = inputs(SMALL_SHAPES["one_chunk"])
    spoilt = dict(given)
    spoilt["hidden"] = jnp.where(given["valid"][:, None], given["hidden"], jnp.nan)
    spoilt["targets"] = jnp.where(given["valid"], given["targets"], -100)

    def loss(hidden, head, targets):
        out = run_chunked(chunk_tokens, hidden, head, targets, given["valid"])
        return jnp.sum(out[0] + 0.5 * out[1])

    results = [
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(
            *(jnp.asarray(each[name]) for name in ("hidden", "head", "targets"))
        )
        for each in (given, spoilt)
    ]
    for clean, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(clean, other)
    np.testing.assert_array_equal(np.asarray(results[1][1][0])[~np.asarray(given["valid"])], 0)


@pytest.mark.parametrize("chunk_tokens", [1, 3])
def test_extreme_logits_give_exact_values_and_finite_gradients(chunk_tokens):
    # Rows of logits: (1e4, -1e4), (-1e4, 1e4) and (1e4, 1e4), always asking for token 0.
    given = {
        "hidden": np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], np.float32),
        "head": np.array([[1e4, 1e4], [-1e4, 1e4]], np.float32),
        "targets": np.zeros(3, np.int32),
        "valid": np.ones(3, bool),
    }
    log_probs, entropy = run_chunked(chunk_tokens, **given)
    np.testing.assert_allclose(log_probs, [0.0, -2e4, -np.log(2)], **tol(np.float32))
    np.testing.assert_allclose(entropy, [0.0, 0.0, np.log(2)], **tol(np.float32))

    def loss(hidden, head):
        out = run_chunked(chunk_tokens, **(given | {"hidden": hidden, "head": head}))
        return jnp.sum(out[0]) + jnp.sum(out[1])

    d_hidden, d_head = jax.jit(jax.grad(loss, argnums=(0, 1)))(
        *map(jnp.asarray, (given["hidden"], given["head"]))
    )
    # Row 2: softmax (0, 1), so d_logits (1, -1) and d_hidden = head[0] - head[1] = (2e4, 0). Row 1: certain, 0.
    # Row 3: softmax (1/2, 1/2), d_logits (1/2, -1/2), d_hidden = (1e4, 0); the entropy is at its maximum.
    np.testing.assert_allclose(d_hidden, [[0, 0], [2e4, 0], [1e4, 0]], **tol(np.float32))
    # d_head = (1, -1) x (-1, 0) + (1/2, -1/2) x (0, 1)
    np.testing.assert_allclose(d_head, [[-1, 0.5], [1, -0.5]], **tol(np.float32))


def test_log_probs_are_never_above_zero():
    # One logit dominates: rounding alone could make its log-prob positive.
    given = inputs(SMALL_SHAPES["ragged"])
    best = jnp.argmax(given["hidden"] @ given["head"].T, axis=1)
    log_probs, _ = token_log_probs(given["hidden"] * 30, given["head"], best)
    assert np.all(log_probs <= 0)
    assert np.max(log_probs) > -1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["float", "scalar array", "per token"])
def test_temperature_in_each_of_its_forms(kind, implementation):
    given = inputs(SMALL_SHAPES["one_chunk"])
    value = {
        "float": 0.5,
        "scalar array": np.float32(0.5),
        "per token": np.linspace(0.5, 2.0, 64, dtype=np.float32),
    }[kind]
    asked = value if kind == "float" else jnp.asarray(value)
    log_probs, _ = token_log_probs(**given, temperature=asked, implementation=implementation)
    np.testing.assert_allclose(
        log_probs, exact(**given, temperature=value)[0], **tol(np.float32, reduced=160)
    )


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_vmap_gives_the_values_and_gradients_of_a_loop(chunk_tokens):
    batch = [inputs(SMALL_SHAPES["one_chunk"], seed=seed) for seed in range(3)]
    head = jnp.asarray(batch[0]["head"])

    def loss(hidden, targets, valid):
        def value(hidden, head):
            out = run_chunked(chunk_tokens, hidden, head, targets, valid)
            return jnp.sum(out[0]) + jnp.sum(out[1] ** 2)

        return jax.value_and_grad(value, argnums=(0, 1))(hidden, head)

    # Members differ in their number of valid tokens, so in their number of chunks.
    for i, given in enumerate(batch):
        given["valid"] = given["valid"] & (np.arange(64) < 20 * (i + 1))
    stacked = [np.stack([given[n] for given in batch]) for n in ("hidden", "targets", "valid")]
    found = jax.jit(jax.vmap(loss))(*stacked)
    for i in range(3):
        alone = jax.jit(loss)(*(jnp.asarray(values[i]) for values in stacked))
        for each, expected in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(
                each[i], expected, **tol(np.float32, reduced=64, gradient=True)
            )


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_remat_gives_the_same_gradients(chunk_tokens):
    given = inputs(SMALL_SHAPES["one_chunk"])

    def loss(hidden, head):
        out = run_chunked(chunk_tokens, **(given | {"hidden": hidden, "head": head}))
        return jnp.sum(out[0]) + jnp.sum(out[1])

    arguments = [jnp.asarray(given[name]) for name in ("hidden", "head")]
    plain = jax.jit(jax.grad(loss, argnums=(0, 1)))(*arguments)
    again = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(*arguments)
    for found, expected in zip(again, plain, strict=True):
        np.testing.assert_allclose(found, expected, **tol(np.float32, gradient=True))


def test_the_head_gradient_is_summed_in_float32():
    # 4096 tokens that each add 0.5 x 2**-8 to the same entry: a bfloat16 sum would stop growing at 0.5 to 1.
    tokens = 4096
    hidden = jnp.full((tokens, 1), 2.0**-8, jnp.bfloat16)
    head = jnp.zeros((2, 1), jnp.bfloat16)

    def loss(head):
        rows = jnp.ones((tokens,), jnp.float32)
        valid = jnp.ones((tokens,), bool)
        targets = jnp.zeros((tokens,), jnp.int32)
        return jnp.sum(
            chunked.token_log_probs(hidden, head, targets, rows, valid, chunk_tokens=8)[0]
        )

    # Softmax is (1/2, 1/2), so the entries are +-4096 x 0.5 x 2**-8 = +-8.
    np.testing.assert_array_equal(np.asarray(jax.grad(loss)(head), np.float32), [[8.0], [-8.0]])


@pytest.mark.parametrize("name", SHAPES)
def test_no_array_of_tokens_by_vocab_for_real_models(name):
    shape = SHAPES[name]
    dtype = jnp.dtype(shape.dtype)

    def loss(hidden, head, targets):
        log_probs, entropy = token_log_probs(hidden, head, targets)
        return jnp.sum(log_probs) + jnp.sum(entropy)

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(
        jax.ShapeDtypeStruct((shape.tokens, shape.embed), dtype),
        jax.ShapeDtypeStruct((shape.vocab, shape.embed), dtype),
        jax.ShapeDtypeStruct((shape.tokens,), jnp.int32),
    )
    largest = max(_logit_sizes(jaxpr.jaxpr, shape.vocab))
    assert largest == chunked.default_chunk_tokens(shape.vocab) * shape.vocab
    assert largest <= 2**26
    assert largest < shape.tokens * shape.vocab


def _logit_sizes(jaxpr, vocab: int) -> list[int]:
    """Sizes of all arrays whose last axis is vocab, in inner jaxprs too."""
    sizes = []
    for equation in jaxpr.eqns:
        shapes = [variable.aval.shape for variable in equation.outvars]
        sizes += [int(np.prod(shape)) for shape in shapes if shape and shape[-1] == vocab]
        for inner in jaxprs_in_params(equation.params):
            sizes += _logit_sizes(inner, vocab)
    return sizes


def test_no_tokens():
    head = jnp.ones((5, 8), jnp.float32)
    log_probs, entropy = token_log_probs(
        jnp.zeros((0, 8), jnp.float32), head, jnp.zeros((0,), jnp.int32)
    )
    assert log_probs.shape == entropy.shape == (0,)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", [-1, 5, 1000])
def test_a_target_outside_the_vocabulary_gives_nan(target, implementation):
    log_probs, _ = token_log_probs(
        jnp.ones((2, 8), jnp.float32),
        jnp.ones((5, 8), jnp.float32),
        jnp.array([target, 0], jnp.int32),
        implementation=implementation,
    )
    np.testing.assert_allclose(log_probs, [np.nan, -np.log(5)], **tol(np.float32))


def test_the_chooser_goes_on_after_not_implemented_and_stops_at_value_errors(monkeypatch):
    def cannot(*_, **__):
        raise NotImplementedError("needs a TPU")

    def wrong(*_, **__):
        raise ValueError("vocab 5 is wrong")

    given = inputs(SMALL_SHAPES["one_token"])
    usual = api._IMPLEMENTATIONS
    monkeypatch.setattr(api, "_IMPLEMENTATIONS", {"tpu": cannot, **usual})
    expected = token_log_probs(**given, implementation="chunked")[0]
    np.testing.assert_array_equal(token_log_probs(**given)[0], expected)
    with pytest.raises(NotImplementedError, match=r"can serve: \['tpu: needs a TPU'\]"):
        token_log_probs(**given, implementation="tpu")
    monkeypatch.setattr(api, "_IMPLEMENTATIONS", {"tpu": wrong, **usual})
    with pytest.raises(ValueError, match="vocab 5 is wrong"):
        token_log_probs(**given)


def test_wrong_arguments_are_refused():
    given = inputs(SMALL_SHAPES["one_token"])
    with pytest.raises(ValueError, match=r"implementation='cuda' is unknown; choose one of"):
        token_log_probs(**given, implementation="cuda")
    with pytest.raises(ValueError, match=r"temperature=0.0 must be above 0"):
        token_log_probs(**given, temperature=0.0)
    with pytest.raises(ValueError, match=r"hidden is float32 but head is bfloat16"):
        token_log_probs(**(given | {"head": given["head"].astype(jnp.bfloat16)}))
