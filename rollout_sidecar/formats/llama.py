"""Llama 3's JSON format: `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`.

Without the tag, an object counts as a call only where it begins a line and has a name and parameters (or the name of a
known tool): an answer in JSON is no call. Several calls follow one another, with or without `;` or `,` between. After
the tag, Llama 3.1 also writes calls of built-in tools as `name.call(query="...")`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_sidecar.formats.base import THINK, BaseFormat, Call, ParsedCall, Tools, to_json
from rollout_sidecar.formats.pythonic import read_python_call
from rollout_sidecar.formats.reading import (
    LINE_START,
    call_from_object,
    decode_json,
    failed,
    scan,
    skip_space,
)

_TAG, _START, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_TAGS = f"{re.escape(_TAG)}|{re.escape(_START)}"
_KEYS = ("parameters", "arguments")
_OPENING = re.compile(rf"{_TAGS}|{LINE_START}\{{", re.MULTILINE)
_TAGGED = re.compile(_TAGS)
_LOOKS_LIKE_A_CALL = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_BUILT_IN = re.compile(r"[\w.]+\.call\(")
_BETWEEN = re.compile(r"\s*[;,]\s*(?=\{)|[ \t]*(?=\{)")


class LlamaJsonFormat(BaseFormat):
    """See the module."""

    name = "llama3_json"
    markers: tuple[str, ...] = (_TAG, _START, _END, *THINK)
    listing: tuple[str, ...] = ('{"name": function name, "parameters":',)
    stop_texts: tuple[str, ...] = ("<|eom_id|>", "<|eom|>")
    form = '{"name": tool name, "parameters": object of argument names and values}'

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""
        known = {(tool.get("function") or tool).get("name") for tool in tools or ()}

        def read(text: str, start: int) -> tuple[list[ParsedCall], int]:
            return _read(text, start, known)

        return scan(text, _OPENING, read, think_open=think_open)

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn, one a line."""
        return "\n".join(
            f'{{"name": {to_json(name)}, "parameters": {to_json(arguments)}}}'
            for name, arguments in calls
        )


def _read(text: str, start: int, known: set[Any]) -> tuple[list[ParsedCall], int]:
    tagged = _TAGGED.match(text, start)
    position = skip_space(text, tagged.end() if tagged else start)
    calls: list[ParsedCall] = []
    if tagged and _BUILT_IN.match(text, position):
        call, end = read_python_call(text, position, _OPENING)
        return [replace(call, name=call.name.removesuffix(".call"))], end
    begin = start if tagged else position
    while text.startswith("{", position):
        value, end, error = decode_json(text, position)
        if error:
            if tagged or calls or _LOOKS_LIKE_A_CALL.match(text, position):
                stop = _stop(text, position)
                return [*calls, failed(text[begin:stop], error)], stop
            return [], position + 1
        if not (tagged or calls or _is_call(value, known)):
            return [], end
        calls.append(call_from_object(value, text[begin:end], LlamaJsonFormat.form, _KEYS))
        between = _BETWEEN.match(text, end)
        position = end
        if between is not None:
            begin = position = between.end()
    if not calls:
        stop = _stop(text, position)
        error = (
            f"no call follows {text[start:position].strip()}; the form is {LlamaJsonFormat.form}"
        )
        return [failed(text[start:stop], error)], stop
    return calls, position


def _is_call(value: Any, known: set[Any]) -> bool:
    if not isinstance(value, Mapping) or "name" not in value:
        return False
    return any(key in value for key in _KEYS) or value["name"] in known


def _stop(text: str, position: int) -> int:
    """Where a call that cannot be read ends: before the next one, or with the text."""
    following = _OPENING.search(text, position + 1)
    return len(text) if following is None else following.start()


LLAMA_3_JSON = LlamaJsonFormat()
