"""The whole job on a laptop: `make quickstart`.

Generates multi-step arithmetic, builds a small decoder and its tokenizer, cold-starts it on imperfect demonstrations,
trains it with GRPO through a real sidecar with a calculator, and ends with a table on held-out problems: the cold
start, what training made of it, and that with the calculator withheld or in a single turn. Nothing is downloaded. Run
again, it goes on where it was.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rich.console import Console

from rollout_sidecar.client import SidecarError
from tooljax.checkpoint import CheckpointError
from tooljax.config import Config, parse_args
from tooljax.data.prepare import arithmetic
from tooljax.evaluate import compare, held_out_tasks, report_folder, show
from tooljax.evaluation.comparison import Comparison
from tooljax.evaluation.report import write_report
from tooljax.model import tiny
from tooljax.rollouts import InterruptedRollout, Sidecars, open_sidecars
from tooljax.sft import cold_start
from tooljax.trackers import read_metrics, write_best_and_worst
from tooljax.train import train

VOCAB = 512
EMBED = 128
LAYERS = 4


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0 when the table was printed."""
    return learn(argv, prog="tooljax.quickstart", description=__doc__ or "", module=arithmetic)


def learn(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    module: ModuleType,
    whole_numbers: bool = False,
) -> int:
    """The whole job, on the data of a module of `tooljax.data.prepare`. With `whole_numbers` a number is one token, not
    one a digit. 0 when the table was printed."""
    config = parse_args(argv, prog=prog, description=description)
    started = time.monotonic()
    console = Console()
    try:
        config = prepare(config, console, module, whole_numbers=whole_numbers)
        with open_sidecars(config) as sidecars:
            comparison = run(config, sidecars, console)
    except InterruptedRollout:
        comparison = None
    except (ValueError, SidecarError, CheckpointError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    if comparison is None:
        print("interrupted; run the same command to go on", file=sys.stderr)
        return 130
    report(config, comparison, console)
    console.print(f"total {(time.monotonic() - started) / 60:.1f} minutes")
    return 0


def prepare(
    config: Config,
    console: Console,
    module: ModuleType = arithmetic,
    *,
    whole_numbers: bool = False,
) -> Config:
    """Data, model and cold start, each unless its result is there; the config with their paths filled in."""
    run_dir = Path(config.run.dir)
    data, model, started = run_dir / "data", run_dir / "model", run_dir / "sft"
    demonstrations = data / "demonstrations.jsonl"
    _check_same_seed(run_dir, config.run.seed)
    # Each result is looked for by the file that is written last: what a killed run left half done is made again.
    if not demonstrations.exists():
        console.print("[bold]1/4[/] generating problems and demonstrations")
        module.run(_options(module, str(data), config.run.seed))
    if not (model / "tokenizer_config.json").exists():
        console.print("[bold]2/4[/] building a small decoder and its tokenizer")
        texts = tiny.chat_texts(demonstrations)
        tiny.build(
            model,
            texts,
            vocab=VOCAB,
            embed=EMBED,
            layers=LAYERS,
            seed=config.run.seed,
            whole_numbers=whole_numbers,
        )
    config = replace(
        config,
        model=replace(config.model, path=str(model)),
        data=replace(
            config.data,
            train=(str(data / "train.parquet"),),
            eval=(str(data / "heldout.parquet"),),
        ),
        sft=replace(config.sft, demonstrations=(str(demonstrations),), output=str(started)),
    )
    if not started.exists():
        console.print("[bold]3/4[/] cold start on imperfect demonstrations")
        cold_start(config)
    return replace(config, model=replace(config.model, path=str(started)))


def run(config: Config, sidecars: Sidecars, console: Console) -> Comparison | None:
    """Trains, then compares; None if it was interrupted."""
    console.print("[bold]4/4[/] training with GRPO through the sidecar")
    if train(config, sidecars) < config.run.steps:
        return None
    tasks = held_out_tasks(config)
    comparison = compare(config, sidecars, tasks)
    write_report(config, comparison, tasks, report_folder(config))
    return comparison


def report(config: Config, comparison: Comparison, console: Console) -> None:
    """Prints the table and where to look further."""
    run_dir = Path(config.run.dir)
    course = [
        f"{row['eval/accuracy']:.3f} after step {row['step']}"
        for row in read_metrics(run_dir / "metrics.jsonl")
        if "eval/accuracy" in row
    ]
    if course:
        console.print(f"held-out accuracy: {', '.join(course)}", soft_wrap=True, highlight=False)
    show(comparison, console)
    extremes = write_best_and_worst(run_dir, comparison.reference.evaluation.trajectories, count=10)
    console.print(f"report: {report_folder(config) / 'report.html'}", soft_wrap=True)
    console.print(f"TensorBoard: tensorboard --logdir {run_dir / 'tensorboard'}", soft_wrap=True)
    console.print(f"learning curve: {run_dir / 'learning_curve.png'}", soft_wrap=True)
    console.print(f"ten best and ten worst trajectories: {extremes}", soft_wrap=True)


def _check_same_seed(run_dir: Path, seed: int) -> None:
    """Refuses to mix two seeds in one folder, where the second would go on with the first one's data and model."""
    kept = run_dir / "seed"
    if kept.exists() and int(kept.read_text()) != seed:
        raise ValueError(
            f"{run_dir} holds a quickstart with run.seed={int(kept.read_text())}, not {seed}; "
            "choose another run.dir, or remove it"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    kept.write_text(str(seed))


def _options(module: ModuleType, folder: str, seed: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(["--output_dir", folder, "--seed", str(seed)])


if __name__ == "__main__":
    sys.exit(main())
