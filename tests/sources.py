"""The source files of the three packages, parsed, for the tests that read code."""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("tooljax", "rollout_sidecar", "pallas_kernels")


class Source(NamedTuple):
    """One module: its path from the root, its dotted name, and its text."""

    path: str
    module: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text, self.path)


def sources() -> list[Source]:
    """Every module of the packages, in a fixed order."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [_source(file) for file in files]


def _source(file: Path) -> Source:
    relative = file.relative_to(ROOT)
    parts = relative.with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(str(relative), module, file.read_text(encoding="utf-8"))
