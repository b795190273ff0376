"""MiniMax-M1's format: JSON objects, one a line, between `<tool_calls>` and `</tool_calls>`. M2's is in `tagged`."""

import re
from collections.abc import Sequence

from rollout_sidecar.formats.base import THINK, BaseFormat, Call, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import (
    call_from_object,
    decode_json,
    failed,
    scan,
    skip_space,
    unclosed,
)

_OPEN, _CLOSE = "<tool_calls>", "</tool_calls>"
_OBJECT = '{"name": <tool-name>, "arguments": <args-json-object>}'
_OPENING = re.compile(_OPEN)
_MARKS = re.compile(f"{_CLOSE}|{_OPEN}|{THINK[1]}")


class MiniMaxM1Format(BaseFormat):
    """See the module."""

    name = "minimax_m1"
    markers: tuple[str, ...] = (_OPEN, _CLOSE, *THINK)
    listing: tuple[str, ...] = (_OPEN, '"arguments"')
    form = f"{_OPEN}\n{_OBJECT}\n{_CLOSE}"

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""
        return scan(text, _OPENING, _read, think_open=think_open)

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn, in one block."""
        lines = [
            f'{{"name": {to_json(name)}, "arguments": {to_json(given)}}}' for name, given in calls
        ]
        return "\n".join([_OPEN, *lines, _CLOSE])

    def render_result(self, text: str) -> str:
        """A tool result, as the model's own template writes it."""
        return f"tool result: {text}"


def _read(text: str, start: int) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    position = start + len(_OPEN)
    while True:
        position = skip_space(text, position)
        if text.startswith(_CLOSE, position):
            end = position + len(_CLOSE)
            empty = failed(text[start:end], f"there is no call between {_OPEN} and {_CLOSE}")
            return calls or [empty], end
        mark = _MARKS.match(text, position)
        if mark is not None or _CLOSE.startswith(text[position:]):  # half a closing tag, or none
            error = f"the call has no closing {_CLOSE}"
            return unclosed(calls, text[start:position], error), position
        value, end, error = decode_json(text, position)
        if error:
            mark = _MARKS.search(text, position)
            line = text.find("\n", position)
            end = len(text) if mark is None else mark.start()
            end = line if position < line < end else end
            calls.append(failed(text[position:end], error))
        else:
            calls.append(call_from_object(value, text[position:end], _OBJECT))
        position = end


MINIMAX_M1 = MiniMaxM1Format()
