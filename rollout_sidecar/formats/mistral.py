"""Mistral's format, old and new: `[TOOL_CALLS]` and a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` once a call.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": "abcdefgh1"}]
    [TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{"city": "Zürich"}

Either format here reads both. `[ARGS]` and `[CALL_ID]` may be missing, as in models between the two.
"""

import re
from collections.abc import Sequence

from rollout_sidecar.formats.base import BaseFormat, Call, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import (
    call_from_object,
    call_with,
    decode_json,
    failed,
    scan,
    skip_space,
    unclosed,
)

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_THINK = ("[THINK]", "[/THINK]")
_OBJECT = '{"name": "tool-name", "arguments": arguments-as-json}'
_OPENING = re.compile(re.escape(_CALLS))
_NEXT = re.compile(f"{re.escape(_CALLS)}|{re.escape(_THINK[1])}")
_HEAD = re.compile(
    r"""([^\s\[\]{}"']+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]*)\s*)?(?:\[ARGS\]|(?=\{))"""
)


class MistralFormat(BaseFormat):
    """See the module. Writes a list, or a name and arguments."""

    think: tuple[str, str] = _THINK
    markers: tuple[str, ...] = (_CALLS, _ARGS, _ID, *_THINK)

    def __init__(self, name: str, *, as_list: bool):
        """Args:
        as_list: write the old form.
        """
        self.name = name
        self._as_list = as_list
        self.form = (
            f"{_CALLS}[{_OBJECT}]" if as_list else f"{_CALLS}tool-name{_ARGS}arguments-as-json"
        )
        self.listing: tuple[str, ...] = ("[AVAILABLE_TOOLS]",)

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""
        return scan(text, _OPENING, self._read, think_open=think_open, think=_THINK)

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn."""
        if not self._as_list:
            return "".join(
                f"{_CALLS}{name}{_ARGS}{to_json(arguments)}" for name, arguments in calls
            )
        listed = [
            f'{{"name": {to_json(name)}, "arguments": {to_json(given)}}}' for name, given in calls
        ]
        return f"{_CALLS}[{', '.join(listed)}]"

    def render_turn(self, content: str, calls: Sequence[Call]) -> str:
        """Text, then calls, with nothing between."""
        return content + (self.render_calls(calls) if calls else "")

    def _read(self, text: str, start: int) -> tuple[list[ParsedCall], int]:
        position = skip_space(text, start + len(_CALLS))
        if text.startswith("[", position) and not text.startswith(_CALLS, position):
            return self._read_list(text, start, position)
        if text.startswith("{", position):
            value, end, error = decode_json(text, position)
            if error:
                return self._failed(text, start, position, error)
            return [call_from_object(value, text[start:end], _OBJECT)], end
        head = _HEAD.match(text, position)
        if head is None:
            return self._failed(
                text, start, position, f"no call follows {_CALLS}; the form is {self.form}"
            )
        value, end, error = decode_json(text, head.end())
        if error:
            return self._failed(text, start, head.end(), error, head[1])
        return [call_with(head[1], value, text[start:end], head[2] or "")], end

    def _read_list(self, text: str, start: int, position: int) -> tuple[list[ParsedCall], int]:
        """Item by item, so that a bad one does not hide those before it."""
        calls: list[ParsedCall] = []
        begin, position = start, skip_space(text, position + 1)
        if text.startswith("]", position):
            return [
                failed(text[start : position + 1], f"the list after {_CALLS} holds no call")
            ], position + 1
        while True:
            value, end, error = decode_json(text, position)
            if error:
                found, position = self._failed(text, begin, position, error)
                return calls + found, position
            calls.append(call_from_object(value, text[begin:end], _OBJECT))
            end = skip_space(text, end)
            if text.startswith("]", end):
                return calls, end + 1
            if not text.startswith(",", end):
                error = f"the list after {_CALLS} has no closing ]"
                return unclosed(calls, "", error), end
            begin = position = skip_space(text, end + 1)

    def _failed(
        self, text: str, start: int, position: int, error: str, name: str = ""
    ) -> tuple[list[ParsedCall], int]:
        mark = _NEXT.search(text, position)
        stop = len(text) if mark is None else mark.start()
        return [failed(text[start:stop], error, name)], stop


MISTRAL = MistralFormat("mistral", as_list=False)
MISTRAL_V3 = MistralFormat("mistral_v3", as_list=True)
