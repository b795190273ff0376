"""Compiles token_log_probs for TPUs and prints, as JSON, what the programs hold. Needs jax[tpu], no TPU, no pytest."""

import json
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels.token_log_probs import token_log_probs, token_loss, tpu

TOKENS, EMBED, VOCAB = 2048, 896, 151936


def loss_of(log_probs, given):
    return -log_probs * given


def two_passes(hidden, head, targets, weights):
    out = token_log_probs(hidden, head, targets, implementation="tpu")
    return jnp.sum(out.log_prob * weights + out.entropy)


def one_pass(hidden, head, targets, weights):
    options = {"implementation": "tpu", "chunk_tokens": TOKENS // 2}
    return token_loss(loss_of, weights, hidden, head, targets, **options)[0]


def compiled(loss, topology: str, kind: str, embed: int) -> dict:
    chip = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    where = jax.sharding.SingleDeviceSharding(chip)

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    given = [
        of(jnp.bfloat16, TOKENS, embed),
        of(jnp.bfloat16, VOCAB, embed),
        of(jnp.int32, TOKENS),
        of(jnp.float32, TOKENS),
    ]
    with tpu.compiled_for(tpu.Device(kind)):
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given).compile()
    text, memory = program.as_text() or "", program.memory_analysis()
    assert memory is not None, "the compiler says nothing of memory"
    known = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "kernels": sorted(set(re.findall(r"token_log_probs_[a-z]+", text))),
        "whole_logits": f"[{TOKENS},{VOCAB}]" in text,
        "workspace_mib": (memory.peak_memory_in_bytes - known) / 2**20,
    }


if __name__ == "__main__":
    v5e = ("v5e:2x2", "TPU v5 lite", EMBED)
    found = {"two passes": compiled(two_passes, *v5e), "one pass": compiled(one_pass, *v5e)}
    # Tiles of the table, which no estimate vouches for.
    for embed in (2048, 5120):
        found[f"v5p {embed}"] = compiled(two_passes, "v5p:2x2x1", "TPU v5p", embed)
    print(json.dumps(found))
