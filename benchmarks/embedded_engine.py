"""How fast the embedded engine generates, and how far that is from what the machine's matrix products allow.

    python benchmarks/embedded_engine.py            # the quickstart's kind of model, from random weights
    python benchmarks/embedded_engine.py --model DIR --slots 8

Decoding is measured as rollouts use it: prompts of many lengths, turns that end at different times, one prompt a group.
The ceiling is the time of the model's matrix products alone, in the same shapes, one after the other, for as many
steps: no attention, sampling, norms or scheduling. Rates are those of the best of several runs.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tooljax.model import hf
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.model.precision import matmul_precision
from tooljax.model.sampler import Generation, Sampler, SamplerWeights, unstack

TINY = DecoderConfig(
    family="llama",
    vocab=512,
    embed=128,
    layers=4,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    ffw=512,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied_head=True,
    max_positions=4096,
    dtype="float32",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--model", default="", help="Hugging Face folder; empty: a tiny random model"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt_tokens", type=int, default=96, help="mean length")
    parser.add_argument("--new_tokens", type=int, default=64, help="mean length")
    parser.add_argument(
        "--group_size", type=int, default=8, help="trajectories that share a prompt"
    )
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()

    decoder = hf.load(args.model, args.dtype) if args.model else Decoder(TINY, rngs=nnx.Rngs(0))
    cfg, weights = decoder.cfg, unstack(decoder)
    limit = 2 * (args.prompt_tokens + args.new_tokens)
    sampler = Sampler(cfg, weights, slots=args.slots, max_model_tokens=limit)
    begun = time.perf_counter()
    sampler.warm_up()
    compiled_s = time.perf_counter() - begun

    rng = np.random.default_rng(0)
    full = [turn(cfg, rng, f"f{i}", args.prompt_tokens, args.new_tokens) for i in range(args.slots)]
    ragged = ragged_turns(cfg, rng, args)
    prompts = [turn(cfg, rng, f"p{i}", args.prompt_tokens, 1) for i in range(args.slots)]
    steps = args.new_tokens
    step_s = best(args.runs, partial(matrix_products, cfg, weights, args.slots, steps)) / steps
    ceiling = args.slots / step_s
    read = sum(len(p.token_ids) for p in prompts)
    rows = [
        ("matrix products alone", ceiling, "the ceiling"),
        ("decoding, all slots busy", *rate(sampler, weights, full, args.runs, ceiling)),
        ("rollouts: prefill, ragged turns", *rate(sampler, weights, ragged, args.runs, ceiling)),
    ]
    prefill_s = best(args.runs, partial(play, sampler, weights, prompts))

    shape = f"{cfg.layers} layers, embed {cfg.embed}, ffw {cfg.ffw}, vocab {cfg.vocab}, {cfg.dtype}"
    print(f"{shape}; {args.slots} slots, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"compiled in {compiled_s:.1f} s\n")
    print(f"{'':34}{'tokens/s':>12}")
    for name, tokens_per_s, note in rows:
        print(f"{name:34}{tokens_per_s:12,.0f}  {note}")
    print(
        f"{'prefill, no shared prompts':34}{read / prefill_s:12,.0f}  {args.prompt_tokens} tokens each"
    )


def turn(
    cfg: DecoderConfig, rng: np.random.Generator, name: str, prompt: int, new: int
) -> Generation:
    tokens = rng.integers(0, cfg.vocab, prompt).tolist()
    return Generation(
        trajectory_id=name, token_ids=tokens, max_tokens=new, seed=int(rng.integers(2**62))
    )


def ragged_turns(cfg: DecoderConfig, rng: np.random.Generator, args) -> list[Generation]:
    """Groups that share a prompt, with lengths from half to one and a half times the mean; four times the slots."""
    turns = []
    for group in range(4 * args.slots // args.group_size):
        spread = rng.uniform(0.5, 1.5, args.group_size + 1)
        prompt = rng.integers(0, cfg.vocab, int(args.prompt_tokens * spread[-1])).tolist()
        for sample in range(args.group_size):
            turns.append(
                Generation(
                    trajectory_id=f"r{group}-{sample}",
                    token_ids=prompt,
                    max_tokens=int(args.new_tokens * spread[sample]),
                    seed=int(rng.integers(2**62)),
                )
            )
    return turns


def rate(
    sampler: Sampler, weights: SamplerWeights, turns: list[Generation], runs: int, ceiling: float
) -> tuple[float, str]:
    """Sampled tokens a second over whole turns, and their share of the ceiling."""
    tokens = sum(turn.max_tokens for turn in turns)
    tokens_per_s = tokens / best(runs, partial(play, sampler, weights, turns))
    return tokens_per_s, f"{tokens_per_s / ceiling:.0%} of the ceiling"


def play(sampler: Sampler, weights: SamplerWeights, turns: list[Generation]) -> None:
    """Runs the turns, each in a fresh slot, to their ends. Nothing read in an earlier run is known any more."""
    sampler.replace_weights(weights)
    for each in turns:
        sampler.submit(each)
    while sampler.busy:
        for ended in sampler.step():
            sampler.release(ended.trajectory_id)


@partial(jax.jit, static_argnums=(0, 2, 3))
def matrix_products(
    cfg: DecoderConfig, weights: SamplerWeights, slots: int, steps: int
) -> jax.Array:
    """The products of `steps` decoding steps, chained so that none can be left out."""
    product = partial(jnp.matmul, precision=matmul_precision(weights.embedding.dtype))

    def step(_, x: jax.Array) -> jax.Array:
        for layer in weights.layers:
            q = product(x, layer["wq"].reshape(cfg.embed, -1))
            k, v = (product(x, layer[name].reshape(cfg.embed, -1)) for name in ("wk", "wv"))
            # In place of attention, so that all three are needed.
            mixed = q + jnp.tile(k + v, (1, cfg.q_heads // cfg.kv_heads))
            x = product(mixed, layer["wo"].reshape(-1, cfg.embed))
            x = product(product(x, layer["w_gate"]) + product(x, layer["w_up"]), layer["w_down"])
        logits = product(x, weights.head.T)
        # Kept from growing or vanishing, as norms do.
        return x / jnp.abs(x).max() + logits[:, :1].astype(x.dtype) * 1e-6

    return jax.lax.fori_loop(0, steps, step, jnp.ones((slots, cfg.embed), weights.embedding.dtype))


def best(runs: int, call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after one that warms up."""
    seconds = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
