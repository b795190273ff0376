"""The kernels for TPUs: interpreted on a CPU, exported, compiled ahead of time where libtpu is, and on a TPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from token_log_probs_cases import TokenLogProbsCases, over_shapes
from token_log_probs_exact import inputs

from pallas_kernels.token_log_probs import token_log_probs, tpu
from pallas_kernels.token_log_probs.mosaic import Tiles
from pallas_kernels.token_log_probs.shapes import Shape

pytest_generate_tests = over_shapes

TILES = Tiles(block=128, columns=128, resident=256)


class TestInterpreted(TokenLogProbsCases):
    implementation = "tpu"
    bends = False
    # The time goes into compiling the interpreter's loops, not into running them.
    compiler_options: ClassVar = {"xla_backend_optimization_level": 0}

    def context(self):
        return tpu.compiled_for(tpu.Device("TPU v5 lite", interpret=True, tiles=TILES))


def test_what_vmem_does_not_hold_is_refused():
    # In float32, a tile of the head and of the two buffers of its gradient take 128 x 8192 x 4 x 6 bytes: 24 of 56 MiB.
    given = {
        "hidden": jax.ShapeDtypeStruct((4096, 8192), jnp.float32),
        "head": jax.ShapeDtypeStruct((151936, 8192), jnp.float32),
        "targets": jax.ShapeDtypeStruct((4096,), jnp.int32),
        "valid": jax.ShapeDtypeStruct((4096,), bool),
    }

    def call(**given):
        return token_log_probs(**given, implementation="tpu")

    with tpu.compiled_for(tpu.Device("TPU v5p")):
        with pytest.raises(NotImplementedError, match="bytes do not fit VMEM of TPU v5p"):
            jax.eval_shape(call, **given)


@pytest.mark.parametrize(
    ("tokens", "embed", "vocab_major", "passes"),
    [
        (4096, 5120, True, 3),
        (16384, 5120, True, 12),
        (16384, 2048, True, 4),
        (4096, 5120, False, 4),
    ],
)
def test_tiles_that_the_compiler_was_seen_to_fit_save_a_pass(tokens, embed, vocab_major, passes):
    tiles = tpu.gradient_tiles(
        tokens, embed, jnp.dtype(jnp.bfloat16), vocab_major, tpu.Device("TPU v5p")
    )
    assert -(-tokens // tiles.resident) == passes
    assert tiles.resident % tiles.block == 0


class InDetail(TestInterpreted):
    """In JAX's model of a TPU: memory that nobody wrote is NaN, reads and writes must be inside their arrays, copies
    happen when they are waited for, and two cores race."""

    def context(self):
        params = pltpu.InterpretParams(
            detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
        )
        tiles = Tiles(block=128, columns=128, resident=128)
        return tpu.compiled_for(tpu.Device("TPU v5 lite", params, tiles))


@pytest.fixture
def in_detail():
    cases = InDetail()
    with cases.context():
        yield cases
    pltpu.reset_tpu_interpret_mode_state()


def _races_found() -> bool:
    """Newer JAX raises, older only notes it, in a place that is not public."""
    assert interpret_pallas_call.races is not None, "nothing was interpreted"
    return interpret_pallas_call.races.races_found


def test_no_races_nor_unwritten_memory_at_odd_sizes(in_detail):
    shape = Shape(100, 40, 200, "float32")
    in_detail.check(shape, inputs(shape), temperature=0.7)
    in_detail.check_loss(shape, inputs(shape), temperature=0.7)
    assert not _races_found()


def test_no_races_where_passes_add_to_the_gradient_of_a_turned_head(in_detail):
    # Whole tiles: the model returns an output that aliases an input with the size of whole tiles, and JAX refuses it.
    shape = Shape(150, 40, 256, "float32")
    in_detail.turned = True
    in_detail.check(shape, inputs(shape), temperature=0.7)
    assert not _races_found()


def test_the_model_of_a_tpu_finds_a_race(in_detail):
    def kernel(x, out):
        out[...] = x[...]

    # Both steps of a parallel axis, so both cores, write the one block of the output.
    call = pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=tpu._here().interpret,
    )
    raised = ""
    try:
        jax.block_until_ready(call(jnp.ones((16, 128), jnp.float32)))
    except Exception as error:  # of one version or the other
        raised = str(error).lower()
    assert "race" in raised or _races_found()


COMPILER = os.environ.get("TOOLJAX_LIBTPU_PYTHON") or (
    sys.executable if importlib.util.find_spec("libtpu") else ""
)
"""An interpreter whose environment has jax[tpu], and may lack all else that the tests need."""


@pytest.mark.skipif(
    not COMPILER,
    reason="needs libtpu: pip install 'jax[tpu]' here, or set TOOLJAX_LIBTPU_PYTHON to a Python that has it",
)
def test_the_compiler_for_tpus_takes_the_kernels_and_needs_little_memory():
    # In a process of its own: libtpu is one for a process, with settings from its environment.
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    root = str(Path(tpu.__file__).parents[2])
    done = subprocess.run(
        [COMPILER, str(Path(__file__).parent / "compile_for_tpus.py")],
        env=os.environ | settings | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kernels = {
        "two passes": ["token_log_probs_statistics", "token_log_probs_gradients"],
        "one pass": ["token_log_probs_powers"],
    }
    for name, names in kernels.items():
        assert set(names) <= set(found[name]["kernels"]), name
        assert not found[name]["whole_logits"], name
    # The float32 sum of the head's gradient, 519 MiB; and a chunk's powers, 297 MiB. The rest is for values per token.
    assert found["two passes"]["workspace_mib"] < 519 + 32
    assert found["one pass"]["workspace_mib"] < 519 + 297 + 32
