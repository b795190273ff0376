"""What saving costs a run: how long training stands still, as a share of the step time, sync and async side by side.

    python benchmarks/checkpoint_pause.py                          # 4M parameters, on a CPU
    python benchmarks/checkpoint_pause.py --size 0.5B --rows 16    # on a GPU

A step is one update of the trainer, without the rollout: the hardest case, since a rollout would only make it longer.
Every 20 steps the whole state (weights and two moments, float32) goes through `tooljax.checkpoint` to --dir. The pause
is what the loop waits: for the copy to host memory, and, if the disk is slower than 20 steps, for the save before. The
steps that follow share their cores with the writing; "steps while writing" is what they take against others. Exits 1
unless the pause in the background is below 5 % of the step time.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from tooljax.batch import PackItem, pack
from tooljax.checkpoint import Checkpointer
from tooljax.config import Config
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.policy import Policy, make_updater

GOAL = 0.05
SIZES: dict[str, dict[str, Any]] = {
    "4M": {"vocab": 2048, "embed": 256, "layers": 4, "q_heads": 4, "kv_heads": 2, "ffw": 1024},
    # Qwen2.5's
    "0.5B": {
        "vocab": 151936,
        "embed": 896,
        "layers": 24,
        "q_heads": 14,
        "kv_heads": 2,
        "ffw": 4864,
    },
}


class Measured(NamedTuple):
    """Seconds."""

    steps: list[float]
    while_writing: list[float]
    """Of the steps that began while a save was under way."""
    pauses: list[float]
    last: float
    """Until the last save was on the disk, after its pause."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="4M")
    parser.add_argument("--rows", type=int, default=2, help="of 512 tokens, in one microbatch each")
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--dir", default=None, help="where to save; default: a temporary folder")
    args = parser.parse_args()
    policy, updater = make_trainer(args.size)
    batch = make_batch(args.rows, policy.shape.vocab)
    state, _ = updater.update(updater.init(policy.params), batch)  # compiles
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(updater.saved(state)))
    print(
        f"{args.size} parameters, state of {nbytes / 1e6:,.0f} MB, {args.rows} rows of 512 tokens on "
        f"{jax.devices()[0].device_kind}; {args.saves} saves, one every {args.every} steps\n"
    )
    print(f"{'saving':<14} {'step s':>8} {'pause s (max)':>16} {'share of steps':>15}", end="")
    print(f" {'steps while writing':>20} {'last write s':>13}")
    shares = {}
    for name, block in (("waits", True), ("background", False)):
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            state, found = measure(updater, state, batch, Path(folder), args, block=block)
        step_s = statistics.median(found.steps)
        shares[name] = statistics.mean(found.pauses) / (args.every * step_s)
        slower = (
            f"{statistics.median(found.while_writing) / step_s:.2f}x ({len(found.while_writing)})"
            if found.while_writing
            else "none"
        )
        pause = f"{statistics.mean(found.pauses):.3f} ({max(found.pauses):.3f})"
        print(
            f"{name:<14} {step_s:8.3f} {pause:>16} {shares[name]:15.2%} {slower:>20} {found.last:13.3f}",
            flush=True,
        )
    reached = shares["background"] < GOAL
    print(f"\ngoal: below {GOAL:.0%} in the background: {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


def make_trainer(size: str) -> tuple[Policy, Any]:
    """A random policy and the trainer's updater of it."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    cfg = DecoderConfig(
        family="llama",
        head_dim=64,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tied_head=True,
        max_positions=512,
        dtype=dtype,
        **SIZES[size],
    )
    policy = Policy(*nnx.split(Decoder(cfg, rngs=nnx.Rngs(0))), cfg, "")
    config = Config()
    config = replace(
        config,
        model=replace(config.model, dtype=dtype, remat="none"),
        batch=replace(config.batch, rows_per_microbatch=1),
        grpo=replace(config.grpo, kl_coef=0.0),
    )
    return policy, make_updater(config, policy, total_updates=10**6, learning_rate=1e-6)


def make_batch(rows: int, vocab: int) -> Any:
    """Trajectories of random tokens that fill the rows."""
    rng = np.random.default_rng(0)
    items = []
    for i in range(4 * rows):
        tokens, mask = rng.integers(0, vocab, 128).tolist(), [False] * 32 + [True] * 96
        log_probs = [-float(np.log(vocab)) if each else 0.0 for each in mask]
        items.append(PackItem(tokens, mask, 1.0 if i % 2 else -1.0, log_probs))
    return pack(items, row_lengths=(512,), rows_multiple=1)


def measure(
    updater: Any, state: Any, batch: Any, folder: Path, args: argparse.Namespace, *, block: bool
) -> tuple[Any, Measured]:
    """The loop: updates, and a save after every so many."""
    found = Measured([], [], [], 0.0)
    with Checkpointer(folder, keep=1) as checkpointer:
        for step in range(1, args.every * args.saves + 1):
            writing = checkpointer.is_writing()
            begun = time.perf_counter()
            state, metrics = updater.update(state, batch)
            (found.while_writing if writing else found.steps).append(time.perf_counter() - begun)
            assert metrics["optim/skipped"] == 0, metrics
            if step % args.every == 0:
                begun = time.perf_counter()
                checkpointer.save(step, updater.saved(state), {}, block=block)
                found.pauses.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        checkpointer.wait()
    return state, found._replace(last=time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
