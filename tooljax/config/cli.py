"""The command line that every entry point shares: which .gin files, which single values, help, dry run."""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence

from tooljax.config.errors import ConfigError
from tooljax.config.gin import SECTIONS, load_config, section_of, to_gin
from tooljax.config.schema import Config
from tooljax.config.values import describe

_WIDTH = 100


def parse_args(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    check_files: Callable[[Config], None] | None = None,
) -> Config:
    """The config that the arguments ask for (None: those of this process).

    --help and --dry_run print and exit with 0; a wrong setting is printed, without a traceback, and exits with 2.

    Args:
        check_files: asked by --dry_run too; raises ValueError for a file that is not there.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=fields_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="read this .gin file; may be repeated, later files win",
    )
    parser.add_argument(
        "--set",
        "--gin_param",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="set one field, over all files; may be repeated. Text needs no quotes: --set model.path=runs/x",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print the resolved config, every field, look for the files that it names, and exit",
    )
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.config, arguments.set)
    except ConfigError as error:
        parser.exit(2, f"{prog}: {error}\n")
    if arguments.dry_run:
        print(to_gin(config), end="")
        try:
            if check_files is not None:
                check_files(config)
        except ValueError as error:
            parser.exit(2, f"{prog}: {error}\n")
        parser.exit(0)
    return config


def fields_help() -> str:
    """Every field with its type, default and docstring, by section."""
    documents = field_documents()
    defaults = Config()
    parts = ["fields:"]
    for section, fields in SECTIONS.items():
        values = section_of(defaults, section)
        parts.append(f"\n  {section}: {inspect.getdoc(values)}")
        for name, hint in fields.items():
            parts.append(
                f"    {section}.{name}: {describe(hint)}, default {getattr(values, name)!r}"
            )
            parts.append(
                textwrap.fill(
                    documents[section][name],
                    _WIDTH,
                    initial_indent=" " * 8,
                    subsequent_indent=" " * 8,
                )
            )
    return "\n".join(parts)


def field_documents() -> dict[str, dict[str, str]]:
    """The docstring under each field, by section and name, read from the sections' source."""
    sections = {section: type(section_of(Config(), section)) for section in SECTIONS}
    return {name: _documents(_class(section)) for name, section in sections.items()}


def _class(section: type) -> ast.ClassDef:
    node = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(node, ast.ClassDef), f"{section} is written as a class"
    return node


def _documents(node: ast.ClassDef) -> dict[str, str]:
    """Python keeps no docstring for a field: it is the bare string that follows it in the class body."""
    found = {}
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[statement.target.id] = " ".join(after.value.value.split())
    return found
