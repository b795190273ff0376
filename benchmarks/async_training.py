"""What rollouts ahead of their step, and oversampling, are worth where tools answer late now and then.

    python benchmarks/async_training.py
    python benchmarks/async_training.py --steps 60 --median_s 0.3 --update_s 1
    python benchmarks/async_training.py --engine embedded --folder /tmp/world

The whole training loop (`tooljax.train`: rollouts, update, push to the sidecar, logs) against a sidecar over HTTP. How
long a tool takes is drawn from a log-normal distribution by the turn's seed, which derives from seed, step, task,
sample and turn: every mode waits for the same draws of the same tasks.

By default the engine plays a script (each trajectory calls a tool twice, then answers), a tiny model is updated, and
tokens cost nothing: what is measured is waiting, of the step for the slowest trajectory, which is what rollouts ahead
and oversampling are for. Beside it is what the draws alone come to. With `--engine embedded` the quickstart's model
learns the quickstart's task with its calculator from its cold start, over several seeds, and accuracy on the held-out
problems is measured when training is over, without delays. Steps that compile are left out.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from rich.console import Console
from support.late_tools import CALLS, Late, embedded, scripted, serving

from rollout_sidecar.engines.base import Engine
from rollout_sidecar.protocol import derive_seed
from rollout_sidecar.tools.base import BaseTool
from tooljax.config import Config, load_config
from tooljax.evaluate import evaluate, held_out_tasks
from tooljax.intervals import paired_bootstrap, wilson
from tooljax.model import tiny
from tooljax.quickstart import prepare
from tooljax.rollouts import open_sidecars
from tooljax.train import Run, train

WARM_UP = 3
"""Steps that are left out: they compile, and nothing is ahead yet."""
PROMPTS = 8
SAMPLES = 4
DEFAULTS = {  # steps, median_s, update_s
    "scripted": (63, 0.15, 0.5),
    "embedded": (36, 1.5, 0.0),
}
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.gin"

MODES: dict[str, list[str]] = {
    "synchronous": [],
    "lag 1": ["async.max_policy_lag=1", "grpo.rollout_is=token"],
    "oversampling 1.25": ["async.oversampling=1.25"],
    "lag 1, oversampling 1.25": [
        *("async.max_policy_lag=1", "grpo.rollout_is=token", "async.oversampling=1.25"),
    ],
}


@dataclass(frozen=True)
class Measured:
    """A run."""

    seconds: np.ndarray
    """Of each step."""
    rollout_s: np.ndarray
    """Of each step: what it waited for its rollouts."""
    lag: float
    scores: Sequence[float] = ()
    """Of held-out problems: 1 or 0."""


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.folder or name)
        shared = (embedded_world if args.engine == "embedded" else scripted_world)(folder)
        run = partial(all_modes, args, shared, Path(name))
        seeds = range(args.seeds)
        if args.parallel:
            # Not forked: JAX has threads.
            with ProcessPoolExecutor(args.seeds, multiprocessing.get_context("spawn")) as pool:
                by_seed = list(pool.map(run, seeds))
        else:
            by_seed = list(map(run, seeds))
    found = {mode: [made[mode] for made in by_seed] for mode in args.modes}
    show(found)
    if args.engine == "scripted":
        show_draws(args)
    else:
        show_accuracy(found)
    return 0


def all_modes(
    args: argparse.Namespace, shared: Mapping[str, Any], runs: Path, seed: int
) -> dict[str, Measured]:
    """What each mode comes to with a seed."""
    logging.disable(logging.WARNING)
    found = {}
    for mode in args.modes:
        run_dir = runs / f"{mode.replace(' ', '_')}_{seed}"
        fixed = {"run.dir": run_dir, "run.seed": seed, "run.steps": args.steps}
        settings = [f"{k}={v}" for k, v in {**shared, **fixed}.items()] + MODES[mode]
        found[mode] = made = measured(settings, args)
        told = f"seed {seed}, {mode}: {made.seconds.mean():.2f} s a step"
        told += f", accuracy {np.mean(made.scores):.3f}" if made.scores else ""
        print(told, file=sys.stderr, flush=True)
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--engine", choices=list(DEFAULTS), default="scripted")
    parser.add_argument("--steps", type=int, help=f"the first {WARM_UP} do not count")
    parser.add_argument("--median_s", type=float, help="of the tool's time")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm")
    parser.add_argument("--update_s", type=float, help="added to each update")
    parser.add_argument("--seeds", type=int, default=0, help="1, or 3 with the embedded engine")
    parser.add_argument("--parallel", action="store_true", help="all seeds at once: they wait")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--folder", help="where data and cold start are kept for another time")
    args = parser.parse_args()
    for name, value in zip(("steps", "median_s", "update_s"), DEFAULTS[args.engine], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.seeds = args.seeds or {"scripted": 1, "embedded": 3}[args.engine]
    return args


# --- what is trained ---


def scripted_world(folder: Path) -> dict[str, Any]:
    """A tiny model, and tasks whose answers are 0 or 1; the settings that all modes share."""
    texts = ['<tool_call>{"name": "look", "arguments": {"key": "0"}}</tool_call>', "#### 1 What?"]
    tiny.build(folder / "model", texts, vocab=300, embed=32, layers=1, seed=0)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What? {i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i % 2)},
        }
        for i in range(200 * PROMPTS)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return common() | {
        "model.path": folder / "model",
        "data.train": (str(folder / "train.jsonl"),),
        "grpo.kl_coef": 0.0,
        "limits.max_prompt_tokens": 256,
        "limits.max_trajectory_tokens": 512,
        "batch.row_lengths": (512,),
    }


def embedded_world(folder: Path) -> dict[str, Any]:
    """The quickstart's data and cold start, made unless they are there; the settings that all modes share."""
    settings = [f"run.dir={folder}", "run.progress=off", "sft.steps=400"]
    made = prepare(load_config([QUICKSTART], settings), Console(stderr=True))
    return common() | {
        "model.path": made.model.path,
        "data.train": made.data.train,
        "data.eval": made.data.eval,
        "sidecar.tool_config": (),
        "optimizer.schedule": "constant",
        "optimizer.learning_rate": 3e-4,
        "evaluate.every_steps": 0,
        "grpo.kl_coef": 0.0,
    }


def common() -> dict[str, Any]:
    """Settings of both."""
    return {
        "run.progress": "off",
        "model.dtype": "float32",
        "data.prompts_per_step": PROMPTS,
        "grpo.group_size": SAMPLES,
        "limits.tool_timeout_s": 300.0,
        "limits.trajectory_timeout_s": 600.0,
        "gate.every_pushes": 0,
        "checkpoint.every_steps": 10_000,
        "track.tensorboard": False,
    }


# --- what is measured ---


def measured(settings: Sequence[str], args: argparse.Namespace) -> Measured:
    """Trains with them, against a sidecar that serves tools that are late."""
    late = Late(args.median_s, args.sigma)
    config = load_config([QUICKSTART] if args.engine == "embedded" else [], settings)
    model = Path(config.model.path)
    with serving(model, *served(model, late, args.engine)) as url:
        config = load_config(
            [QUICKSTART] if args.engine == "embedded" else [],
            [*settings, f"sidecar.urls={(url,)}"],
        )
        return trained(config, late, args.update_s)


def served(model: Path, late: Late, engine: str) -> tuple[Engine, BaseTool]:
    if engine == "scripted":
        return scripted(model, late)
    # Of two steps. A trajectory that waits for its tool keeps its slot.
    return embedded(model, late, slots=2 * PROMPTS * SAMPLES, tokens=128)


def trained(config: Config, late: Late, update_s: float) -> Measured:
    """Times of the steps; accuracy where there is something held out."""
    update = Run.update

    def slower(self: Run, *given: Any) -> Any:
        out = update(self, *given)
        time.sleep(update_s)
        return out

    Run.update = slower  # type: ignore[method-assign]
    scores: list[float] = []
    try:
        with open_sidecars(config) as sidecars:
            train(config, sidecars)
            late.median_s = 0.0
            if config.data.eval:
                scores = evaluate(config, sidecars, held_out_tasks(config)).scores
    finally:
        Run.update = update  # type: ignore[method-assign]
    with open(Path(config.run.dir) / "metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines][WARM_UP:]
    return Measured(
        np.array([row["time/step_s"] for row in rows]),
        np.array([row["time/rollout_s"] for row in rows]),
        float(np.mean([row["policy/lag/mean"] for row in rows])),
        scores,
    )


def drawn(args: argparse.Namespace, seed: int, step: int, groups: int) -> float:
    """Seconds until PROMPTS of so many groups have ended, if nothing but the tool took time."""
    late = Late(args.median_s, args.sigma)
    ends = []
    for i in range(groups):
        seeds = [derive_seed(seed, step, i, s) for s in range(SAMPLES)]
        waits = [[late.draw(derive_seed(each, turn)) for turn in range(CALLS)] for each in seeds]
        ends.append(max(map(sum, waits)))
    return sorted(ends)[PROMPTS - 1]


# --- what is shown ---


def show(found: Mapping[str, Sequence[Measured]]) -> None:
    """A table in Markdown: each mode beside the first."""
    seconds = {mode: np.concatenate([one.seconds for one in runs]) for mode, runs in found.items()}
    base = next(iter(seconds.values()))
    print("| mode | s a step | faster | p95 of a step | less by | waits for rollouts | mean lag |")
    print("|---|---|---|---|---|---|---|")
    for mode, runs in found.items():
        own = seconds[mode]
        p95, base_p95 = np.percentile(own, 95), np.percentile(base, 95)
        waited = np.concatenate([one.rollout_s for one in runs]).mean()
        print(
            f"| {mode} | {own.mean():.2f} | {base.mean() / own.mean():.2f} x | {p95:.2f} s "
            f"| {1 - p95 / base_p95:.0%} | {waited:.2f} s | {np.mean([r.lag for r in runs]):.2f} |"
        )


def show_draws(args: argparse.Namespace) -> None:
    """What rollouts would take if nothing but the tool did: at the same steps, then in many more."""
    for groups, name in ((PROMPTS, "all"), (PROMPTS * 5 // 4, "oversampling 1.25")):
        steps = range(WARM_UP, args.steps)
        waits = np.array([drawn(args, s, k, groups) for s in range(args.seeds) for k in steps])
        more = np.array([drawn(args, 0, step, groups) for step in range(2000)])
        print(
            f"tools alone, {name}: mean {waits.mean():.2f} s, p95 {np.percentile(waits, 95):.2f} s; "
            f"over 2000 steps {more.mean():.2f} s, {np.percentile(more, 95):.2f} s"
        )


def show_accuracy(found: Mapping[str, Sequence[Measured]]) -> None:
    """Accuracy on held-out problems with 95 % intervals: of each seed, of all; and what it is more than the first
    mode's, by a bootstrap over the problems of all seeds."""
    base = np.concatenate([one.scores for one in next(iter(found.values()))]).astype(float)
    print("\n| mode | accuracy by seed | of all | more than the first |\n|---|---|---|---|")
    for mode, runs in found.items():
        own = np.concatenate([one.scores for one in runs]).astype(float)
        each = ", ".join(f"{np.mean(one.scores):.3f}" for one in runs)
        low, high = wilson(int(own.sum()), len(own))
        less, more = paired_bootstrap(list(base), list(own), seed=0)
        print(
            f"| {mode} | {each} | {own.mean():.3f} ({low:.3f}–{high:.3f}) "
            f"| {(own - base).mean():+.3f} ({less:+.3f} to {more:+.3f}) |"
        )


if __name__ == "__main__":
    sys.exit(main())
