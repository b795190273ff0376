"""The Hermes format of Qwen and others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or many.

Stricter than a search for `<tool_call>`: thinking text holds no calls, an unclosed `<think>` means the turn has none,
and markers inside JSON strings are text. More forgiving where models slip without being ambiguous: line breaks inside
strings, repeated keys (the last one counts), arguments left out (none), arguments as a JSON string of an object.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_sidecar.formats.base import ParsedCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"
_FORM = '{"name": <function-name>, "arguments": <args-json-object>}'

_OUTSIDE_MARKS = re.compile(f"{_OPEN}|{_THINK}|{_THINK_END}")
_CALL_MARKS = re.compile(f"{_CLOSE}|{_OPEN}|{_THINK_END}")


class HermesFormat:
    """See the module."""

    name = "hermes"
    markers: tuple[str, ...] = (_OPEN, _CLOSE, _THINK, _THINK_END)

    def parse(self, text: str, *, think_open: bool = False) -> list[ParsedCall]:
        """Every attempt at a call after the last `</think>` that is not inside a call."""
        calls: list[ParsedCall] = []
        position, thinking = 0, think_open
        while True:
            if thinking:
                end = text.find(_THINK_END, position)
                if end < 0:
                    return []
                calls, position, thinking = [], end + len(_THINK_END), False
            mark = _OUTSIDE_MARKS.search(text, position)
            if mark is None:
                return calls
            if mark.group() == _THINK:
                thinking, position = True, mark.end()
            elif mark.group() == _THINK_END:  # closes a think that the prompt opened
                calls, position = [], mark.end()
            else:
                call, position = _parse_call(text, mark.start())
                calls.append(call)

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call, written as Qwen's templates write it."""
        name_json = json.dumps(name, ensure_ascii=False)
        arguments_json = json.dumps(arguments, ensure_ascii=False)
        return f'{_OPEN}\n{{"name": {name_json}, "arguments": {arguments_json}}}\n{_CLOSE}'

    def render_result(self, text: str) -> str:
        """A tool result, wrapped as Qwen's templates wrap it."""
        return f"<tool_response>\n{text}\n</tool_response>"

    def system_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The tools and the form of a call, in the layout of Qwen's templates."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to help with the user's request.\n\n"
            f"Function signatures are given within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\n"
            "To call a function, return a json object with its name and arguments within "
            f"{_OPEN}{_CLOSE} XML tags:\n{_OPEN}\n{_FORM}\n{_CLOSE}"
        )


def _parse_call(text: str, start: int) -> tuple[ParsedCall, int]:
    """The call that begins at `start`, and where to read on."""
    body = start + len(_OPEN)
    while body < len(text) and text[body].isspace():
        body += 1
    try:
        value, end = _DECODER.raw_decode(text, body)
        error = ""
    except RecursionError:
        value, end, error = None, body, "invalid JSON: nested too deeply"
    except json.JSONDecodeError as problem:
        value, end = None, body
        error = f"invalid JSON: {problem.msg} at character {problem.pos - body} of the call"
    except ValueError as problem:
        value, end, error = None, body, f"invalid JSON: {problem}"

    closing = _CALL_MARKS.search(text, end)
    if closing is None or closing.group() != _CLOSE:
        stop = len(text) if closing is None else closing.start()
        return ParsedCall("", None, text[start:stop], f"the call has no closing {_CLOSE}"), stop
    raw = text[start : closing.end()]
    if not error and text[end : closing.start()].strip():
        error = f"invalid JSON: text follows the object; one call has the form {_FORM}"
    if error:
        return ParsedCall("", None, raw, error), closing.end()
    return _read_call(value, raw), closing.end()


def _read_call(value: Any, raw: str) -> ParsedCall:
    if not isinstance(value, dict):
        return ParsedCall("", None, raw, f"the call must be a JSON object of the form {_FORM}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ParsedCall("", None, raw, f'the call has no "name"; its form is {_FORM}')
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = ""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ParsedCall(name, None, raw, '"arguments" must be a JSON object')
    try:
        # JSON may escape half of a surrogate pair, which no encoding can carry.
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ParsedCall("", None, raw, "invalid JSON: a \\u escape is half of a surrogate pair")
    return ParsedCall(name, arguments, raw)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON value")


def _integer(text: str) -> int:
    # Records of calls travel as MessagePack, which has 64-bit integers.
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the integer {text[:24]} does not fit 64 bits; write it as a string")
    return int(text)


def _finite(text: str) -> float:
    if float(text) in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:24]} is too large")
    return float(text)


_DECODER = json.JSONDecoder(
    strict=False, parse_int=_integer, parse_float=_finite, parse_constant=_no_constant
)
