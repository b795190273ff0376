"""The kernel for Hopper: on the card, and in JAX's GPU interpreter where there is none."""

import importlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_log_probs_cases import TokenLogProbsCases, inputs, over_shapes

from pallas_kernels.token_log_probs import gpu, hopper, token_log_probs, tuned
from pallas_kernels.token_log_probs.shapes import HOPPER_SHAPES, Shape

pytest_generate_tests = over_shapes


def _can_interpret() -> bool:
    try:
        module = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:
        return False
    return jax.default_backend() == "cpu" and hasattr(module, "InterpretGPUParams")


@pytest.mark.gpu
class TestOnTheCard(TokenLogProbsCases):
    implementation = "gpu"
    shapes: ClassVar = HOPPER_SHAPES
    bends = False
    small = Shape(300, 128, 1187, "bfloat16")


@pytest.mark.gpu
class TestOnTheCardInChunks(TestOnTheCard):
    shapes: ClassVar = {"odd_vocab": HOPPER_SHAPES["odd_vocab"]}
    options: ClassVar = {"chunk_tokens": 128}


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
    seed = np.random.default_rng().integers(2**31)
    given = inputs(Shape(sizes[0], sizes[1], sizes[2], "bfloat16"), seed=int(seed), spread=3.0)
    jax.block_until_ready(jnp.full((2**28,), jnp.nan, jnp.float32))
    found = token_log_probs(**given, implementation="gpu")
    expected = token_log_probs(**given, implementation="reference")
    for values, slow in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, slow, rtol=2e-5, atol=2e-5, err_msg=f"seed {seed}")


@pytest.mark.gpu
def test_the_chooser_takes_the_kernel_on_hopper():
    given = inputs(Shape(256, 128, 1024, "bfloat16"))
    text = jax.jit(lambda **g: token_log_probs(**g)).lower(**given).as_text()
    assert "mosaic_gpu" in text
