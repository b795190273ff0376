"""What sharing prompts saves, beside the plain layout in the same run: `python -m benchmarks.shared_prompts`.

Claim: with prompts of 1k to 4k tokens and 8 or 16 samples a group, an update trains fewer tokens and takes less time,
with the same loss. For each length of prompts and each number of samples, one batch (seeded: completions of log-normal
lengths) is packed both ways into rows of the same ladder, and old log-probs and an update are computed of it, in turns.
Exits 1 if loss or gradient norm differ by more than the dtype explains.

By default a small decoder on the CPU, in whose time attention weighs more than in that of a real one, so the operations
of a real one are counted beside it. On a GPU:
    python -m benchmarks.shared_prompts --model Qwen2.5-0.5B --dtype bfloat16 --groups 4
"""

import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from tooljax.batch import Batch, PackItem, packed
from tooljax.compile.shapes import SHAPES, shape_of
from tooljax.config import Config
from tooljax.config.schema import BatchConfig, GrpoConfig, ModelConfig
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.model.flops import update_flops, visible_pairs
from tooljax.policy import Policy, make_updater

SMALL = DecoderConfig(
    family="qwen2",
    vocab=512,
    embed=128,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    ffw=384,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_head=True,
    max_positions=32768,
    dtype="float32",
)

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative, of loss and gradient norm. bfloat16 rounds activations in another order."""


class Measured(NamedTuple):
    """One layout of a batch."""

    tokens: int
    """Laid out, without padding."""
    padding: float
    flops: float
    """Of the gradients' pass of the model that is run."""
    real_flops: float
    """And of the one that is only counted."""
    seconds: float
    metrics: dict[str, float]


def group(rng: np.random.Generator, prompt: int, samples: int, completion: int, vocab: int):
    """Items of one group; lengths vary by a fifth for prompts, and by a half for completions."""
    length = max(2, int(prompt * rng.uniform(0.8, 1.2)))
    first = rng.integers(0, vocab, length).tolist()
    for _ in range(samples):
        own = int(np.clip(completion * rng.lognormal(-0.125, 0.5), 1, 4 * completion))
        mask = [False] * length + [True] * own
        yield PackItem(
            [*first, *rng.integers(0, vocab, own).tolist()],
            mask,
            float(rng.normal()),
            np.where(mask, -6.0, 0.0).tolist(),
            prompt_tokens=length,
        )


def counted(batch: Batch, cfg: DecoderConfig) -> float:
    """Operations of an update: of tokens and pairs that are there."""
    parts = batch.groups
    tokens = sum(int(np.count_nonzero(part.segment_ids)) for part in parts)
    pairs = sum(visible_pairs(part.segment_ids, part.trunk_ids) for part in parts)
    return update_flops(cfg, tokens, pairs, batch.loss_tokens)


def compared(args: argparse.Namespace, policy: Policy, prompt: int, samples: int) -> list[Measured]:
    """The plain layout and the shared one."""
    rng = np.random.default_rng(prompt + samples)
    items = [
        item
        for _ in range(args.groups)
        for item in group(rng, prompt, samples, args.completion, policy.shape.vocab)
    ]
    config = Config(
        model=ModelConfig(dtype=args.dtype, remat=args.remat, attention=args.attention),
        grpo=GrpoConfig(kl_coef=0.0),
        batch=BatchConfig(row_lengths=tuple(args.row_lengths), rows_per_microbatch=args.rows),
    )
    updater = make_updater(config, policy, total_updates=100, learning_rate=0.0)
    batches = [
        packed(
            items,
            row_lengths=args.row_lengths,
            rows_per_microbatch=args.rows,
            mixed_lengths=True,
            shared_prompts=shared,
        )
        for shared in (False, True)
    ]
    state = updater.init(policy.params)
    seconds: list[list[float]] = [[], []]
    told: list[dict[str, float]] = [{}, {}]
    for step in range(args.steps + 1):
        for way, batch in enumerate(batches):
            start = time.perf_counter()
            ready: Any = batch.with_log_probs(old=updater.log_probs(state.params, batch))
            state, told[way] = updater.update(state, ready)
            jax.block_until_ready(state)
            if step:  # the first compiles
                seconds[way].append(time.perf_counter() - start)
    return [
        Measured(
            batch.tokens_of_items - batch.saved_tokens,
            batch.padding_fraction,
            counted(batch, policy.shape),
            counted(batch, SHAPES[args.counted]),
            statistics.median(seconds[way]),
            told[way],
        )
        for way, batch in enumerate(batches)
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help=f"of {[*SHAPES]}; random weights")
    parser.add_argument("--counted", default="Qwen2.5-1.5B", help="whose operations are counted")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--remat", default="full")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--completion", type=int, default=512, help="mean tokens of a completion")
    parser.add_argument("--groups", type=int, default=1, help="of a batch")
    parser.add_argument("--row_lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch")
    parser.add_argument("--steps", type=int, default=3, help="timed, of each layout")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    shape = shape_of(args.model, args.dtype) if args.model else SMALL
    decoder = nnx.jit(lambda: Decoder(shape, rngs=nnx.Rngs(0)))()
    policy = Policy(*nnx.split(decoder), shape, "")
    device = jax.devices()[0].device_kind
    print(
        f"{args.model or 'a small decoder'}, {args.dtype}, on {device}; {args.groups} group(s), completions of "
        f"{args.completion} tokens on average; rows of {args.row_lengths}, {args.rows} in a microbatch; FLOPs of "
        f"{args.counted} counted\n"
    )
    print(
        "| prompt | samples | tokens plain | shared | ratio | padding plain, shared | FLOPs ratio, counted model "
        "| of the one that runs | s plain | shared | ratio | loss and gradient norm differ by |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for prompt in args.prompts:
        for samples in args.samples:
            plain, shared = compared(args, policy, prompt, samples)
            names = ("policy/loss", "optim/grad_norm")
            differ = max(
                abs(shared.metrics[n] - plain.metrics[n]) / abs(plain.metrics[n]) for n in names
            )
            worst = max(worst, differ)
            print(
                f"| {prompt} | {samples} | {plain.tokens} | {shared.tokens} | {plain.tokens / shared.tokens:.2f} "
                f"| {plain.padding:.1%}, {shared.padding:.1%} | {plain.real_flops / shared.real_flops:.2f} "
                f"| {plain.flops / shared.flops:.2f} | {plain.seconds:.3g} | {shared.seconds:.3g} "
                f"| {plain.seconds / shared.seconds:.2f} | {differ:.1e} |",
                flush=True,
            )
    return 1 if worst > TOLERANCE[args.dtype] else 0


if __name__ == "__main__":
    sys.exit(main())
