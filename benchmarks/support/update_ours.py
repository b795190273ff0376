"""The trainer's own update, timed: one process of benchmarks/update_mfu.py, which starts it and reads its last line."""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import update_profile
from support.update_case import SIZES, Case, make_case, timed

from tooljax.batch import PackItem, TrainBatch, pack
from tooljax.compile.chips import GIB, topology
from tooljax.compile.program import Compiled, DoesNotFit, compile_update
from tooljax.config import Config, load_config
from tooljax.model import attention_cudnn
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.model.hf_config import config_fields
from tooljax.policy import Policy, layout_of, make_updater
from tooljax.sharding import shardings

REMAT = {
    "tiny": ("none",),
    "0.5B": ("dots_attention", "attention", "full"),
    "1.5B": ("dots_attention", "attention", "full"),
    "3B": ("dots_attention", "attention", "full"),
}
"""model.remat that is tried, the fastest first; the next where one does not fit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rows_per_microbatch", type=int, default=1, help="of each device")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm_up", type=int, default=2)
    parser.add_argument("--mesh", default="one", help="such as fsdp=2 or fsdp=2,tensor=2")
    parser.add_argument("--segments", type=int, default=0, help="that cuDNN is given room for")
    parser.add_argument("--set", action="append", default=[], help="a setting of the trainer's")
    parser.add_argument("--profile", default="", help="folder for a trace of one more update")
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_default_prng_impl", "rbg")  # compiles in no time
    if args.segments:
        attention_cudnn.MOST_SEGMENTS = args.segments
    told: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": f"jax {jax.__version__}",
        "product_tflops": product_tflops(),
    }
    for remat in REMAT[args.size]:
        try:
            told |= measure(args, remat)
            break
        except (jax.errors.JaxRuntimeError, DoesNotFit) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE" not in str(error):
                raise
            print(f"model.remat={remat}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
        gc.collect()
    print(json.dumps(told))


def measure(args: argparse.Namespace, remat: str) -> dict[str, Any]:
    """Compiles as compile_check does, for what it predicts, then runs the same programs."""
    settings = [f"model.remat={remat}", *args.set]
    with tempfile.TemporaryDirectory() as folder:
        config, shape = make_config(args, settings, folder)
        predicted = predict(config)
    needed = predicted.pop("needed", 0.0)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    if needed > limit:
        raise DoesNotFit(f"compile_check predicts {needed / GIB:.1f} of {limit / GIB:.1f} GiB")
    policy = make_policy(config, shape)
    case = make_case(args.size, args.rows)
    batch = make_batch(case)
    updater = make_updater(config, policy, total_updates=10**6, learning_rate=1e-6)
    state = updater.init(policy.params)
    metrics: dict[str, float] = {}

    def update() -> None:
        nonlocal state, metrics
        old = updater.log_probs(state.params, batch)
        state, metrics = updater.update(state, batch.with_log_probs(old=old))

    told = timed(update, warm_up=args.warm_up, steps=args.steps)
    updater.work.flops = 0.0
    parts = timed_parts(updater, state, batch)
    tflops = updater.work.flops / 1e12
    state = parts.pop("state")
    if args.profile:
        update_profile.attempt(lambda: _profile(update, Path(args.profile)))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        **told,
        **parts,
        "what": f"remat {config.model.remat}, {config.batch.rows_per_microbatch} rows a microbatch",
        "tflop": tflops,
        "tokens": int((batch.segment_ids != 0).sum()),
        "peak_gib": peak / GIB,
        **predicted,
        "loss": metrics["policy/loss"],
        "skipped": metrics["optim/skipped"],
    }


def make_config(
    args: argparse.Namespace, settings: list[str], folder: str
) -> tuple[Config, DecoderConfig]:
    """The trainer's config, with a model folder that holds nothing but the shape."""
    size = SIZES[args.size]
    shape = DecoderConfig(
        family="qwen2",
        vocab=size["vocab"],
        embed=size["embed"],
        layers=size["layers"],
        q_heads=size["heads"],
        kv_heads=size["kv_heads"],
        head_dim=size["embed"] // size["heads"],
        ffw=size["ffw"],
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_head=True,
        max_positions=32768,
        qkv_bias=True,
        dtype="bfloat16",
    )
    (Path(folder) / "config.json").write_text(json.dumps(config_fields(shape)))
    mesh = dict(part.split("=") for part in args.mesh.split(",") if "=" in part)
    axes = {"data": "1", "fsdp": "1", "tensor": "1", "context": "1"} | mesh
    ways = int(axes["data"]) * int(axes["fsdp"])
    length = make_case(args.size, 1).tokens.shape[1]
    # With two updates a batch the trainer asks for the old log-probs first; here one update is timed with them.
    given = [
        f"model.path={folder}",
        "model.dtype=bfloat16",
        f"batch.row_lengths=({length},)",
        f"batch.rows_per_microbatch={args.rows_per_microbatch * ways}",
        f"limits.max_trajectory_tokens={length}",
        f"sidecar.max_model_tokens={length}",
        f"limits.max_prompt_tokens={length // 2}",
        "grpo.updates_per_batch=2",
        "grpo.kl_coef=0",
        *(f"mesh.{axis}={count}" for axis, count in axes.items()),
    ]
    return load_config([], given + settings), shape


def make_policy(config: Config, shape: DecoderConfig) -> Policy:
    """Random weights, made where they are to be."""
    layout = layout_of(config)

    def weights() -> Any:
        return nnx.split(Decoder(shape, rngs=nnx.Rngs(0)))[1]

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(shape, rngs=nnx.Rngs(0))))
    places = shardings(abstract, layout.mesh) if layout.mesh else None
    params = jax.jit(weights, out_shardings=places)()
    return Policy(graphdef, params, shape, config.model.path, layout)


def make_batch(case: Case) -> TrainBatch:
    """The case as the trainer packs it, each row by itself: the peer has the very same rows."""
    rows = []
    for tokens, mask, advantages in zip(case.tokens, case.mask, case.advantages, strict=True):
        items, start = [], 0
        for length, advantage in zip(case.lengths, advantages, strict=True):
            span = slice(start, start + length)
            start += length
            wanted = mask[span].tolist()
            log_probs = [-10.0 if each else 0.0 for each in wanted]
            number = len(rows) * len(case.lengths) + len(items)
            items.append(
                PackItem(
                    tokens[span].tolist(), wanted, float(advantage), log_probs, sequence=number
                )
            )
        row = pack(items, row_lengths=(case.tokens.shape[1],), rows_multiple=1)
        rows.append(replace(row, placements=()))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *rows)


def predict(config: Config) -> dict[str, Any]:
    """GiB of a device by compile_check's count, for each program and the largest."""
    device, begun = jax.devices()[0], time.perf_counter()
    name = "cpu" if device.platform == "cpu" else "gpu"
    count = 1
    for size in config.mesh.sizes.values():
        count *= size
    try:
        compiled: Compiled = compile_update(config, topology(f"{name}:{count}"))
    except (jax.errors.JaxRuntimeError, DoesNotFit):
        raise
    except Exception as error:  # a measurement without a prediction is better than none
        return {"predicted": f"{type(error).__name__}: {error}"[:300]}
    needed = max(each.needed_bytes for each in compiled.programs)
    return {
        "needed": needed,
        "predicted_gib": needed / GIB,
        "predicted": {
            each.name: {
                "needed": round(each.needed_bytes / GIB, 3),
                "temporaries": round(each.temporary_bytes / GIB, 3),
                "held": round(each.held_bytes / GIB, 3),
            }
            for each in compiled.programs
        },
        "compile_s": time.perf_counter() - begun,
    }


def timed_parts(updater: Any, state: Any, batch: TrainBatch) -> dict[str, Any]:
    """Seconds of the two parts of an update, waited for apart, and the state after it."""
    begun = time.perf_counter()
    old = updater.log_probs(state.params, batch)
    middle = time.perf_counter()
    state, _ = updater.update(state, batch.with_log_probs(old=old))
    jax.block_until_ready(state.params)
    end = time.perf_counter()
    return {"state": state, "old_log_probs_s": middle - begun, "update_s": end - middle}


def _profile(update: Callable[[], None], folder: Path) -> None:
    with jax.profiler.trace(folder):
        update()
    update_profile.print_jax_trace(folder)


def product_tflops(size: int = 8192, repeats: int = 20) -> float:
    """Of bfloat16 products of square matrices, a second; on a CPU of small ones."""
    if jax.default_backend() == "cpu":
        size, repeats = 512, 2
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(product(a, a))
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        jax.block_until_ready([product(a, a) for _ in range(repeats)])
        best = min(best, (time.perf_counter() - begun) / repeats)
    return 2 * size**3 / best / 1e12


if __name__ == "__main__":
    main()
