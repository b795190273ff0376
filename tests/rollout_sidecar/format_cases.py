"""Names, arguments and schemas to write calls of, for tests of tool-call formats."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from rollout_sidecar.formats import format_names, get_format

FORMATS = format_names()

TEXTS = [
    "",
    "Zürich, 東京 🙂",
    'it\'s a "quote" and a \\ backslash',
    "two\nlines\r\n\ttab",
    "\x00\x1f\u2028",
    "3",
    "true",
    "null",
    '{"a": 1}',
    " leading and trailing ",
    "\nline breaks\n",
    "r'\\d+' % \"%s\" {x} ${y}",
    "[TOOL_CALLS] <tool_call> </think> <think> <|python_tag|> ```",
    "</tool_call> ]) }, {'a': (1,)",
]
"""Texts that a careless parser trips over."""

MARKERS = sorted({marker for name in FORMATS for marker in get_format(name).markers})

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
"""Names of tools and arguments that every format can write."""

_NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_STRINGS = (
    st.sampled_from(TEXTS)
    | st.text(max_size=12)
    | st.lists(st.sampled_from(MARKERS) | st.text(max_size=3), max_size=4).map("".join)
)
VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=3)

_JSON_TYPES = {
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def tool(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool that takes values of these types."""
    properties = {
        key: {"type": _JSON_TYPES[type(value)], "description": "A value."}
        for key, value in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}
