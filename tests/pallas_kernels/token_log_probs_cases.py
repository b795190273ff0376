"""What every implementation of token_log_probs must do: a class of tests to inherit."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from token_log_probs_exact import (
    GRADIENT_ERROR,
    Exact,
    Given,
    exact_loss,
    inputs,
    loss_of,
    losses_given,
    masks,
    relative_error,
)

from pallas_kernels.token_log_probs import Shards, TokenLogProbs, token_log_probs, token_loss
from pallas_kernels.token_log_probs.shapes import SMALL_SHAPES, Shape
from tolerance import tol


def with_turned_head(given: Given) -> Given:
    return given | {"head": jnp.asarray(given["head"].T), "head_axes": "embed vocab"}


def mesh_of(**sizes: int) -> Mesh:
    """Over the first devices there are. Sizes are halved until there are enough."""
    names, counts = list(sizes), list(sizes.values())
    while math.prod(counts) > jax.device_count():
        counts = [max(count // 2, 1) for count in counts]
    devices = np.asarray(jax.devices()[: math.prod(counts)]).reshape(counts)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


class TokenLogProbsCases:
    """Inherit, set `implementation`, and override what differs.

    What is compiled is kept for the class: tests that differ in data alone share it.
    """

    implementation: str
    options: ClassVar[Given] = {}
    """Arguments of every call."""
    shapes: ClassVar[dict[str, Shape]] = SMALL_SHAPES
    ragged = SMALL_SHAPES["ragged"]
    bends = True
    """Bias and soft-cap are served."""
    spreads = True
    """Shards are served."""
    small = Shape(64, 32, 160, "float32")
    """What most tests use."""
    compiler_options: ClassVar[Given] = {}
    """Of XLA."""

    @pytest.fixture(autouse=True)
    def _where_it_runs(self):
        with self.context():
            yield

    def context(self):
        """Entered around each test."""
        return contextlib.nullcontext()

    @classmethod
    def jit(cls, function: Callable) -> Callable:
        return jax.jit(function, compiler_options=cls.compiler_options)

    def call(self, **given) -> TokenLogProbs:
        return token_log_probs(**given, **self.options, implementation=self.implementation)

    def loss(self, values, **given):
        return token_loss(
            loss_of, values, **given, **self.options, implementation=self.implementation
        )

    def with_gradients(self, given: Given, cotangents, **more):
        """Outputs, and gradients of hidden, head and bias (if given) for the cotangents of all outputs."""
        wrt, rest, fixed = _parted(given | more)
        (_, out), found = _two_passes(type(self), fixed)(wrt, rest, list(cotangents))
        return out, [found[name] for name in wrt]

    def loss_with_gradients(self, given: Given, values, **more):
        """The loss, outputs, and gradients of hidden and head, in one pass."""
        wrt, rest, fixed = _parted(given | more)
        (total, out), found = _one_pass(type(self), fixed)(wrt, rest, values)
        return total, out, [found[name] for name in wrt]

    def check(self, shape: Shape, given: Given, **more) -> None:
        """Values and gradients against float64."""
        rng = np.random.default_rng(1)
        cotangents = rng.normal(size=(3, shape.tokens)).astype(np.float32)
        slow = Exact(**given, **_without_shards(more))
        fed = with_turned_head(given) if self.turned else given
        out, found = self.with_gradients(fed, cotangents, **more)
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

    def check_loss(self, shape: Shape, given: Given, spread: float = 1.0, **more) -> None:
        """The loss in one pass, its values and gradients, against float64."""
        values = losses_given(shape.tokens)
        slow = Exact(**given, **_without_shards(more))
        total, out, found = self.loss_with_gradients(given, values, **more)
        close = tol(np.float32, reduced=(shape.embed + shape.vocab) * math.ceil(spread))
        for each, expected in zip(out, slow.values, strict=True):
            np.testing.assert_allclose(each, expected, rtol=close["rtol"], atol=close["atol"] * 4)
        losses, slopes = exact_loss(slow, values)
        assert total == pytest.approx(losses.sum(), rel=1e-5, abs=1e-4)
        for gradient, wanted in zip(found, slow.gradients(slopes), strict=False):
            assert relative_error(gradient, wanted) < GRADIENT_ERROR[shape.dtype]

    turned = False

    # --- values and gradients ---------------------------------------------------------------------------------------

    def test_values_and_gradients_are_those_of_float64(self, shape):
        self.check(shape, inputs(shape), temperature=0.7)

    def test_the_other_head_layout_and_a_temperature_per_token(self):
        self.turned = True
        temperature = jnp.linspace(0.5, 2.0, self.small.tokens, dtype=jnp.float32)
        self.check(self.small, inputs(self.small), temperature=temperature)

    def test_bias_and_soft_cap(self):
        given = inputs(self.small, bias=True, spread=3.0)
        if not self.bends:
            with pytest.raises(NotImplementedError, match="neither bias nor soft-cap"):
                self.call(**given, soft_cap=4.0)
            return
        self.check(self.small, given, soft_cap=4.0, temperature=0.8)

    def test_without_entropy(self):
        given = inputs(self.small)
        found = self.jit(functools.partial(self.call, entropy=False))(**given)
        assert np.isnan(np.asarray(found.entropy)).all()
        reduced = self.small.embed + self.small.vocab
        for values, expected in zip(found[:2], Exact(**given).values[:2], strict=True):
            np.testing.assert_allclose(values, expected, **tol(np.float32, reduced=reduced))

    @pytest.mark.parametrize("spread", [1.0, 60.0])
    def test_the_loss_in_one_pass_is_that_in_two(self, spread):
        # With spread 60, some targets have p < e^-90: more than the powers of a pass can hold.
        given = inputs(self.small, spread=spread)
        if spread > 1:
            assert Exact(**given, temperature=0.7).values.log_prob.min() < -90
        self.check_loss(self.small, given, spread, temperature=0.7)

    # --- masks, extremes, odd targets -------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", masks(1))
    def test_valid_tokens_may_be_anywhere(self, name):
        valid = jnp.asarray(masks(self.ragged.tokens)[name])
        self.check(self.ragged, inputs(self.ragged) | {"valid": valid}, temperature=0.7)

    @pytest.mark.parametrize("passes", ["one pass", "two passes"])
    def test_what_padding_holds_cannot_reach_values_or_gradients(self, passes):
        given = inputs(self.small)
        valid = np.asarray(given["valid"])
        spoilt = dict(given)
        spoilt["hidden"] = jnp.where(given["valid"][:, None], given["hidden"], jnp.nan)
        spoilt["targets"] = jnp.where(given["valid"], given["targets"], -100)
        clean, other = (self._with_ones(each, passes) for each in (given, spoilt))
        for left, right in zip(jax.tree.leaves(clean), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(left, right)
        out, found = other
        for values in (*out, found[0]):
            np.testing.assert_array_equal(np.asarray(values, np.float32)[~valid], 0)

    @pytest.mark.parametrize("passes", ["one pass", "two passes"])
    def test_nothing_valid_gives_zeros(self, passes):
        given = inputs(self.small) | {"valid": jnp.zeros(self.small.tokens, bool)}
        given["hidden"] = jnp.full_like(given["hidden"], jnp.nan)
        for values in jax.tree.leaves(self._with_ones(given, passes)):
            np.testing.assert_array_equal(np.asarray(values, np.float32), 0)

    def _with_ones(self, given: Given, passes: str):
        if passes == "two passes":
            return self.with_gradients(given, [jnp.ones(self.small.tokens, jnp.float32)] * 3)
        values = losses_given(self.small.tokens)
        _, *found = self.loss_with_gradients(given, values, temperature=0.7)
        return found

    def test_extreme_logits_give_exact_values_and_finite_gradients(self):
        # Rows of logits: (1e4, -1e4), (-1e4, 1e4) and (1e4, 1e4) in columns 0 and 1, all others -1e4; target 0.
        shape = self.small
        dtype = jnp.dtype(shape.dtype)
        hidden = np.zeros((shape.tokens, shape.embed))
        hidden[:3, :3] = np.eye(3)
        head = np.zeros((shape.vocab, shape.embed))
        head[:, :3] = -9984  # 1e4 as bfloat16 has it
        head[0, [0, 2]] = head[1, [1, 2]] = 9984
        given = {
            "hidden": jnp.asarray(hidden, dtype),
            "head": jnp.asarray(head, dtype),
            "targets": jnp.zeros(shape.tokens, jnp.int32),
            "valid": jnp.arange(shape.tokens) < 3,
        }
        ones = [jnp.ones(shape.tokens, jnp.float32)] * 3
        out, found = self.with_gradients(given, ones)
        log_prob, log_normaliser, entropy = (values[:3] for values in out)
        np.testing.assert_allclose(log_prob, [0.0, -2 * 9984, -np.log(2)], **tol(np.float32))
        # At 1e4 a float32 has steps of 1e-3.
        np.testing.assert_allclose(log_normaliser, [9984, 9984, 9984 + np.log(2)], rtol=1e-7)
        np.testing.assert_allclose(entropy, [0.0, 0.0, np.log(2)], **tol(np.float32))
        # With 1 for each cotangent, d_logits = is target; the entropy is at an extreme.
        expected = Exact(**given).gradients(1.0, 1.0, 1.0)
        for gradient, wanted in zip(found, expected, strict=False):
            assert relative_error(gradient, wanted) < 1e-3

    def test_log_probs_are_never_above_zero(self):
        # One logit dominates: rounding alone could make its log-prob positive.
        given = inputs(self.small, spread=30.0)
        logits = given["hidden"].astype(jnp.float32) @ given["head"].astype(jnp.float32).T
        given["targets"] = jnp.argmax(logits, axis=1).astype(jnp.int32)
        out, _ = self.with_gradients(given, [jnp.ones(self.small.tokens, jnp.float32)] * 3)
        found = np.asarray(out.log_prob)
        assert np.all(found <= 0)
        assert np.max(found[np.asarray(given["valid"])]) > -1e-3

    def test_a_target_outside_the_vocabulary_gives_nan(self):
        shape = self.small
        given = inputs(shape)
        outside = jnp.array([-1, shape.vocab, shape.vocab + 840], jnp.int32)
        given["targets"] = given["targets"].at[:3].set(outside)
        out, _ = self.with_gradients(given, [jnp.ones(shape.tokens, jnp.float32)] * 3)
        found = np.isnan(np.asarray(out.log_prob))
        np.testing.assert_array_equal(found, np.arange(shape.tokens) < 3)

    # --- transformations --------------------------------------------------------------------------------------------

    def test_vmap_gives_the_values_and_gradients_of_each_member(self):
        batch = [inputs(self.small, seed=seed) for seed in range(2)]
        # Members differ in their number of valid tokens, so in their number of chunks.
        batch[1]["valid"] = batch[1]["valid"] & (jnp.arange(self.small.tokens) < 20)
        batch[1]["head"] = batch[0]["head"]

        def loss(hidden, targets, valid):
            def value(hidden, head):
                out = self.call(hidden=hidden, head=head, targets=targets, valid=valid)
                return jnp.sum(out.log_prob) + jnp.sum(out.entropy**2)

            return jax.value_and_grad(value, argnums=(0, 1))(hidden, batch[0]["head"])

        stacked = [jnp.stack([g[n] for g in batch]) for n in ("hidden", "targets", "valid")]
        totals, found = self.jit(jax.vmap(loss))(*stacked)
        for i, given in enumerate(batch):
            slow = Exact(**given)
            entropy = slow.values.entropy
            assert totals[i] == pytest.approx((slow.values.log_prob + entropy**2).sum(), rel=1e-5)
            expected = slow.gradients(1.0, 0.0, 2 * entropy)
            for gradient, wanted in zip(found, expected, strict=False):
                assert relative_error(gradient[i], wanted) < GRADIENT_ERROR[self.small.dtype]

    def test_remat_gives_the_same_gradients(self):
        given = inputs(self.small)

        @jax.checkpoint
        def loss(hidden, head):
            out = self.call(**(given | {"hidden": hidden, "head": head}))
            return jnp.sum(out.log_prob) + jnp.sum(out.entropy)

        found = self.jit(jax.grad(loss, argnums=(0, 1)))(given["hidden"], given["head"])
        for gradient, wanted in zip(found, Exact(**given).gradients(1.0, 0.0, 1.0), strict=False):
            assert relative_error(gradient, wanted) < GRADIENT_ERROR[self.small.dtype]

    def test_jit_under_a_mesh_gives_the_same_values_and_gradients(self):
        shards = Shards("data", "tensor", mesh_of(data=4, tensor=2))
        given = inputs(self.small)
        if not self.spreads:
            with pytest.raises(NotImplementedError, match="knows one device only"):
                self.call(**given, shards=shards)
            return
        self.check(self.small, given, shards=shards)


class TokenLogProbsMoreCases(TokenLogProbsCases):
    """With what the operations do around any implementation."""

    @pytest.mark.parametrize("kind", ["float", "scalar array"])
    def test_temperature_in_each_of_its_forms(self, kind):
        given = inputs(self.small)
        value = 0.5 if kind == "float" else jnp.float32(0.5)
        found = self.call(**given, temperature=value).log_prob
        expected = Exact(**given, temperature=0.5).values.log_prob
        reduced = self.small.embed + self.small.vocab
        np.testing.assert_allclose(found, expected, **tol(np.float32, reduced=reduced))

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
        slow = Exact(**given)
        expected = slow.gradients(exact_loss(slow, values)[1])[1]
        for loss in (one_pass, two_passes):
            to_head, found = jax.jit(jax.grad(loss, argnums=(0, 1)))(given["head"], master)
            assert found.dtype == jnp.float32
            assert relative_error(found, expected) < GRADIENT_ERROR[shape.dtype]
            np.testing.assert_array_equal(np.asarray(to_head, np.float32), 0)


def _parted(given: Given) -> tuple[Given, Given, tuple]:
    """What has a gradient, other arrays, and what is fixed when a call is compiled."""
    wrt = {name: given[name] for name in ("hidden", "head", "bias") if name in given}
    rest = {n: x for n, x in given.items() if n not in wrt and isinstance(x, jax.Array)}
    fixed = tuple((n, x) for n, x in given.items() if n not in wrt and n not in rest)
    return wrt, rest, fixed


def _without_shards(more: Given) -> Given:
    return {name: value for name, value in more.items() if name != "shards"}


@functools.cache
def _two_passes(cases: type[TokenLogProbsCases], fixed: tuple):
    def weighted(wrt, rest, cotangents):
        out = cases().call(**wrt, **rest, **dict(fixed))
        terms = [jnp.sum(c * values) for c, values in zip(cotangents, out, strict=True)]
        return sum(terms), out

    return cases.jit(jax.value_and_grad(weighted, has_aux=True))


@functools.cache
def _one_pass(cases: type[TokenLogProbsCases], fixed: tuple):
    def loss(wrt, rest, values):
        return cases().loss(values, **wrt, **rest, **dict(fixed))

    return cases.jit(jax.value_and_grad(loss, has_aux=True))


def over_shapes(metafunc) -> None:
    """A test module's pytest_generate_tests: each class is tested over its own shapes."""
    if "shape" in metafunc.fixturenames and hasattr(metafunc.cls, "shapes"):
        shapes = metafunc.cls.shapes
        metafunc.parametrize("shape", shapes.values(), ids=shapes)
