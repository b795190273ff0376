"""The kernels for TPUs: interpreted on a CPU, exported, compiled ahead of time where libtpu is, and on a TPU."""

import importlib.util
import os
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from token_log_probs_cases import TokenLogProbsCases, over_shapes

from pallas_kernels.token_log_probs import token_log_probs, tpu
from pallas_kernels.token_log_probs.mosaic import Tiles

pytest_generate_tests = over_shapes

TILES = Tiles(block=128, columns=128, resident=256)


class TestInterpreted(TokenLogProbsCases):
    implementation = "tpu"
    bends = False
    # The time goes into compiling the interpreter's loops, not into running them.
    compiler_options: ClassVar = {"xla_backend_optimization_level": 0}

    def context(self):
        return tpu.compiled_for(tpu.Device("TPU v5 lite", interpret=True, tiles=TILES))


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'"
)
def test_the_compiler_takes_forward_and_gradients_for_v5e(monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv(
        "ALLOW_MULTIPLE_LIBTPU_LOAD", os.environ.get("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    )
    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    where = jax.sharding.SingleDeviceSharding(chip)
    shapes = [((2048, 896), jnp.bfloat16), ((151936, 896), jnp.bfloat16), ((2048,), jnp.int32)]
    given = [jax.ShapeDtypeStruct(*each, sharding=where) for each in shapes]

    def loss(hidden, head, targets):
        out = token_log_probs(hidden, head, targets, implementation="tpu")
        return jnp.sum(out.log_prob + out.entropy)

    with tpu.compiled_for(tpu.Device("TPU v5 lite")):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given).compile()
    text = compiled.as_text() or ""
    assert "token_log_probs_statistics" in text
    assert "token_log_probs_gradients" in text
    assert "[2048,151936]" not in text
