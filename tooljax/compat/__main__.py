"""`python -m tooljax.compat report FILE...` and `python -m tooljax.compat config VERL.yaml`, for users of verl.

`report` reads each file as a run would (tool_config, interaction and option YAML, launch scripts, MCP JSON, parquet or
JSON records, Python files of rewards or function tools), and says what in it means something else here, and what cannot
run. Files that options name are read too. It loads the users' classes that the files name; it starts no server.
`config` writes the options as a .gin file.

Exit code: 0 if everything can run, 1 if something cannot.
"""

import argparse
import sys
from collections.abc import Sequence

from rollout_sidecar.profiles import PROFILES
from tooljax.compat.report import make_report, to_gin, to_text


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tooljax.compat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("report", "what the files mean here, and what cannot run"),
        ("config", "verl's options as a .gin file"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("files", nargs="+", metavar="FILE")
        command.add_argument(
            "--profile",
            choices=list(PROFILES),
            default="default",
            help="which verl the files were written for: A up to 0.6.1, B 0.5.0 to 0.7.1, C from 0.8.0",
        )
    arguments = parser.parse_args(argv)
    report = make_report(arguments.files, profile=arguments.profile)
    print(to_gin(report) if arguments.command == "config" else to_text(report), end="")
    if arguments.command == "config":
        for problem in report.problems:
            print(f"python -m tooljax.compat: {problem}", file=sys.stderr)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
