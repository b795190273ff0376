"""What a push of weights costs: bytes against the entropy floor, seconds by stage, the pause of generation, memory.

    python benchmarks/weight_sync.py                                    # the three tables, on this machine's CPU
    python benchmarks/weight_sync.py --engine sglang --size 0.5B        # on a GPU with SGLang, beside its own way
    python benchmarks/weight_sync.py --only density --model DIR         # how much one GRPO step changes a real model
    python benchmarks/weight_sync.py --only slope --size tiny --pushes 1000

1. codec: bytes and speed of coded deltas by the share of elements that change. Floor: elements x (H(p) + 16 p) bits,
   that is, positions and new values coded without knowing anything of them.
2. density: what a GRPO step at a learning rate of 1e-6 changes in bfloat16 weights, by the trainer's own update.
3. push: trainer and sidecar in processes of their own, over HTTP on loopback, and where the time of a push goes; then a
   check that the sidecar, host copy and engine, holds what the trainer has, and which goals are reached.
4. slope (only if asked for): many pushes, and after every one the hashes of what is served against a cold load; growth
   of memory.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from support.sidecar_process import generating, served, swap_seconds, until_ready
from support.weight_report import Push, print_goals, print_stages
from support.weight_slope import Memory, memory_of, print_slopes, push_many

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.weight_codec import Delta, decode, encode, entropy_floor_bits

ROOT = Path(__file__).parents[1]
SIZES: dict[str, dict[str, Any]] = {
    # Of a Llama shape; the largest is Qwen2.5-0.5B's, the middle one SmolLM2-135M's.
    "tiny": {"vocab": 512, "embed": 128, "layers": 4, "q_heads": 4, "kv_heads": 2, "ffw": 512},
    "135M": {"vocab": 49152, "embed": 576, "layers": 30, "q_heads": 9, "kv_heads": 3, "ffw": 1536},
    "0.5B": {
        "vocab": 151936,
        "embed": 896,
        "layers": 24,
        "q_heads": 14,
        "kv_heads": 2,
        "ffw": 4864,
    },
}
HEAD_DIM = {"tiny": 32, "135M": 64, "0.5B": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", choices=["codec", "density", "push", "slope"])
    parser.add_argument("--engine", choices=["jax", "sglang"], default="jax")
    parser.add_argument("--size", choices=list(SIZES), default="135M", help="random weights")
    parser.add_argument("--model", default="", help="density: a real model's folder")
    parser.add_argument("--updates", type=int, default=4, help="density: GRPO steps in a row")
    parser.add_argument("--pushes", type=int, default=8, help="push, slope: deltas")
    parser.add_argument(
        "--density", type=float, default=0.0, help="push, slope: 0 takes the measured one, or 0.005"
    )
    parser.add_argument(
        "--running", type=int, default=-1, help="trajectories under way; push, sglang: 16, else 0"
    )
    parser.add_argument("--sglang_args", default="{}", help="JSON of more arguments for SGLang")
    args = parser.parse_args()
    if args.running < 0:
        args.running = 16 if args.engine == "sglang" and args.only != "slope" else 0
    # A trainer and an engine on one GPU: neither takes it all.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    density = args.density
    if args.only in (None, "codec"):
        codec_table()
    if args.only in (None, "density"):
        density = density or density_table(args)
    if args.only in (None, "push", "slope"):
        push_tables(args, density or 0.005)


# --- codec ----------------------------------------------------------------------------------------------------------


def codec_table(elements: int = 2**23) -> None:
    """Bytes and speed by density, for moves of one unit in the last place and for random ones."""
    print(
        f"codec: one tensor of {elements:,} elements, one thread; speeds in bytes of the tensor\n"
    )
    print(
        f"{'density':>8} {'moves':>8} {'bytes':>10} {'of floor':>9} {'full is':>9}  encode, decode"
    )
    rng = np.random.default_rng(0)
    for density in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.4):
        positions = np.flatnonzero(rng.random(elements) < density)
        step = rng.choice(np.array([1, 65535], np.uint16), positions.size)
        small = step * rng.geometric(0.9, positions.size).astype(np.uint16)
        anything = rng.integers(1, 65536, positions.size).astype(np.uint16)
        floor = entropy_floor_bits(elements, positions.size) / 8
        for name, moves in (("small", small), ("random", anything)):
            delta = Delta(positions, moves)
            data = encode(delta)
            encode_s = best(lambda delta=delta: encode(delta))
            decode_s = best(lambda data=data: decode(data, elements))
            speeds = [2 * elements / seconds / 1e9 for seconds in (encode_s, decode_s)]
            print(
                f"{density:8g} {name:>8} {len(data):10,} {len(data) / floor:9.3f}"
                f" {2 * elements / len(data):8.1f}x  {speeds[0]:.1f}, {speeds[1]:.1f} GB/s"
            )
    print()


def best(call: Callable[[], object], runs: int = 3) -> float:
    """Seconds of the fastest call."""
    seconds = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


# --- density --------------------------------------------------------------------------------------------------------


def density_table(args: argparse.Namespace) -> float:
    """What GRPO steps change; returns the median share."""
    from tooljax.model import hf
    from tooljax.weights.payload import delta_payload, full_payload
    from tooljax.weights.stopwatch import Stopwatch

    policy, updater = make_policy(args)
    state = updater.init(policy.params)
    rng = np.random.default_rng(0)

    def tensors() -> dict[str, Any]:
        return dict(policy.tensors(updater.compute_params(state)))

    base = full_payload(tensors().items(), keep_arrays=True, watch=Stopwatch()).acknowledged(0)
    shown = args.model or f"random weights of the {args.size} shape"
    print(f"density: GRPO steps at a learning rate of 1e-6, AdamW, bfloat16; {shown}\n")
    print(
        f"{'step':>4} {'changed':>9} {'of elements':>12} {'bytes':>11} {'of floor':>9} {'full is':>8}"
    )
    shares = []
    for step in range(1, args.updates + 1):
        batch = grpo_batch(policy, args.model, rng)
        batch = batch.with_log_probs(ref=updater.log_probs(policy.params, batch))
        state, metrics = updater.update(state, batch)
        assert metrics["optim/skipped"] == 0, metrics
        payload = delta_payload(base, tensors(), watch=Stopwatch())
        floor = entropy_floor_bits(payload.elements, payload.changed_elements) / 8
        shares.append(payload.changed_elements / payload.elements)
        print(
            f"{step:4} {payload.changed_elements:9,} {shares[-1]:12.5f} {payload.nbytes:11,}"
            f" {payload.nbytes / floor:9.3f} {payload.full_bytes / payload.nbytes:7.1f}x"
        )
        base = payload.acknowledged(step)
    print(f"{len(hf.tensor_names(policy.shape))} tensors, {payload.full_bytes:,} bytes in full\n")
    return statistics.median(shares)


def make_policy(args: argparse.Namespace) -> tuple[Any, Any]:
    """A policy and the trainer's updater of it."""
    from dataclasses import replace

    from flax import nnx

    from tooljax.config import Config
    from tooljax.policy import Policy, make_updater

    if args.model:
        policy = Policy.load(args.model, "bfloat16")
    else:
        decoder = random_decoder(args.size)
        policy = Policy(*nnx.split(decoder), decoder.cfg, "")
    config = Config()
    config = replace(
        config,
        model=replace(config.model, dtype="bfloat16", remat="none"),
        batch=replace(config.batch, rows_per_microbatch=1),
        optimizer=replace(config.optimizer, warmup_steps=1),
    )
    return policy, make_updater(config, policy, total_updates=args.updates, learning_rate=1e-6)


def grpo_batch(policy: Any, folder: str, rng: np.random.Generator) -> Any:
    """Two groups of four trajectories whose advantages are not all equal: of text, if the model is real."""
    from tooljax.batch import PackItem, pack

    items = []
    for advantage in (1.2, -0.4, -0.4, -0.4, 0.5, 0.5, -0.5, -0.5):
        tokens = text_tokens(folder, rng) if folder else rng.integers(0, policy.shape.vocab, 96)
        mask = np.arange(len(tokens)) >= 32
        logs = np.where(mask, -1.0, 0.0)
        items.append(PackItem(tokens.tolist(), mask.tolist(), advantage, logs.tolist()))
    return pack(items, row_lengths=(384,), rows_multiple=1)


def text_tokens(folder: str, rng: np.random.Generator, length: int = 96) -> np.ndarray:
    """A piece of this repository's prose."""
    from rollout_sidecar.tokenizer import ChatTokenizer

    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    start = int(rng.integers(0, len(text) - 8 * length))
    return np.array(ChatTokenizer.from_folder(folder).encode(text[start : start + 8 * length]))[
        :length
    ]


def random_decoder(size: str) -> Any:
    """Weights of a real model's size and scale."""
    import jax.numpy as jnp
    from flax import nnx

    from tooljax.model.decoder import Decoder, DecoderConfig

    cfg = DecoderConfig(
        family="llama",
        head_dim=HEAD_DIM[size],
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tied_head=True,
        max_positions=4096,
        dtype="bfloat16",
        **SIZES[size],
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    values = []
    for path, param in nnx.to_flat_state(state):
        value = rng.standard_normal(param.shape, np.float32) * np.float32(0.03)
        value += np.float32(str(path[-1]).endswith("norm"))
        values.append((path, param.replace(jnp.asarray(value).astype(jnp.bfloat16))))
    return nnx.merge(graph, nnx.from_flat_state(values))


# --- push -----------------------------------------------------------------------------------------------------------


def push_tables(args: argparse.Namespace, density: float) -> None:
    """Full and delta pushes to a sidecar of its own."""
    from flax import nnx

    from tooljax.model import hf, tiny

    with tempfile.TemporaryDirectory(prefix="weight_sync_") as folder:
        model = Path(folder) / "model"
        decoder = random_decoder(args.size)
        hf.save(decoder, model)
        tiny.write_tokenizer(tiny.train_tokenizer(["Count to two."], 300), model)
        tensors = dict(hf.to_hf(decoder.cfg, nnx.state(decoder, nnx.Param)))
        engine = ["--engine", args.engine, "--model", str(model), "--max_model_tokens", "1024"]
        program = ["-m", "rollout_sidecar"]
        if args.engine == "sglang":
            program = [str(ROOT / "benchmarks" / "support" / "sidecar_from_disk.py")]
            engine += ["--memory_fraction", "0.3", "--sglang_args", args.sglang_args]
        elif args.size != "tiny":
            engine += ["--slots", "8"]
        with served(engine, Path(folder), program) as (url, process):
            asyncio.run(push_all(args, density, tensors, url, process, Path(folder)))


async def push_all(
    args: argparse.Namespace,
    density: float,
    tensors: dict[str, Any],
    url: str,
    process: int,
    folder: Path,
) -> None:
    from tooljax.weights.push import WeightSender

    pushes: list[Push] = []
    memory: list[Memory] = []
    full_bytes = sum(array.nbytes for array in tensors.values())
    print(
        f"{args.only or 'push'}: {args.size}, {full_bytes:,} bytes in full, engine {args.engine}, deltas"
    )
    print(f"of {density:.3%} of the elements, {args.running} trajectories under way\n", flush=True)
    async with SidecarClient(url, timeout_s=600) as client:
        await until_ready(client)
        if args.only == "slope":
            move = partial(moved, density)
            async with generating(client, args.running):
                wrong = await push_many(client, process, tensors, move, args.pushes)
            raise SystemExit(wrong > 0)
        sender = WeightSender([client], mode="delta", part_bytes=2**25)
        async with generating(client, args.running):
            for version in range(1, args.pushes + 2):
                if version > 1:
                    tensors = moved(density, tensors, version)
                report = await sender.push(tensors.items(), version=version, timeout_s=600)
                pushes.append(Push(report, await swap_seconds(client)))
                memory.append(await memory_of(process, client))
        print_stages(pushes)
        print_slopes(memory)
        # The hashes of the host copy, and what the engine holds otherwise.
        served_now = await client.served_weights()
        assert served_now.content_hash == pushes[-1].report.content_hash
        print(
            f"hashes equal: True; tensors that the engine holds otherwise: {served_now.altered}\n"
        )
        disk_s = await from_disk(client, tensors, folder) if args.engine == "sglang" else None
        print_goals(pushes, disk_s)


def moved(density: float, tensors: dict[str, Any], seed: int) -> dict[str, Any]:
    """The weights with that share of elements one unit in the last place away. Done when this returns."""
    import jax

    move = mover(density)
    keys = jax.random.split(jax.random.key(seed), len(tensors))
    return jax.block_until_ready(
        {n: move(a, key) for (n, a), key in zip(tensors.items(), keys, strict=True)}
    )


@cache
def mover(density: float) -> Callable[[Any, Any], Any]:
    """Compiled once for each shape."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def move(array: Any, key: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(array, jnp.uint16)
        draws = jax.random.bits(key, array.shape, jnp.uint32)
        changes = draws < jnp.uint32(density * 2**32)
        step = jnp.where(draws & jnp.uint32(1) == 1, jnp.uint16(1), jnp.uint16(65535))
        # Zero has no smaller number of its sign.
        step = jnp.where(bits & jnp.uint16(0x7FFF) == 0, jnp.uint16(1), step)
        return jax.lax.bitcast_convert_type(jnp.where(changes, bits + step, bits), jnp.bfloat16)

    return move


async def from_disk(client: SidecarClient, tensors: dict[str, Any], folder: Path) -> float:
    """Seconds of the same weights by way of a folder: written by the trainer, read by SGLang."""
    from safetensors.numpy import save_file

    target = folder / "from_disk"
    target.mkdir()
    begun = time.perf_counter()
    save_file({n: np.asarray(a) for n, a in tensors.items()}, target / "model.safetensors")
    saved_s = time.perf_counter() - begun
    for file in (folder / "model").iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    answer = json.loads(await client._call("POST", f"/benchmark/from_disk?folder={target}"))
    assert answer["success"], answer
    print(
        f"update_weights_from_disk: written in {saved_s:.3f} s, read in {answer['seconds']:.3f} s\n"
    )
    return saved_s + answer["seconds"]


if __name__ == "__main__":
    main()
