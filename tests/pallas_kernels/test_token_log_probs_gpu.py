"""The kernel for Hopper: on the card, and in JAX's GPU interpreter where there is none."""

import importlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_log_probs_cases import TokenLogProbsCases, TokenLogProbsMoreCases, over_shapes
from token_log_probs_exact import GRADIENT_ERROR, Exact, inputs, loss_of, relative_error

from pallas_kernels.token_log_probs import gpu, hopper, token_log_probs, token_loss, tuned
from pallas_kernels.token_log_probs.shapes import HOPPER_SHAPES, Shape

pytest_generate_tests = over_shapes


def _can_interpret() -> bool:
    try:
        module = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:
        return False
    return jax.default_backend() == "cpu" and hasattr(module, "InterpretGPUParams")


@pytest.mark.gpu
class TestOnTheCard(TokenLogProbsMoreCases):
    implementation = "gpu"
    shapes: ClassVar = HOPPER_SHAPES
    ragged = HOPPER_SHAPES["odd_vocab"]
    bends = False
    small = Shape(300, 128, 1187, "bfloat16")


@pytest.mark.gpu
class TestOnTheCardInChunks:
    """Some of the cases: the rest is the same code."""

    @pytest.fixture
    def cases(self):
        class InChunks(TestOnTheCard):
            options: ClassVar = {"chunk_tokens": 128}

        return InChunks()

    def test_values_and_gradients_are_those_of_float64(self, cases):
        shape = HOPPER_SHAPES["odd_vocab"]
        cases.check(shape, inputs(shape), temperature=0.7)

    @pytest.mark.parametrize("spread", [1.0, 60.0])
    def test_the_loss_in_one_pass_is_that_in_two(self, cases, spread):
        cases.test_the_loss_in_one_pass_is_that_in_two(spread)

    def test_vmap_gives_the_values_and_gradients_of_each_member(self, cases):
        cases.test_vmap_gives_the_values_and_gradients_of_each_member()

    @pytest.mark.parametrize("passes", ["one pass", "two passes"])
    def test_what_padding_holds_cannot_reach_values_or_gradients(self, cases, passes):
        cases.test_what_padding_holds_cannot_reach_values_or_gradients(passes)


@pytest.mark.skipif(not _can_interpret(), reason="needs a CPU and a JAX with a GPU interpreter")
class TestInterpreted:
    """Some of the cases, because the interpreter is slow."""

    @pytest.fixture
    def cases(self, monkeypatch):
        tiles = hopper.Tiles(tile_m=64, cluster=1, slots=2)
        monkeypatch.setattr(tuned, "tiles", lambda *_: tiles)

        class Interpreted(TokenLogProbsCases):
            implementation = "gpu"
            options: ClassVar = {"chunk_tokens": 64}
            small = Shape(70, 64, 131, "bfloat16")

        with gpu.interpreted(2):
            yield Interpreted()

    def test_values_and_gradients_are_those_of_float64(self, cases):
        cases.check(cases.small, inputs(cases.small), temperature=0.7)

    def test_extreme_logits_give_exact_values_and_finite_gradients(self, cases):
        cases.test_extreme_logits_give_exact_values_and_finite_gradients()

    def test_the_loss_in_one_pass_is_that_in_two(self, cases):
        cases.test_the_loss_in_one_pass_is_that_in_two(60.0)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1000, 192, 5003), (513, 2048, 4096), (77, 64, 128)])
def test_fresh_inputs_at_odd_shapes_with_poisoned_memory(sizes):
    seed = int(np.random.default_rng().integers(2**31))
    shape = Shape(sizes[0], sizes[1], sizes[2], "bfloat16")
    given = inputs(shape, seed=seed, spread=3.0)
    exact = Exact(**given)
    rng = np.random.default_rng(seed)
    values = {n: rng.normal(size=shape.tokens).astype(np.float32) for n in ("weight", "more")}

    def loss(hidden, head):
        more = given | {"hidden": hidden, "head": head, "implementation": "gpu"}
        return token_loss(loss_of, jax.tree.map(jnp.asarray, values), **more)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    compiled = gradient.lower(given["hidden"], given["head"]).compile()
    # What a kernel does not write is then NaN, whatever the size of the block that it gets.
    jax.block_until_ready([jnp.full((2**i,), jnp.nan, jnp.float32) for i in range(6, 28)])
    (_, out), found = compiled(given["hidden"], given["head"])
    for each, expected in zip(out, exact.values, strict=True):
        np.testing.assert_allclose(each, expected, rtol=2e-5, atol=2e-5, err_msg=f"seed {seed}")
    slope = values["weight"] * 0.1 * np.exp(0.1 * exact.values.log_prob) + values["more"]
    for each, expected in zip(found, exact.gradients(slope), strict=False):
        assert relative_error(each, expected) < GRADIENT_ERROR["bfloat16"], f"seed {seed}"


@pytest.mark.gpu
def test_the_chooser_takes_the_kernel_on_hopper():
    given = inputs(Shape(256, 128, 1024, "bfloat16"))
    text = jax.jit(lambda **g: token_log_probs(**g)).lower(**given).as_text()
    assert "mosaic_gpu" in text
