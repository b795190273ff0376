"""What every implementation of token_log_probs must do: a class of tests to inherit, and NumPy's answers in float64."""

import contextlib
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_log_probs import TokenLogProbs, token_log_probs, token_loss
from pallas_kernels.token_log_probs.shapes import SMALL_SHAPES, Shape
from tolerance import tol

GRADIENT_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative error of a gradient's norm."""

Given = dict[str, Any]


def inputs(shape: Shape, seed: int = 0, *, bias: bool = False, spread: float = 1.0) -> Given:
    """Logits of order `spread`, every fifth token not valid; values exact in the shape's dtype."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    head = rng.normal(size=(shape.vocab, shape.embed)) * shape.embed**-0.5 * spread
    arrays = {
        "hidden": rng.normal(size=(shape.tokens, shape.embed)).astype(dtype),
        "head": head.astype(dtype),
        "targets": rng.integers(0, shape.vocab, shape.tokens).astype(np.int32),
        "valid": np.arange(shape.tokens) % 5 != 4,
    }
    if bias:
        arrays["bias"] = rng.normal(size=shape.vocab).astype(np.float32)
    return {name: jnp.asarray(values) for name, values in arrays.items()}


class Exact:
    """Values and gradients in float64, written the slow way."""

    def __init__(
        self, hidden, head, targets, valid=None, bias=None, temperature: Any = 1.0, soft_cap=None
    ):
        self.hidden, self.head = (np.asarray(x, np.float64) for x in (hidden, head))
        tokens = len(self.hidden)
        self.targets = np.asarray(targets)
        self.valid = np.ones(tokens, bool) if valid is None else np.asarray(valid)
        self.scale = 1 / np.broadcast_to(np.asarray(temperature, np.float64), (tokens,))
        raw = self.hidden @ self.head.T
        if bias is not None:
            raw = raw + np.asarray(bias, np.float64)
        self.bend = 1.0
        if soft_cap is not None:
            self.bend = 1 - np.tanh(raw / soft_cap) ** 2
            raw = soft_cap * np.tanh(raw / soft_cap)
        logits = raw * self.scale[:, None]
        highest = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - highest).sum(axis=1, keepdims=True)
        self.log_softmax = logits - highest - np.log(total)
        self.softmax = np.exp(self.log_softmax)
        entropy = -(self.softmax * self.log_softmax).sum(axis=1)
        picked = self.log_softmax[np.arange(tokens), self.targets]
        normaliser = (highest + np.log(total))[:, 0]
        values: list[Any] = [np.where(self.valid, x, 0.0) for x in (picked, normaliser, entropy)]
        self.values = TokenLogProbs(*values)

    def gradients(self, d_log_prob, d_log_normaliser=0.0, d_entropy=0.0):
        """Of hidden, head and bias."""
        tokens = len(self.hidden)
        d, n, e = (
            np.broadcast_to(np.asarray(g, np.float64), (tokens,))[:, None]
            for g in (d_log_prob, d_log_normaliser, d_entropy)
        )
        d_logits = (n - d) * self.softmax
        d_logits[np.arange(tokens), self.targets] += d[:, 0]
        d_logits -= e * self.softmax * (self.log_softmax + self.values.entropy[:, None])
        d_raw = np.where(self.valid[:, None], d_logits * self.scale[:, None] * self.bend, 0.0)
        return d_raw @ self.head, d_raw.T @ self.hidden, d_raw.sum(axis=0)


def relative_error(found, expected) -> float:
    """Of the norm."""
    difference = np.asarray(found, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def loss_of(log_probs, given):
    """A loss that is not linear in the log-probs."""
    return given["weight"] * jnp.exp(0.1 * log_probs) + log_probs * given["more"]


def with_turned_head(given: Given) -> Given:
    return given | {"head": jnp.asarray(given["head"].T), "head_axes": "embed vocab"}


class TokenLogProbsCases:
    """Inherit, set `implementation`, and override what differs."""

    implementation: str
    options: ClassVar[Given] = {}
    """Arguments of every call."""
    shapes: ClassVar[dict[str, Shape]] = SMALL_SHAPES
    bends = True
    """Bias and soft-cap are served."""
    small = Shape(64, 32, 160, "float32")
    """What most tests use."""

    @pytest.fixture(autouse=True)
    def _where_it_runs(self):
        with self.context():
            yield

    def context(self):
        """Entered around each test."""
        return contextlib.nullcontext()

    def call(self, **given) -> TokenLogProbs:
        return token_log_probs(**given, **self.options, implementation=self.implementation)

    def loss(self, values, **given):
        return token_loss(
            loss_of, values, **given, **self.options, implementation=self.implementation
        )

    def with_gradients(self, given: Given, cotangents, **more):
        """Outputs, and gradients of hidden, head and bias (if given) for the cotangents of all outputs."""
        names = [n for n in ("hidden", "head", "bias") if n in given]

        def weighted(*arrays):
            out = self.call(**(given | dict(zip(names, arrays, strict=True))), **more)
            terms = [c * values for c, values in zip(cotangents, out, strict=True)]
            return sum(jnp.sum(term) for term in terms), out

        gradient = jax.value_and_grad(weighted, argnums=range(len(names)), has_aux=True)
        (_, out), found = jax.jit(gradient)(*(given[n] for n in names))
        return out, found

    def check(self, shape: Shape, given: Given, **more) -> None:
        """Values and gradients against float64."""
        rng = np.random.default_rng(1)
        cotangents = rng.normal(size=(3, shape.tokens)).astype(np.float32)
        slow = Exact(**given, **more)
        fed = dict(given)
        if self.turned:
            fed = with_turned_head(given)
        out, found = self.with_gradients(fed, list(cotangents), **more)
        # Products of bfloat16 are exact in float32, so both dtypes keep float32's tolerance.
        close = tol(np.float32, reduced=shape.embed + shape.vocab)
        for values, expected in zip(out, slow.values, strict=True):
            np.testing.assert_allclose(values, expected, **close)
            assert values.dtype == jnp.float32
        expected = slow.gradients(*cotangents)
        if self.turned:
            expected = (expected[0], expected[1].T, expected[2])
        for gradient, wanted in zip(found, expected, strict=False):
            assert relative_error(gradient, wanted) < GRADIENT_ERROR[shape.dtype]
        assert found[0].dtype == given["hidden"].dtype

    turned = False

    def _more(self, tokens: int) -> Given:
        return {"temperature": jnp.linspace(0.5, 2.0, tokens, dtype=jnp.float32)}

    # --- values and gradients ---------------------------------------------------------------------------------------

    def test_values_and_gradients_are_those_of_float64(self, shape):
        self.check(shape, inputs(shape), temperature=0.7)

    def test_the_other_head_layout_and_a_temperature_per_token(self):
        self.turned = True
        self.check(self.small, inputs(self.small), **self._more(self.small.tokens))

    def test_bias_and_soft_cap(self):
        given = inputs(self.small, bias=True, spread=3.0)
        if not self.bends:
            with pytest.raises(NotImplementedError, match="neither bias nor soft-cap"):
                self.call(**given, soft_cap=4.0)
            return
        self.check(self.small, given, soft_cap=4.0, temperature=0.8)

    @pytest.mark.parametrize("kind", ["float", "scalar array"])
    def test_temperature_in_each_of_its_forms(self, kind):
        given = inputs(self.small)
        value = 0.5 if kind == "float" else jnp.float32(0.5)
        found = self.call(**given, temperature=value).log_prob
        expected = Exact(**given, temperature=0.5).values.log_prob
        reduced = self.small.embed + self.small.vocab
        np.testing.assert_allclose(found, expected, **tol(np.float32, reduced=reduced))

    def test_without_entropy(self):
        given = inputs(self.small)
        found = self.call(**given, entropy=False)
        assert np.isnan(np.asarray(found.entropy)).all()
        reduced = self.small.embed + self.small.vocab
        for values, expected in zip(found[:2], Exact(**given).values[:2], strict=True):
            np.testing.assert_allclose(values, expected, **tol(np.float32, reduced=reduced))

    @pytest.mark.parametrize("spread", [1.0, 60.0])
    def test_the_loss_in_one_pass_is_that_in_two(self, spread):
        # With spread 60, some targets have p < e^-90: more than the powers of a pass can hold.
        shape = self.small
        given = inputs(shape, spread=spread)
        rng = np.random.default_rng(1)
        values = {n: rng.normal(size=shape.tokens).astype(np.float32) for n in ("weight", "more")}
        values = jax.tree.map(jnp.asarray, values)

        def loss(hidden, head):
            return self.loss(values, **(given | {"hidden": hidden, "head": head}), temperature=0.7)

        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (total, out), found = gradient(given["hidden"], given["head"])
        slow = Exact(**given, temperature=0.7)
        if spread > 1:
            assert slow.values.log_prob.min() < -90
        reduced = (shape.embed + shape.vocab) * math.ceil(spread)
        close = tol(np.float32, reduced=reduced)
        for each, expected in zip(out, slow.values, strict=True):
            np.testing.assert_allclose(each, expected, rtol=close["rtol"], atol=close["atol"] * 4)
        log_probs = slow.values.log_prob
        weight, more = (np.asarray(values[n], np.float64) for n in ("weight", "more"))
        losses = weight * np.exp(0.1 * log_probs) + log_probs * more
        assert total == pytest.approx(losses[slow.valid].sum(), rel=1e-5, abs=1e-4)
        slopes = 0.1 * weight * np.exp(0.1 * log_probs) + more
        for gradient, wanted in zip(found, slow.gradients(slopes), strict=False):
            assert relative_error(gradient, wanted) < GRADIENT_ERROR[shape.dtype]

    # --- masks, extremes, odd targets -------------------------------------------------------------------------------

    def test_what_padding_holds_cannot_reach_values_or_gradients(self):
        given = inputs(self.small)
        valid = np.asarray(given["valid"])
        spoilt = dict(given)
        spoilt["hidden"] = jnp.where(given["valid"][:, None], given["hidden"], jnp.nan)
        spoilt["targets"] = jnp.where(given["valid"], given["targets"], -100)
        ones = [jnp.ones(self.small.tokens, jnp.float32)] * 3
        clean, other = (self.with_gradients(each, ones) for each in (given, spoilt))
        for left, right in zip(jax.tree.leaves(clean), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(left, right)
        for values in (*other[0], other[1][0]):
            np.testing.assert_array_equal(np.asarray(values, np.float32)[~valid], 0)

    def test_nothing_valid_gives_zeros(self):
        given = inputs(self.small) | {"valid": jnp.zeros(self.small.tokens, bool)}
        given["hidden"] = jnp.full_like(given["hidden"], jnp.nan)
        ones = [jnp.ones(self.small.tokens, jnp.float32)] * 3
        for values in jax.tree.leaves(self.with_gradients(given, ones)):
            np.testing.assert_array_equal(np.asarray(values, np.float32), 0)

    def test_extreme_logits_give_exact_values_and_finite_gradients(self):
        # Rows of logits: (1e4, -1e4), (-1e4, 1e4) and (1e4, 1e4) in columns 0 and 1, all others -1e4; target 0.
        shape = self.small
        dtype = jnp.dtype(shape.dtype)
        hidden = np.zeros((3, shape.embed))
        hidden[:, :3] = np.eye(3)
        head = np.zeros((shape.vocab, shape.embed))
        head[:, :3] = -9984  # 1e4 as bfloat16 has it
        head[0, [0, 2]] = head[1, [1, 2]] = 9984
        given = {
            "hidden": jnp.asarray(hidden, dtype),
            "head": jnp.asarray(head, dtype),
            "targets": jnp.zeros(3, jnp.int32),
            "valid": jnp.ones(3, bool),
        }
        ones = [jnp.ones(3, jnp.float32)] * 3
        out, found = self.with_gradients(given, ones)
        np.testing.assert_allclose(out.log_prob, [0.0, -2 * 9984, -np.log(2)], **tol(np.float32))
        # At 1e4 a float32 has steps of 1e-3.
        np.testing.assert_allclose(out.log_normaliser, [9984, 9984, 9984 + np.log(2)], rtol=1e-7)
        np.testing.assert_allclose(out.entropy, [0.0, 0.0, np.log(2)], **tol(np.float32))
        # With 1 for each cotangent, d_logits = is target; the entropy is at an extreme.
        expected = Exact(**given).gradients(1.0, 1.0, 1.0)
        for gradient, wanted in zip(found, expected, strict=False):
            assert relative_error(gradient, wanted) < 1e-3

    def test_log_probs_are_never_above_zero(self):
        # One logit dominates: rounding alone could make its log-prob positive.
        given = inputs(self.small, spread=30.0)
        logits = given["hidden"].astype(jnp.float32) @ given["head"].astype(jnp.float32).T
        found = self.call(**(given | {"targets": jnp.argmax(logits, axis=1).astype(jnp.int32)}))
        assert np.all(np.asarray(found.log_prob) <= 0)
        assert np.max(np.asarray(found.log_prob)[np.asarray(given["valid"])]) > -1e-3

    @pytest.mark.parametrize("target", [-1, 160, 1000])
    def test_a_target_outside_the_vocabulary_gives_nan(self, target):
        given = inputs(Shape(2, self.small.embed, 160, self.small.dtype))
        given["targets"] = given["targets"].at[0].set(target)
        found = np.asarray(self.call(**given).log_prob)
        assert np.isnan(found).tolist() == [True, False]

    def test_master_weights_take_the_gradient_in_float32_and_are_not_read(self):
        given = inputs(self.small)
        shape = self.small
        values = {name: jnp.ones(shape.tokens, jnp.float32) for name in ("weight", "more")}

        def one_pass(head, master):
            return self.loss(values, **(given | {"head": head, "master": master}))[0]

        def two_passes(head, master):
            out = self.call(**(given | {"head": head, "master": master}))
            return jnp.sum(jnp.where(given["valid"], loss_of(out.log_prob, values), 0.0))

        # What is read would be seen: the reference alone adds it, minus itself.
        junk = 7.0 if self.implementation == "reference" else jnp.nan
        master = jnp.full(given["head"].shape, junk, jnp.float32)
        log_probs = Exact(**given).values.log_prob
        expected = Exact(**given).gradients(0.1 * np.exp(0.1 * log_probs) + 1)[1]
        for loss in (one_pass, two_passes):
            to_head, found = jax.jit(jax.grad(loss, argnums=(0, 1)))(given["head"], master)
            assert found.dtype == jnp.float32
            assert relative_error(found, expected) < GRADIENT_ERROR[shape.dtype]
            np.testing.assert_array_equal(np.asarray(to_head, np.float32), 0)

    # --- transformations --------------------------------------------------------------------------------------------

    def test_vmap_gives_the_values_and_gradients_of_a_loop(self):
        batch = [inputs(self.small, seed=seed) for seed in range(2)]
        head = batch[0]["head"]

        def loss(hidden, targets, valid):
            def value(hidden, head):
                out = self.call(hidden=hidden, head=head, targets=targets, valid=valid)
                return jnp.sum(out.log_prob) + jnp.sum(out.entropy**2)

            return jax.value_and_grad(value, argnums=(0, 1))(hidden, head)

        # Members differ in their number of valid tokens, so in their number of chunks.
        batch[1]["valid"] = batch[1]["valid"] & (jnp.arange(self.small.tokens) < 20)
        stacked = [jnp.stack([g[n] for g in batch]) for n in ("hidden", "targets", "valid")]
        found = jax.jit(jax.vmap(loss))(*stacked)
        alone = jax.jit(loss)
        for i in range(2):
            expected = jax.tree.leaves(alone(*(values[i] for values in stacked)))
            for each, wanted in zip(jax.tree.leaves(found), expected, strict=True):
                error = relative_error(each[i], np.asarray(wanted, np.float64))
                assert error < GRADIENT_ERROR[self.small.dtype]

    def test_remat_gives_the_same_gradients(self):
        given = inputs(self.small)

        def loss(hidden, head):
            out = self.call(**(given | {"hidden": hidden, "head": head}))
            return jnp.sum(out.log_prob) + jnp.sum(out.entropy)

        def gradients(function):
            found = jax.jit(jax.grad(function, argnums=(0, 1)))(given["hidden"], given["head"])
            return [np.asarray(gradient, np.float64) for gradient in found]

        for again, once in zip(gradients(jax.checkpoint(loss)), gradients(loss), strict=True):
            assert relative_error(again, once) < GRADIENT_ERROR[self.small.dtype]


def over_shapes(metafunc) -> None:
    """A test module's pytest_generate_tests: each class is tested over its own shapes."""
    if "shape" in metafunc.fixturenames and hasattr(metafunc.cls, "shapes"):
        shapes = metafunc.cls.shapes
        metafunc.parametrize("shape", shapes.values(), ids=shapes)
