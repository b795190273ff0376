"""Compiles a config's update for a named topology, without its devices, and says whether it fits and what bounds it.

    python -m tooljax.compile_check --topology v5e:4x4 --config configs/tpu_v5e_qwen2_5_0_5b.gin

--topology is a TPU slice that libtpu knows (v5e:4x4, v5p:2x2x2, v6e:8x8, ...), gpu:1 for a GPU of this machine, or
cpu:8 for its CPU as eight devices. model.path is a folder with a config.json, or ends with a name such as Qwen2.5-7B:
no weights are read. What is compiled is what a run compiles, for the longest of batch.row_lengths. Nothing is run.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

from tooljax.compile.chips import NoCompiler, topology
from tooljax.compile.program import DoesNotFit, compile_update
from tooljax.compile.report import report, too_large
from tooljax.config import parse_args

PROG = "tooljax.compile_check"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: it compiles and fits; 1: it does not; 2: a wrong argument, or no compiler for it."""
    own = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    own.add_argument("--topology", default="")
    chosen, rest = own.parse_known_args(argv)
    config = parse_args(rest, prog=PROG, description=__doc__ or "")
    if not chosen.topology.startswith("gpu"):
        # The accelerators of this machine, if it has any, are not needed.
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = topology(chosen.topology)
        compiled = compile_update(config, devices)
    except (ValueError, NotImplementedError, NoCompiler) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except DoesNotFit as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    print(report(config, devices, compiled))
    problems = too_large(compiled, devices.chip)
    for sentence in problems:
        print(f"{PROG}: {sentence}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
