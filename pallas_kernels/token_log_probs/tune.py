"""Times tiles on the GPU at hand and prints entries for tuned.py.

    python -m pallas_kernels.token_log_probs.tune --embed 4096 --vocab 128256

Candidates take turns, several rounds, because a GPU's clock falls while it is busy: a tile is only compared with what
ran beside it. What does not fit the card's shared memory or registers is told and left out.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.token_log_probs import gpu
from pallas_kernels.token_log_probs.hopper import Tiles
from pallas_kernels.token_log_probs.problem import Problem
from pallas_kernels.token_log_probs.tuned import Entry

FORWARD = {
    "128x128 s4 c2": Tiles(),
    "128x128 s4 c1": Tiles(cluster=1),
    "128x128 s4 c2 g16": Tiles(rows_in_step=16),
    "64x256 s4 c2": Tiles(tile_m=64, tile_n=256),
    "64x256 s4 c1": Tiles(tile_m=64, tile_n=256, cluster=1),
    "128x192 s3 c2": Tiles(tile_n=192, slots=3),
    "128x128 k128 s2 c2": Tiles(tile_k=128, slots=2),
    "64x256 k128 s2 c2": Tiles(tile_m=64, tile_n=256, tile_k=128, slots=2),
}
POWERS = {
    "128x128 s4 c2": Tiles(),
    "128x128 s4 c1": Tiles(cluster=1),
    "128x128 s4 c1 d0": Tiles(cluster=1, delay=0),
    "128x128 s4 c1 g16": Tiles(cluster=1, rows_in_step=16),
    "128x128 s3 c1 o64": Tiles(cluster=1, slots=3, out_n=64),
    "64x256 s4 c1 o64": Tiles(tile_m=64, tile_n=256, cluster=1, out_n=64),
}


class Timed(NamedTuple):
    """Milliseconds of single calls."""

    median: float
    lowest: float
    highest: float


def inputs(tokens: int, embed: int, vocab: int, seed: int, spread: float = 2.0) -> dict:
    """Random rows and a head, in bfloat16; logits of order `spread`."""
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(keys[0], (tokens, embed), jnp.bfloat16)
    head = jax.random.normal(keys[1], (vocab, embed), jnp.bfloat16)
    return {
        "hidden": hidden,
        "head": (head.astype(jnp.float32) * (spread * embed**-0.5)).astype(jnp.bfloat16),
        "targets": jax.random.randint(keys[2], (tokens,), 0, vocab),
        "scale": jax.random.uniform(keys[3], (tokens,), jnp.float32, 0.7, 1.3),
    }


def forward(tiles: Tiles | None, hidden, head, targets, scale, entropy: bool = True) -> dict:
    """The statistics of every row."""
    rows = {"hidden": hidden, "targets": targets, "scale": scale}
    return gpu.kernel_statistics(Problem(entropy=entropy), rows, head=(head, None), tiles=tiles)


def powers(tiles: Tiles | None, hidden, head, targets, scale) -> dict:
    """A chunk of the pass for gradients."""
    shift = jnp.zeros_like(scale)
    rows = {"hidden": hidden, "targets": targets, "scale": scale, "shift": shift}
    return gpu.kernel_powers(Problem(), rows, (head, None), tiles=tiles)


def in_turns(calls: dict[str, Callable], rounds: int = 7, each: int = 2) -> dict[str, Timed]:
    """Times the calls in turns. The first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            for _ in range(each):
                begun = time.perf_counter()
                jax.block_until_ready(call())
                if i:
                    times[name].append((time.perf_counter() - begun) * 1e3)
    return {name: Timed(float(np.median(ms)), min(ms), max(ms)) for name, ms in times.items() if ms}


def compiled(
    candidates: dict[str, Tiles], kernel: Callable, args: Sequence
) -> tuple[dict[str, Callable], dict[str, str]]:
    """A call for each candidate that compiles, and why the others do not."""
    calls, reasons = {}, {}
    for name, tiles in candidates.items():
        try:
            made = jax.jit(functools.partial(kernel, tiles)).lower(*args).compile()
        except Exception as error:  # whatever the compiler raises
            reasons[name] = " ".join(str(error).split())[:200]
        else:
            calls[name] = functools.partial(made, *args)
    return calls, reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--embed", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(
            f"this times NVIDIA GPUs, and JAX has {device.device_kind}; TPUs need no table: tpu.py fills their VMEM"
        )
    chunk = gpu.default_chunk_tokens(args.vocab, Tiles())
    kinds = {
        "gpu forward": (FORWARD, forward, args.tokens),
        "gpu powers": (POWERS, powers, min(chunk, args.tokens)),
    }
    for kind, (candidates, kernel, tokens) in kinds.items():
        arrays = inputs(tokens, args.embed, args.vocab, 0).values()
        calls, reasons = compiled(candidates, kernel, list(arrays))
        for name, reason in reasons.items():
            print(f"{kind} {name}: left out: {reason}")
        if not calls:
            continue
        timed = in_turns(calls)
        for name, ms in timed.items():
            print(f"{kind} {name}: {ms.median:.2f} ms ({ms.lowest:.2f} to {ms.highest:.2f})")
        best = min(timed, key=lambda name: timed[name].median)
        measured = f"{tokens} tokens: {timed[best].median:.2f} ms"
        print(Entry(kind, args.embed, args.vocab, candidates[best], measured))


if __name__ == "__main__":
    main()
