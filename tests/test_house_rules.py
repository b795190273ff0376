"""What keeps every file short enough to be read: sizes, and a docstring that says what the file is for."""

import ast
from pathlib import Path

from sources import PACKAGES, sources

MAX_FILE_LINES = 400
MAX_KERNEL_LINES = 600
MAX_FUNCTION_LINES = 60


def test_the_packages_are_found():
    assert {source.module.partition(".")[0] for source in sources()} == set(PACKAGES)


def test_no_file_is_too_long():
    too_long = []
    for source in sources():
        lines = source.text.count("\n")
        kernel = source.module.startswith("pallas_kernels.")
        if lines > (MAX_KERNEL_LINES if kernel else MAX_FILE_LINES):
            too_long.append(f"{source.path}: {lines} lines")
    for path in Path(__file__).parent.rglob("*.py"):
        lines = path.read_text().count("\n")
        if lines > MAX_FILE_LINES:
            too_long.append(f"{path}: {lines} lines")
    assert not too_long


def test_no_function_is_too_long():
    too_long = []
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{source.path}:{node.lineno}: {node.name} has {lines} lines")
    assert not too_long


def test_every_module_says_what_it_is_for():
    silent = [
        source.path for source in sources() if source.text and not ast.get_docstring(source.tree)
    ]
    assert not silent


def test_no_annotations_as_strings():
    # `from __future__ import annotations` would hide the array types from the checks in tests.
    hidden = [s.path for s in sources() if "from __future__ import annotations" in s.text]
    assert not hidden
