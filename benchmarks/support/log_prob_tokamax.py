"""Tokamax's TPU kernels of linear_softmax_cross_entropy_loss, compiled ahead of time, and the bytes that they move.

The public function asks whether JAX runs on a TPU, so the kernels are called themselves, with the tiles that Tokamax
would choose. It tells the compiler each input and output once. What its pipelines move follows from their block
specifications: a block is copied whenever its index changes from one step of the grid to the next.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

HEADINGS = """
| chip | T | D | Tokamax's pass | block of T, D, V | GB | roofline ms (compute, HBM) | compile s |
|---|---|---|---|---|---|---|---|"""


def lines(x: Any, head: Any, peak: float, bandwidth: float) -> Iterator[str]:
    """Ends of table lines: forward, then gradients. `x` [T, D] and `head` [D, V] are shapes with a sharding."""
    kernels: Any = import_module(
        "tokamax._src.ops.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
    )
    per_token = partial(jax.ShapeDtypeStruct, x.shape[:1], sharding=x.sharding)
    targets, values = per_token(jnp.int32), per_token(jnp.float32)
    (device,) = x.sharding.device_set
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    tokens, embed, vocab = *x.shape, head.shape[1]
    passes = {
        "forward": (
            kernels.get_heuristic_fwd_config,
            _forward_bytes,
            kernels.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu,
            (x, targets, head),
        ),
        "gradients": (
            kernels.get_heuristic_bwd_config,
            _gradient_bytes,
            kernels.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu,
            (values, values, x, targets, head),
        ),
    }
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=kind)):
        for name, (configured, bytes_of, run, given) in passes.items():
            config = configured(tokens, embed, vocab, dtype=x.dtype)
            moved = bytes_of(tokens, embed, vocab, config)
            flops = (6.0 if name == "gradients" else 2.0) * tokens * embed * vocab
            compute, memory = flops / peak * 1e3, moved / bandwidth * 1e3
            blocks = {f"{axis}_block_size": getattr(config, f"{axis}_block_size") for axis in "bhv"}
            yield (
                f"{name} | {', '.join(str(n) for n in blocks.values())} | {moved / 1e9:.1f} |"
                f" {max(compute, memory):.0f} ({compute:.1f}, {memory:.0f}) |"
                f" {_compile_s(partial(run, reduction='none', **blocks), given)} |"
            )


def _compile_s(run: Callable, given: tuple) -> str:
    start = time.perf_counter()
    try:
        jax.jit(run).lower(*given).compile()
    except Exception as error:  # whatever the compiler raises
        return "FAILS: " + str(error).splitlines()[0][:120]
    return f"{time.perf_counter() - start:.0f}"


def _forward_bytes(tokens: int, embed: int, vocab: int, config: Any) -> float:
    """Grid: token blocks, vocabulary blocks, embed blocks. The head once per token block."""
    again = _vocab_steps(vocab, config) if embed > config.h_block_size else 1
    return 2.0 * tokens * embed * again + 2.0 * embed * vocab * -(-tokens // config.b_block_size)


def _gradient_bytes(tokens: int, embed: int, vocab: int, config: Any) -> float:
    """The same grid with one step more: two copies of the head, and both sums in HBM, read and written in float32."""
    again = _vocab_steps(vocab, config) + 1 if embed > config.h_block_size else 1
    blocks = -(-tokens // config.b_block_size)
    return tokens * embed * again * (2.0 + 4 + 4) + embed * vocab * blocks * (2.0 + 2 + 4 + 4)


def _vocab_steps(vocab: int, config: Any) -> int:
    return -(-vocab // config.v_block_size)
