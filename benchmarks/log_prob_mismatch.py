"""How far an engine's log-probs are from the trainer's, and what float32 LM heads change on either side.

    python benchmarks/log_prob_mismatch.py --model DIR                         # the embedded engine
    python benchmarks/log_prob_mismatch.py --model DIR --engine sglang         # SGLang, with both kinds of head
    python benchmarks/log_prob_mismatch.py --model DIR --url http://HOST:8000  # a sidecar that is running

The weights are pushed, tokens sampled from fixed prompts with fixed seeds, and the same tokens scored by the forward
pass that trains. Trainer and embedded engine keep the head's product in float32; a row with a bfloat16 head rounds the
trainer's logits, as engines without a float32 head do theirs. On a GPU that both sides use, SGLang gets
--memory_fraction of it, and JAX takes what it needs.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# JAX would take three quarters of the GPU at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from rollout_sidecar.protocol import Task
from tooljax.config import Config
from tooljax.config.schema import (
    BatchConfig,
    GateConfig,
    LimitsConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SidecarConfig,
)
from tooljax.grpo.mismatch import Mismatch, measure
from tooljax.launch import local_sidecar
from tooljax.log_prob_gate import LogProbGate
from tooljax.policy import Policy, make_updater
from tooljax.rollouts import Sidecars

MAX_PROMPT_TOKENS = 256

COLUMNS = (
    ("mean KL", "{0.mean_kl:.2e}"),
    ("mean diff", "{0.mean_difference:+.1e}"),
    ("RMS", "{0.rms:.2e}"),
    ("p99", "{0.p99:.2e}"),
    ("max", "{0.max_abs:.2e}"),
    ("ESS", "{0.ess:.4f}"),
    ("in 1 %", "{0.within_1pct:.3f}"),
    ("in 5 %", "{0.within_5pct:.3f}"),
    ("tokens", "{0.tokens}"),
)


def main() -> None:
    args = arguments()
    config = make_config(args)
    policy = Policy.load(args.model, args.dtype)
    updater = make_updater(config, policy, total_updates=1, learning_rate=0.0)
    state = updater.init(policy.params)
    shape = policy.shape
    print(
        f"{args.model}: {shape.family}, {shape.layers} layers, embed {shape.embed}, vocab {shape.vocab}, {args.dtype}; "
        f"{args.prompts} prompts, temperature {args.temperature:g}; trainer on {jax.devices()[0].device_kind}, "
        f"jax {jax.__version__}\n"
    )
    print(f"{'engine':24}{'trainer':16}" + "".join(f"{name:>11}" for name, _ in COLUMNS))
    for name, flags in engines(args):
        with open_sidecar(args, config, flags) as sidecars:
            tensors = policy.tensors(updater.compute_params(state))
            sidecars.push(tensors, step=0, weights=config.weights)
            gate = LogProbGate(config, policy, updater, tasks(args.prompts))
            (compared,) = gate.compare(sidecars, state, 0)
            probes = gate.probes(state, compared.batch)
        row(name, "float32 head", compared.mismatch)
        rounded = probes.values().rounded
        row(name, "bfloat16 head", measure(rounded, probes.rollout_log_probs))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    add("--engine", choices=["jax", "sglang"], default="jax", help="of a sidecar started here")
    add("--url", default="", help="a sidecar that is running, instead")
    add("--token_file", default="", help="its token")
    add("--sglang_args", default="{}", help="JSON, as the sidecar takes it")
    add("--memory_fraction", default="0.4", help="of the GPU, for SGLang")
    add("--prompts", type=int, default=32)
    add("--max_tokens", type=int, default=128, help="of each turn")
    add("--temperature", type=float, default=1.0)
    add("--rows", type=int, default=8, help="that the trainer computes at once")
    return parser.parse_args()


def make_config(args: argparse.Namespace) -> Config:
    longest = MAX_PROMPT_TOKENS + args.max_tokens
    return Config(
        run=RunConfig(dir=tempfile.mkdtemp(prefix="log_prob_mismatch_")),
        model=ModelConfig(path=args.model, dtype=args.dtype),
        sampling=SamplingConfig(temperature=args.temperature),
        limits=LimitsConfig(
            max_tokens_per_turn=args.max_tokens,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            max_trajectory_tokens=longest,
        ),
        sidecar=SidecarConfig(
            slots=args.prompts, max_model_tokens=longest + 64, start_timeout_s=600.0
        ),
        batch=BatchConfig(row_lengths=(longest,), rows_per_microbatch=args.rows),
        gate=GateConfig(prompts=args.prompts, max_tokens=args.max_tokens),
    )


def engines(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """What to compare: a name, and the sidecar's flags."""
    if args.url:
        return [(args.url, [])]
    if args.engine == "jax":
        return [("jax, float32 head", ["--engine", "jax"])]
    flags = ["--engine", "sglang", "--sglang_args", args.sglang_args]
    flags += ["--memory_fraction", args.memory_fraction]
    return [
        ("sglang", flags),
        ("sglang, float32 head", [*flags, "--float32_head"]),
    ]


@contextmanager
def open_sidecar(args: argparse.Namespace, config: Config, flags: list[str]) -> Iterator[Sidecars]:
    """The running sidecar, or one that ends with the block."""
    if args.url:
        token = Path(args.token_file).read_text().strip() if args.token_file else None
        with Sidecars([args.url], token=token, timeout_s=600.0) as sidecars:
            yield sidecars
        return
    log = Path(config.run.dir) / "sidecar.log"
    with (
        local_sidecar(config, log_path=log, engine=flags) as (url, token),
        Sidecars([url], token=token, timeout_s=600.0) as sidecars,
    ):
        yield sidecars


def tasks(count: int) -> list[Task]:
    """Questions that a small model answers at some length."""
    questions = [
        "What is {0} times {1}? Show each step.",
        "Tell a short story about a ship with {0} sails and {1} sailors.",
        "Write a Python function that returns the {0} largest of {1} numbers.",
        "Name {0} things that weigh about {1} kilograms, and say why.",
    ]
    return [
        Task(
            task_id=str(i),
            messages=[{"role": "user", "content": questions[i % 4].format(3 + i, 7 + 5 * i % 90)}],
        )
        for i in range(count)
    ]


def row(engine: str, trainer: str, mismatch: Mismatch) -> None:
    cells = "".join(f"{shown.format(mismatch):>11}" for _, shown in COLUMNS)
    print(f"{engine:24}{trainer:16}{cells}", flush=True)


if __name__ == "__main__":
    main()
