"""verl's options as users write them: in YAML files, and as arguments of launch scripts."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w]*(?:\.[\w]+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


def read_yaml_options(content: Any) -> dict[str, Any]:
    """The options of a parsed YAML file by dotted name."""
    return dict(_flat(content, ""))


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        name = f"{prefix}{key}"
        if isinstance(part, dict) and part:
            yield from _flat(part, f"{name}.")
        elif key not in ("defaults", "hydra", "_target_"):
            yield name, _number(part)


def read_script_options(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The `option=value` arguments of a launch script, with the script's own variables filled in.

    Raises:
        ValueError: the script has an open quote.
    """
    text = re.sub(r"\\\r?\n", " ", path.read_text(encoding="utf-8", errors="replace"))
    variables = dict(environment)
    options: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"{path}: {error}: {line.strip()[:60]}") from None
        in_front = True  # assignments come before the command
        for word in (word.rstrip(";") for word in words):
            override, assignment = _OVERRIDE.fullmatch(word), _ASSIGNMENT.fullmatch(word)
            in_front = in_front and (assignment is not None or word == "export")
            if override:
                options[override[1]] = _number(_parsed(_filled(override[2], variables)))
            elif assignment and in_front:
                variables[assignment[1]] = _filled(assignment[2], variables)
    return options


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name) or match[2] or match[0]

    return _VARIABLE.sub(value, text)


def is_unfilled(value: Any) -> bool:
    """There is a variable left in it, or a reference to another option."""
    if isinstance(value, list):
        return any(map(is_unfilled, value))
    return isinstance(value, str) and ("${" in value or bool(_VARIABLE.search(value)))


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _number(value: Any) -> Any:
    """1e-6 is text to YAML 1.1, and a number to verl."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value
