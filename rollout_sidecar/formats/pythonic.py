"""Calls as Python writes them: `[f(a=1), g(b="x")]` of Llama 3.2 and 4, and Gemma 3's ```tool_code blocks.

Only literals are read, and nothing is evaluated. Names of tools and arguments may be what Python would not take
(`get-weather(from="here")`): the model has no other way to write them.

A list counts as calls only at the start of a line or after `<|python_start|>`: brackets inside a sentence are text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_sidecar.formats.base import THINK, BaseFormat, Call, ParsedCall, Tools
from rollout_sidecar.formats.literals import STRING, read_python, to_python
from rollout_sidecar.formats.reading import LINE_START, checked, failed, scan, skip_space, unclosed

_START, _END, _TAG = "<|python_start|>", "<|python_end|>", "<|python_tag|>"
_NAME = r"""[^\s()\[\]{},'"=:`*<>|]+"""
_CALL = re.compile(rf"({_NAME})\s*\(")
_LIST = re.compile(
    rf"(?:{re.escape(_START)}\s*|{re.escape(_TAG)}\s*|{LINE_START})\[\s*(?={_NAME}\s*\()",
    re.MULTILINE,
)
_FENCE = re.compile("```")
_BRACKETS = re.compile(r"""[()\[\]{},"']""")
_ARGUMENT = re.compile(rf"\s*({_NAME})\s*=(?!=)(.*)", re.DOTALL)
_UNCLOSED = "the list of calls has no closing ]"
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def read_python_call(text: str, start: int, following: re.Pattern[str]) -> tuple[ParsedCall, int]:
    """The call `name(...)` that begins at `start`, and where it ends; without a bracket that closes it, before the next
    match of `following`. Raises ValueError where no call begins."""
    head = _CALL.match(text, start)
    if head is None:
        raise ValueError(f"no call begins at {text[start : start + 20]!r}")
    name = head[1]
    pieces, end = _split(text, head.end())
    if end is None:
        found = following.search(text, head.end())
        stop = len(text) if found is None else found.start()
        return failed(text[start:stop], "the call has no closing )", name), stop
    raw = text[start:end]
    arguments: dict[str, Any] = {}
    for piece in pieces:
        error = _read_argument(piece, arguments)
        if error:
            return failed(raw, error, name), end
    return checked(name, arguments, raw), end


def write_python_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call with its arguments by name. Raises ValueError for a name that no call can have."""
    if re.fullmatch(_NAME, name) is None:
        raise ValueError(f"a call in Python's form cannot name the tool {name!r} (rename it)")
    named = [
        f"{key}={to_python(value)}" if re.fullmatch(_NAME, key) else "**" + to_python({key: value})
        for key, value in arguments.items()
    ]
    return f"{name}({', '.join(named)})"


def _split(text: str, start: int) -> tuple[list[str], int | None]:
    """What stands between the commas of a call's arguments, and the end of the call; None if it does not end."""
    pieces: list[str] = []
    expected = [")"]
    position = begin = start
    while expected:
        found = _BRACKETS.search(text, position)
        if found is None:
            return pieces, None
        character, position = found.group(), found.end()
        if character in "\"'":
            string = STRING.match(text, found.start())
            if string is None:
                return pieces, None
            position = string.end()
        elif character in _PAIRS:
            expected.append(_PAIRS[character])
        elif character == ",":
            if len(expected) == 1:
                pieces.append(text[begin : found.start()])
                begin = position
        elif character == expected[-1]:
            expected.pop()
        # A bracket of the wrong kind is left for the reading of the value to complain about.
    last = text[begin : position - 1]
    if last.strip():
        pieces.append(last)
    return pieces, position


def _read_argument(piece: str, arguments: dict[str, Any]) -> str:
    """Adds one argument; returns what is wrong with it."""
    stripped = piece.strip()
    if stripped.startswith("**"):
        value, error = read_python(stripped[2:])
        if error or not isinstance(value, dict):
            return f"cannot read {stripped[:60]!r}: {error or 'it is no object'}"
        arguments.update(value)
        return ""
    named = _ARGUMENT.fullmatch(piece)
    if named is None:
        return f"write every argument as name=value, not {stripped[:60]!r}"
    value, error = read_python(named[2])
    if error:
        return f"cannot read the argument {named[1]!r}: {error}"
    if named[1] in arguments:
        return f"the argument {named[1]!r} is given twice"
    arguments[named[1]] = value
    return ""


class PythonicFormat(BaseFormat):
    """A list of calls. See the module."""

    name = "pythonic"
    markers: tuple[str, ...] = (_START, _END, _TAG, *THINK)
    listing: tuple[str, ...] = ("[func_name1(",)
    stop_texts: tuple[str, ...] = ("<|eom_id|>", "<|eom|>")
    form = '[tool_name(argument=value, other="text"), other_tool(...)]'

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""
        return scan(text, _LIST, _read_list, think_open=think_open)

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn, in one list."""
        return f"[{', '.join(write_python_call(name, arguments) for name, arguments in calls)}]"


class ToolCodeFormat(BaseFormat):
    """Gemma 3's fenced blocks of calls, one a line; `print(...)` around a call means the call."""

    name = "gemma3"
    markers: tuple[str, ...] = ("```tool_code", *THINK)
    listing: tuple[str, ...] = ("```tool_code",)
    form = "```tool_code\ntool_name(argument=value)\n```"

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""
        return scan(text, re.compile("```tool_code"), _read_block, think_open=think_open)

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn, in one block."""
        lines = [write_python_call(name, arguments) for name, arguments in calls]
        return "\n".join(["```tool_code", *lines, "```"])

    def render_result(self, text: str) -> str:
        """A tool result, in the block that Google's guide to function calling with Gemma names."""
        return f"```tool_output\n{text}\n```"


def _read_list(text: str, start: int) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    position = text.index("[", start) + 1
    while True:
        position = skip_space(text, position)
        if text.startswith("]", position) and calls:
            return calls, position + 1
        if _CALL.match(text, position) is None:
            if position == len(text):
                return unclosed(calls, "", _UNCLOSED), position
            error = f"no call begins at {text[position : position + 20]!r} in the list of calls"
            line = text.find("\n", position)
            stop = len(text) if line < 0 else line
            return [*calls, failed(text[position:stop], error)], stop
        call, position = read_python_call(text, position, _LIST)
        calls.append(call)
        position = skip_space(text, position)
        if text.startswith(",", position):
            position += 1
        elif not text.startswith("]", position):
            return unclosed(calls, "", _UNCLOSED), position


def _read_block(text: str, start: int) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    position = start + len("```tool_code")
    while True:
        position = skip_space(text, position)
        if text.startswith("```", position):
            end = position + 3
            return calls or [failed(text[start:end], "the block of calls is empty")], end
        if text[position:] in ("", "`", "``"):
            error = "the block of calls has no closing ```"
            return unclosed(calls, text[start:], error), position
        printed = re.compile(r"print\s*\(\s*(?=[^\s()]+\s*\()").match(text, position)
        begin = printed.end() if printed else position
        if _CALL.match(text, begin) is None:
            line = text.find("\n", position)
            end = len(text) if line < 0 else line
            error = f"no call begins at {text[position : position + 20]!r}; the form is {ToolCodeFormat.form}"
            calls.append(failed(text[position:end], error))
            position = end
            continue
        call, position = read_python_call(text, begin, _FENCE)
        calls.append(call)
        position = skip_space(text, position)
        if printed and not call.error:
            if not text.startswith(")", position):
                calls[-1] = failed(call.raw, "print( has no closing )", call.name)
            position += text.startswith(")", position)


PYTHONIC = PythonicFormat()
GEMMA_3 = ToolCodeFormat()
