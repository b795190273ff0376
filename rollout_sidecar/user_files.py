"""Finds and reads the files that users write: YAML and JSON with their faults told as file, line and sentence.

One rule for relative paths, in every file: beside the file that names them, then from the working folder.

Stricter than the libraries: a key that is there twice in one mapping is an error, where they let the last one win.
"""

import json
from pathlib import Path
from typing import Any

import yaml


def find_path(name: str, base_dir: Path) -> Path | None:
    """Where a file or folder is that a file in `base_dir` names; None if it is nowhere."""
    return next((path for path in (base_dir / name, Path(name)) if path.exists()), None)


def find_file(name: str, base_dir: Path, where: str) -> Path:
    """A file that a setting names. ValueError, starting with `where`, says where it was looked for."""
    for file in (base_dir / name, Path(name)):
        if file.is_file():
            return file
    if Path(name).is_absolute():
        raise ValueError(f"{where}: {name}: no such file")
    folders = dict.fromkeys(map(str, (base_dir.absolute(), Path.cwd())))
    raise ValueError(f"{where}: {name}: no such file (looked in {' and '.join(folders)})")


def read_yaml(file: Path) -> Any:
    """What is in a YAML file. ValueError names the file and the line."""
    try:
        return yaml.load(_text(file), _StrictLoader)
    except _RepeatedKeyError as error:
        raise ValueError(f"{file}:{error.line}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date that is none, or bytes that are no UTF-8.
        raise ValueError(f"{file} is not valid YAML: {error}") from error


def read_json(file: Path) -> Any:
    """What is in a JSON file. ValueError names the file."""
    try:
        return json.loads(_text(file), object_pairs_hook=_without_repeats)
    except _RepeatedKeyError as error:
        raise ValueError(f"{file}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


class _RepeatedKeyError(ValueError):
    def __init__(self, key: Any, line: int = 0):
        super().__init__(f"the key {key!r} is there twice; keep one of them")
        self.line = line


class _StrictLoader(yaml.SafeLoader):
    """Plain values only, and no key twice. Keys that come with a merge (<<) may be set anew, as YAML means it."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Here, for later on merged keys are keys like all others.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                raise _RepeatedKeyError(key.value, key.start_mark.line + 1)
            seen.add((key.tag, key.value))
        return node


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return values
