"""The Hermes format of Qwen and others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or many.

Stricter than a search for `<tool_call>`: thinking text holds no calls, an unclosed `<think>` means the turn has none,
and markers inside JSON strings are text. More forgiving where models slip without being ambiguous: line breaks inside
strings, repeated keys (the last one counts), arguments left out (none), arguments as a JSON string of an object.
"""

import re
from collections.abc import Mapping
from typing import Any

from rollout_sidecar.formats.base import THINK, BaseFormat, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import call_from_object, close, decode_json, failed, scan

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FORM = '{"name": <function-name>, "arguments": <args-json-object>}'

_OPENING = re.compile(_OPEN)
_MARKS = re.compile(f"{_CLOSE}|{_OPEN}|{THINK[1]}")


class HermesFormat(BaseFormat):
    """See the module."""

    name = "hermes"
    markers: tuple[str, ...] = (_OPEN, _CLOSE, *THINK)
    listing: tuple[str, ...] = (_OPEN, '"arguments"')
    form = f"{_OPEN}\n{_FORM}\n{_CLOSE}"

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call after the last `</think>` that is not inside a call."""
        return scan(text, _OPENING, _read, think_open=think_open)

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call, written as Qwen's templates write it."""
        return f'{_OPEN}\n{{"name": {to_json(name)}, "arguments": {to_json(arguments)}}}\n{_CLOSE}'

    def system_text(self, tools: Tools) -> str:
        """The tools and the form of a call, in the layout of Qwen's templates."""
        listed = "\n".join(map(to_json, tools))
        return (
            "# Tools\n\nYou may call one or more functions to help with the user's request.\n\n"
            f"Function signatures are given within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\n"
            "To call a function, return a json object with its name and arguments within "
            f"{_OPEN}{_CLOSE} XML tags:\n{self.form}"
        )


def _read(text: str, start: int) -> tuple[list[ParsedCall], int]:
    value, end, error = decode_json(text, start + len(_OPEN))
    raw, rest, position, unclosed = close(text, start, end, _CLOSE, _MARKS)
    if not error and rest:
        error = f"invalid JSON: text follows the object; one call has the form {_FORM}"
    if unclosed or error:
        return [failed(raw, unclosed or error)], position
    return [call_from_object(value, raw, _FORM)], position
