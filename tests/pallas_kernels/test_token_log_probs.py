"""token_log_probs without kernels: the reference, chunks of several sizes, the chooser and what it refuses."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from token_log_probs_cases import TokenLogProbsMoreCases, over_shapes
from token_log_probs_exact import inputs, loss_of

from pallas_kernels.token_log_probs import api, chunked, token_log_probs, token_loss
from pallas_kernels.token_log_probs.shapes import SHAPES, SMALL_SHAPES
from tolerance import tol

pytest_generate_tests = over_shapes


class TestReference(TokenLogProbsMoreCases):
    implementation = "reference"
    spreads = False


class TestOneChunk(TokenLogProbsMoreCases):
    implementation = "chunked"


class TestChunksOf32(TokenLogProbsMoreCases):
    implementation = "chunked"
    options: ClassVar = {"chunk_tokens": 32}


def test_a_case_worked_by_hand():
    # Logits (0, ln 3) at temperature 0.5 are (0, ln 9): p = (1/10, 9/10), log p(1) = ln 0.9 = -0.10536,
    # log normaliser = ln 10 = 2.302585, entropy = -(0.1 ln 0.1 + 0.9 ln 0.9) = 0.32508.
    hidden = jnp.ones((1, 1), jnp.float32)
    head = jnp.array([[0.0], [np.log(3.0)]], jnp.float32)
    found = token_log_probs(hidden, head, jnp.array([1], jnp.int32), temperature=0.5)
    for values, expected in zip(found, ([-0.1053605], [2.302585], [0.3250830]), strict=True):
        np.testing.assert_allclose(values, expected, **tol(np.float32))


def test_a_loss_worked_by_hand():
    # As above at temperature 1: p = (1/4, 3/4). loss = -2 log p(1), so d loss / d logits = -2 ((0, 1) - p)
    # = (1/2, -1/2), d_head = (1/2, -1/2) and d_hidden = 0 x 1/2 - ln 3 x 1/2.
    hidden = jnp.ones((1, 1), jnp.float32)
    head = jnp.array([[0.0], [np.log(3.0)]], jnp.float32)

    def loss(hidden, head):
        target = jnp.array([1], jnp.int32)
        return token_loss(lambda x, weight: -weight * x, jnp.float32([2.0]), hidden, head, target)[
            0
        ]

    value, (d_hidden, d_head) = jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)
    assert value == pytest.approx(-2 * np.log(0.75), rel=1e-6)
    np.testing.assert_allclose(d_head, [[0.5], [-0.5]], **tol(np.float32))
    np.testing.assert_allclose(d_hidden, [[-np.log(3.0) / 2]], **tol(np.float32))


def test_the_head_gradient_is_summed_in_float32():
    # 4096 tokens that each add 0.5 x 2**-8 to the same entry: a bfloat16 sum would stop growing at 0.5 to 1.
    hidden = jnp.full((4096, 1), 2.0**-8, jnp.bfloat16)
    targets = jnp.zeros((4096,), jnp.int32)
    options = {"implementation": "chunked", "chunk_tokens": 8}

    def two_passes(head):
        return jnp.sum(token_log_probs(hidden, head, targets, **options).log_prob)

    def one_pass(head):
        return token_loss(lambda x, _: x, (), hidden, head, targets, **options)[0]

    # Softmax is (1/2, 1/2), so the entries are +-4096 x 0.5 x 2**-8 = +-8.
    for function in (two_passes, one_pass):
        found = jax.grad(function)(jnp.zeros((2, 1), jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(found, np.float32), [[8.0], [-8.0]])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("passes", ["one pass", "two passes"])
def test_no_array_of_tokens_by_vocab_for_real_models(name, passes):
    shape = SHAPES[name]
    dtype = jnp.dtype(shape.dtype)

    def two(hidden, head, targets):
        out = token_log_probs(hidden, head, targets, implementation="chunked")
        return jnp.sum(out.log_prob) + jnp.sum(out.entropy)

    def one(hidden, head, targets):
        return token_loss(lambda x, _: x, (), hidden, head, targets, implementation="chunked")[0]

    jaxpr = jax.make_jaxpr(jax.grad({"one": one, "two": two}[passes[:3]], argnums=(0, 1)))(
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
    hidden, targets = jnp.zeros((0, 8), jnp.float32), jnp.zeros((0,), jnp.int32)
    found = token_log_probs(hidden, head, targets)
    assert [values.shape for values in found] == [(0,)] * 3
    nothing = {"weight": jnp.zeros((0,), jnp.float32), "more": jnp.zeros((0,), jnp.float32)}
    assert token_loss(loss_of, nothing, hidden, head, targets)[0] == 0


def test_the_chooser_goes_on_after_not_implemented_and_stops_at_value_errors(monkeypatch):
    class Cannot:
        @staticmethod
        def check(*_):
            raise NotImplementedError("needs an NPU")

    class Wrong:
        @staticmethod
        def check(*_):
            raise ValueError("vocab 5 is wrong")

    given = inputs(SMALL_SHAPES["one_token"])
    usual = api._IMPLEMENTATIONS
    expected = token_log_probs(**given, implementation="chunked").log_prob
    monkeypatch.setattr(api, "_IMPLEMENTATIONS", {"npu": Cannot, **usual})
    np.testing.assert_array_equal(token_log_probs(**given).log_prob, expected)
    with pytest.raises(NotImplementedError, match=r"can serve: \['npu: needs an NPU'\]"):
        token_log_probs(**given, implementation="npu")
    monkeypatch.setattr(api, "_IMPLEMENTATIONS", {"npu": Wrong, **usual})
    with pytest.raises(ValueError, match="vocab 5 is wrong"):
        token_log_probs(**given)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU cannot do")
def test_the_gpu_kernel_says_why_it_cannot_serve():
    with pytest.raises(NotImplementedError, match="gpu: needs a GPU, and JAX runs on cpu"):
        token_log_probs(**inputs(SMALL_SHAPES["one_token"]), implementation="gpu")


def test_wrong_arguments_are_refused():
    given = inputs(SMALL_SHAPES["one_token"])
    with pytest.raises(ValueError, match=r"implementation='cuda' is unknown; choose one of"):
        token_log_probs(**given, implementation="cuda")
    with pytest.raises(ValueError, match=r"temperature=0.0 must be above 0"):
        token_log_probs(**given, temperature=0.0)
    with pytest.raises(ValueError, match=r"soft_cap=-1.0 must be above 0"):
        token_log_probs(**given, soft_cap=-1.0)
    with pytest.raises(ValueError, match=r"head_axes='vocab' must be"):
        token_log_probs(**given, head_axes="vocab")
    with pytest.raises(ValueError, match=r"do not fit; they are \[tokens embed\], \[embed vocab\]"):
        token_log_probs(**given, head_axes="embed vocab")
    with pytest.raises(ValueError, match=r"bias \(7,\) does not fit head \(5, 8\)"):
        token_log_probs(**given, bias=jnp.zeros(7, jnp.float32))
    with pytest.raises(ValueError, match=r"hidden is float32 but head is bfloat16"):
        token_log_probs(**(given | {"head": given["head"].astype(jnp.bfloat16)}))
