"""Python literals as JSON data, and JSON data as Python literals. Nothing is evaluated."""

import ast
import re
import warnings
from typing import Any

from rollout_sidecar.formats.base import to_json
from rollout_sidecar.formats.reading import finite, integer

_STRINGS = (
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''
)
STRING = re.compile(_STRINGS, re.DOTALL)
"""A string literal; line breaks inside are let pass, whatever the quotes."""
_ESCAPED_OR_BREAK = re.compile(r"\\.|[\n\r]", re.DOTALL)
_BREAKS = {"\n": "\\n", "\r": "\\r"}
_JSON_WORDS = {"true": True, "false": False, "null": None}


def read_python(source: str) -> tuple[Any, str]:
    """The literal that is all of `source`, and what is wrong with it.

    Accepts JSON's words for True, False and None, and line breaks in strings. Tuples become lists.
    """
    source = STRING.sub(_without_breaks, source.strip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" is what it looks like
            node = ast.parse(source, mode="eval").body
        return _value(node), ""
    except SyntaxError as problem:
        return None, f"{problem.msg} in {source[:60]!r}"
    except (RecursionError, MemoryError):
        return None, "nested too deeply"
    except ValueError as problem:
        return None, str(problem)


def to_python(value: Any) -> str:
    """A JSON value as a Python literal."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{to_json(key)}: {to_python(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_python, value)) + "]"
    return to_json(value) if isinstance(value, str) else repr(value)


def _without_breaks(match: re.Match[str]) -> str:
    text = match.group()
    if text.startswith(('"""', "'''")):
        return text
    return _ESCAPED_OR_BREAK.sub(lambda found: _BREAKS.get(found.group(), found.group()), text)


def _value(node: ast.expr) -> Any:
    """Raises ValueError, with the reason, for what is no JSON-like literal."""
    match node:
        case ast.Constant(value=bool() | str() | None as value):
            return value
        case ast.Constant(value=int() as value):
            return integer(_digits(value))
        case ast.Constant(value=float() as value):
            return finite(repr(value))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if (
            type(value) is int
        ):
            return integer("-" + _digits(value))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() as value)):
            return finite(repr(-value))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(item) for key, item in zip(keys, values, strict=True)}
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not a literal: write the value itself")


def _digits(value: int) -> str:
    # Python refuses to write integers of thousands of digits.
    return str(value) if value.bit_length() <= 64 else "9" * 21


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of an object must be strings")
