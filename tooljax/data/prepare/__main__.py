"""The command line of `python -m tooljax.data.prepare COMMAND`: 0 when the files were written, 1 with one sentence when
not.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "gsm8k": "GSM8K problems, with a calculator, as verl multi-turn records",
    "arithmetic": "generated word problems, and imperfect demonstrations of solving them",
    "guess_number": "games of guessing a number with a tool, and demonstrations of playing them badly",
}
"""Module of this package, and what it writes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command."""
    parser = argparse.ArgumentParser(prog="tooljax.data.prepare", description="Writes data files.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = import_module(f"tooljax.data.prepare.{name}")
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"tooljax.data.prepare {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
