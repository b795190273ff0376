"""Compiles the TPU kernels of token_log_probs ahead of time, for chips that need not be there, and prints their cost.

    python benchmarks/token_log_probs_tpu.py --chips v5e,v6e --passes forward
    python benchmarks/token_log_probs_tpu.py --tokamax      (pip install tokamax: its kernel compiled the same way)

Needs libtpu (pip install "jax[tpu]"), no TPU. Nothing is run: that a line is printed proves that the compiler accepts
the kernel and that it fits VMEM. Bytes are those that the kernels' block specifications read and write, which is also
what they tell the compiler as their cost; XLA has no count of its own for a custom call. Times are a roofline: the
larger of operations / peak and bytes / bandwidth, by the vendor's figures. A measured time can only be longer.
"""

import argparse
import importlib.util
import itertools
import os
import time
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels.token_log_probs import mosaic, mosaic_gradients, tpu

VOCAB = 151936
SHAPES = [(4096, 896), (16384, 896), (16384, 2048), (8192, 3584), (4096, 5120), (16384, 5120)]
"""Tokens and embed."""


class Chip(NamedTuple):
    """By the vendor's figures, bfloat16."""

    topology: str
    kind: str
    peak: float
    """Operations a second."""
    bandwidth: float
    """Bytes a second."""


CHIPS = {
    "v5e": Chip("v5e:2x2", "TPU v5 lite", 197e12, 0.819e12),
    "v5p": Chip("v5p:2x2x1", "TPU v5p", 459e12, 2.765e12),
    "v6e": Chip("v6e:2x2", "TPU v6 lite", 918e12, 1.64e12),
}


class Cost(NamedTuple):
    tiles: mosaic.Tiles
    passes: int
    flops: float
    bytes: float
    minimum: float
    """Each input read and each output written once."""
    needed_passes: int
    needed: float
    """The same, with the head (and its gradient's sum) streamed for as many passes as are needed."""
    compile_s: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--passes", default="forward,gradients")
    parser.add_argument(
        "--tokamax", action="store_true", help="its kernels too, in a table of theirs"
    )
    args = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        raise SystemExit("this needs libtpu, the compiler for TPUs: pip install 'jax[tpu]'")
    print("| chip | pass | T | D | block, columns, resident | passes (needed) | GB | / minimum | / needed | TFLOP |"
          " roofline ms (compute, HBM) | compile s |")  # fmt: skip
    print("|" + "---|" * 12)
    for name in args.chips.split(","):
        for which in args.passes.split(","):
            for tokens, embed in SHAPES:
                print(_line(name, which, tokens, embed), flush=True)
    if args.tokamax:
        from support import log_prob_tokamax

        print(log_prob_tokamax.HEADINGS)
        for name, (tokens, embed) in itertools.product(args.chips.split(","), SHAPES):
            of = _specs(CHIPS[name])
            arrays = of((tokens, embed), jnp.bfloat16), of((embed, VOCAB), jnp.bfloat16)
            for line in log_prob_tokamax.lines(*arrays, CHIPS[name].peak, CHIPS[name].bandwidth):
                print(f"| {name} | {tokens} | {embed} | {line}", flush=True)


def _line(name: str, which: str, tokens: int, embed: int) -> str:
    chip = CHIPS[name]
    start = f"| {name} | {which} | {tokens} | {embed} |"
    try:
        cost = {"forward": forward, "gradients": gradients}[which](chip, tokens, embed)
    except Exception as error:
        return f"{start} FAILS: {str(error).splitlines()[0][:120]} |"
    compute, memory = cost.flops / chip.peak * 1e3, cost.bytes / chip.bandwidth * 1e3
    tiles = f"{cost.tiles.block}, {cost.tiles.columns}, {cost.tiles.resident}"
    return (
        f"{start} {tiles} | {cost.passes} ({cost.needed_passes}) | {cost.bytes / 1e9:.2f} |"
        f" {cost.bytes / cost.minimum:.2f} | {cost.bytes / cost.needed:.2f} | {cost.flops / 1e12:.1f} |"
        f" {max(compute, memory):.2f} ({compute:.2f}, {memory:.2f}) | {cost.compile_s:.0f} |"
    )


def forward(chip: Chip, tokens: int, embed: int) -> Cost:
    """The kernel for values per token."""
    device, dtype = tpu.Device(chip.kind), jnp.dtype(jnp.bfloat16)
    tiles = tpu.forward_tiles(tokens, embed, dtype, True, device)

    def run(x, head, scale, targets, count):
        return mosaic.statistics(
            x, head, scale, targets, count, vocab_major=True, entropy=True, tiles=tiles,
            run=mosaic.Run(tpu.VMEM_BYTES[chip.kind]),
        )  # fmt: skip

    of = _specs(chip)
    arrays = [of((tokens, embed), dtype), of((VOCAB, embed), dtype), of((tokens,), jnp.float32)]
    compile_s = _compile_s(run, *arrays, of((tokens,), jnp.int32), of((), jnp.int32))
    passes = -(-tokens // tiles.resident)
    x, head, values = 2 * tokens * embed, 2 * VOCAB * embed, 6 * 4 * tokens
    needed = needed_passes(chip, tokens, held=2 * embed, streamed=2 * 2 * embed, width=256)
    return Cost(
        tiles, passes, 2.0 * tokens * embed * VOCAB, x + values + passes * head, x + values + head,
        needed, x + values + needed * head, compile_s,
    )  # fmt: skip


def gradients(chip: Chip, tokens: int, embed: int) -> Cost:
    """The kernel for both gradients; the bytes and operations of all its calls."""
    device, dtype = tpu.Device(chip.kind), jnp.dtype(jnp.bfloat16)
    tiles = tpu.gradient_tiles(tokens, embed, dtype, True, device)

    def run(x, head, factors, targets, count, d_head):
        return mosaic_gradients.gradients(
            x, head, factors, targets, count, d_head, vocab_major=True, tiles=tiles,
            run=mosaic.Run(tpu.VMEM_BYTES[chip.kind]),
        )  # fmt: skip

    of, blocks = _specs(chip), tiles.resident // tiles.block
    compile_s = _compile_s(
        run,
        of((tiles.resident, embed), dtype),
        of((VOCAB, embed), dtype),
        of((blocks, mosaic.SUBLANES, tiles.block), jnp.float32),
        of((blocks, 1, tiles.block), jnp.int32),
        of((), jnp.int32),
        of((VOCAB, embed), jnp.float32),
        donate=5,
    )
    passes = -(-tokens // tiles.resident)
    x, head, total, values = (
        2 * tokens * embed, 2 * VOCAB * embed, 4 * VOCAB * embed, 9 * 4 * tokens,
    )  # fmt: skip
    # The first pass does not read the sum.
    moved = 3 * x + values + passes * (head + 2 * total) - total
    width = tpu.PRODUCT_WIDTH.get(chip.kind, 256)
    needed = needed_passes(chip, tokens, 6 * embed, 2 * (2 + 4 + 4) * embed, width)
    return Cost(
        tiles, passes, 6.0 * tokens * embed * VOCAB, moved, 3 * x + values + head + total,
        needed, 3 * x + values + needed * (head + 2 * total) - total, compile_s,
    )  # fmt: skip


def needed_passes(chip: Chip, tokens: int, held: int, streamed: int, width: int) -> int:
    """Over the head, when VMEM is full of tokens that each hold `held` bytes, beside the narrowest tile that fills the
    matrix unit: `width` columns that take `streamed` bytes each, twice so that copies overlap with products."""
    return -(-tokens * held // (tpu.VMEM_BYTES[chip.kind] - width * streamed))


def _specs(chip: Chip):
    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
    where = jax.sharding.SingleDeviceSharding(device)
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def _compile_s(run, *arrays, donate: int | None = None) -> float:
    start = time.perf_counter()
    jax.jit(run, donate_argnums=() if donate is None else donate).lower(*arrays).compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
