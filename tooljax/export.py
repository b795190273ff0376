"""Writes what a run has trained: `python -m tooljax.export runs/x --merged policy --adapter adapter`.

--merged is a Hugging Face folder of all weights, which transformers and the engines load; a run of adapters (lora.rank)
has them merged into its model's weights, rounded to model.dtype. --adapter is a PEFT folder of the adapters alone, in
float32. Both are read from a checkpoint, the newest unless --step says otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tooljax.checkpoint import Checkpointer, CheckpointError
from tooljax.config import Config, ConfigError, load_config
from tooljax.origin import Origin
from tooljax.saved_policy import checkpoints_of, read_saved


def export(config: Config, *, step: str = "newest", merged: str = "", adapter: str = "") -> int:
    """Writes the folders that are named, from a checkpoint of config.run.dir: "newest", "best" or a step. Returns the
    step. ValueError or CheckpointError says what is missing."""
    if adapter and not config.lora.rank:
        raise ValueError(
            f"{config.run.dir} trains all weights (lora.rank=0), so there is no adapter; use --merged"
        )
    origin, found = Origin(config), _step(config, step)
    saved = read_saved(config, found, changes=lambda extra: origin.changes(extra["origin"]))
    origin.restore(saved.extra["origin"])
    if merged:
        saved.policy.save(saved.params, merged)
    if adapter:
        saved.policy.save_adapter(saved.state.params, adapter)
    return found


def _step(config: Config, wanted: str) -> int:
    """Of the checkpoint that is asked for."""
    folder = checkpoints_of(config)
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: the run has saved nothing yet")
    with Checkpointer(folder, keep=config.checkpoint.keep) as checkpointer:
        steps, best = checkpointer.steps(), checkpointer.best()
    names: dict[str, int | None] = {str(step): step for step in steps}
    names |= {"newest": max(steps, default=None), "best": best.step if best else None}
    found = names.get(wanted)
    if found is None:
        raise ValueError(
            f"--step {wanted}: {folder} holds the steps {steps}"
            f"{'' if best else ', and none is marked as the best (evaluate.best_metric)'}"
        )
    return found


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog="tooljax.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, help="folder of a run")
    made.add_argument(
        "--step", default="newest", help="newest, best, or the number of a saved step"
    )
    made.add_argument("--merged", default="", metavar="FOLDER", help="Hugging Face folder to write")
    made.add_argument("--adapter", default="", metavar="FOLDER", help="PEFT folder to write")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="changes a setting of the run, such as its mesh",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 when all was written, 1 with one sentence when not."""
    asked = parser()
    args = asked.parse_args(argv)
    if not (args.merged or args.adapter):
        asked.error("nothing to write: name a folder with --merged or --adapter")
    try:
        config = load_config([str(args.run / "config.gin")], args.set)
        config = replace(config, run=replace(config.run, dir=str(args.run)))
        step = export(config, step=args.step, merged=args.merged, adapter=args.adapter)
    except (ValueError, CheckpointError, ConfigError, OSError) as error:
        print(f"tooljax.export: {error}", file=sys.stderr)
        return 1
    print(f"wrote step {step} to {' and '.join(filter(None, (args.merged, args.adapter)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
