"""How far merged weights in bfloat16 are from the adapters that were trained, after so many updates.

    python benchmarks/lora_mismatch.py --model DIR --text FILE

Adapters are trained in float32 to predict the text. Other parts of it are then scored in several ways, and the mean of
w - 1 - log w over its tokens (k3, nats) says how far two of them are apart:

    moved      adapters beside the base, against the base alone, in float32: what there is to keep
    merged     merged bfloat16 weights against exact ones, both in a float32 forward pass
    nearest    the same, had each weight been rounded to its nearest neighbour
    bf16       adapters beside the base in bfloat16, as trainers do, against the same in float32
    gate       the same against merged weights in bfloat16, as engines do: what a log-prob gate sees
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.batch import PackItem, TrainBatch, pack
from tooljax.config import Config
from tooljax.config.schema import BatchConfig, LoraConfig, MeshConfig, ModelConfig, OptimizerConfig
from tooljax.grpo.mismatch import measure
from tooljax.policy import Policy, load_policy, make_updater
from tooljax.update import Updater

NAMES = ("moved", "merged", "nearest", "bf16", "gate")


def main() -> None:
    args = arguments()
    wide, exact = opened(args, "float32")
    narrow, trainer = opened(args, "bfloat16")
    wide = replace(wide, params=in_dtype(narrow.params, jnp.float32))
    batches = parts(args)
    held_out = batches.pop()
    state = exact.init(wide.trained)
    shape = wide.shape
    print(
        f"{args.model}: {shape.family}, {shape.layers} layers, embed {shape.embed}; rank {args.rank}, alpha "
        f"{args.alpha:g}, all linear layers, learning rate {args.learning_rate:g}, {args.rows} x {args.length} tokens "
        f"an update; {jax.devices()[0].device_kind}, jax {jax.__version__}\n"
    )
    print(f"{'updates':>8}{'loss':>8}" + "".join(f"{name:>10}" for name in NAMES), flush=True)
    for step in range(max(args.updates)):
        state, metrics = exact.update(state, batches[step % len(batches)], loss="sft")
        if step + 1 in args.updates:
            values = distances(wide, exact, narrow, trainer, state.params, held_out)
            cells = "".join(f"{values[name]:10.1e}" for name in NAMES)
            print(f"{step + 1:8}{metrics['policy/loss']:8.3f}{cells}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder")
    add("--text", required=True, help="file to train on")
    add("--updates", type=int, nargs="+", default=[1, 5, 15])
    add("--rank", type=int, default=16)
    add("--alpha", type=float, default=16.0)
    add("--learning_rate", type=float, default=1e-4)
    add("--rows", type=int, default=4)
    add("--length", type=int, default=128)
    return parser.parse_args()


def opened(args: argparse.Namespace, dtype: Any) -> tuple[Policy, Updater]:
    config = Config(
        model=ModelConfig(path=args.model, dtype=dtype),
        mesh=MeshConfig(fsdp=1),
        optimizer=OptimizerConfig(learning_rate=args.learning_rate, warmup_steps=0),
        batch=BatchConfig(row_lengths=(args.length,), rows_per_microbatch=args.rows),
        lora=LoraConfig(rank=args.rank, alpha=args.alpha),
    )
    policy = load_policy(config)
    return policy, make_updater(
        config, policy, total_updates=max(args.updates), learning_rate=args.learning_rate
    )


def parts(args: argparse.Namespace) -> list[TrainBatch]:
    """Batches of whole rows, as many as the text has."""
    ids = ChatTokenizer.from_folder(args.model).encode(Path(args.text).read_text())
    rows = [ids[i : i + args.length] for i in range(0, len(ids) - args.length, args.length)]
    mask = [False] + [True] * (args.length - 1)
    items = [PackItem(row, mask, advantage=1.0) for row in rows]
    return [
        pack(items[i : i + args.rows], row_lengths=(args.length,), rows_multiple=args.rows)
        for i in range(0, len(items) - args.rows + 1, args.rows)
    ]


def distances(
    wide: Policy,
    exact: Updater,
    narrow: Policy,
    trainer: Updater,
    adapters: Any,
    batch: TrainBatch,
) -> dict[str, float]:
    """By name, as above."""
    mask = np.asarray(batch.loss_mask)
    adapters = in_dtype(adapters, jnp.bfloat16)
    whole = wide.whole(in_dtype(adapters, jnp.float32))
    sent = narrow.whole(adapters)
    nearest = in_dtype(in_dtype(whole, jnp.bfloat16), jnp.float32)

    def score(updater: Updater, params: Any) -> np.ndarray:
        return updater.log_probs(params, batch)[mask]

    truth = score(exact, whole)
    beside = score(trainer, adapters)
    return {
        "moved": measure(truth, score(exact, wide.params)).mean_kl,
        "merged": measure(truth, score(exact, in_dtype(sent, jnp.float32))).mean_kl,
        "nearest": measure(truth, score(exact, nearest)).mean_kl,
        "bf16": measure(truth, beside).mean_kl,
        "gate": measure(beside, score(trainer, sent)).mean_kl,
    }


def in_dtype(params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), params)


if __name__ == "__main__":
    main()
