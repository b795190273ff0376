"""Formats that write calls as JSON between special tokens: DeepSeek V3 and V3.1, Kimi K2.

    <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich"}<｜tool▁call▁end｜>

DeepSeek V3 and R1 write `function<｜tool▁sep｜>NAME`, a line break, and the JSON in a fenced block; V3.1 writes the
name and bare JSON. Either format here reads both. Kimi writes an id of the form `functions.NAME:INDEX`, which is kept
as the call's id: its results go by it. All calls of a turn stand in one section.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from rollout_sidecar.formats.base import THINK, BaseFormat, Call, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import call_with, close, decode_json, failed, scan, skip_space


class _Tokens(NamedTuple):
    section: str
    section_end: str
    call: str
    separator: str
    call_end: str


_DEEPSEEK = _Tokens(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_KIMI = _Tokens(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_FENCED = re.compile(r"([^\n{]*)\n\s*```(?:json)?\s*")
_FENCE = re.compile(r"\s*```")
_KIMI_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


class _Head(NamedTuple):
    name: str
    call_id: str
    body: int
    """Where the arguments begin."""
    fenced: bool = False


class _SectionFormat(BaseFormat):
    """What the formats share."""

    tokens: _Tokens

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""
        tokens = self.tokens
        opening = re.compile(f"{re.escape(tokens.section)}|{re.escape(tokens.call)}")
        return scan(text, opening, self._read, think_open=think_open)

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn, in one section."""
        written = [
            self._render(name, to_json(arguments), i) for i, (name, arguments) in enumerate(calls)
        ]
        return self.tokens.section + self._between.join(written) + self.tokens.section_end

    def render_turn(self, content: str, calls: Sequence[Call]) -> str:
        """Text, then calls, with nothing between."""
        return content + (self.render_calls(calls) if calls else "")

    _between = ""

    def _render(self, name: str, arguments: str, index: int) -> str:
        raise NotImplementedError

    def _head(self, text: str, head: str, body: int) -> _Head:
        raise NotImplementedError

    def _read(self, text: str, start: int) -> tuple[list[ParsedCall], int]:
        tokens = self.tokens
        if text.startswith(tokens.call, start):
            call, position = self._read_call(text, start)
            return [call], position
        calls: list[ParsedCall] = []
        position = start + len(tokens.section)
        while text.startswith(tokens.call, skip_space(text, position)):
            call, position = self._read_call(text, skip_space(text, position))
            calls.append(call)
        if not calls:
            error = f"no {tokens.call} follows {tokens.section}; the form is {self.form}"
            calls = [failed(text[start:position], error)]
        # Templates of DeepSeek V3 themselves leave the end of the section out after a single call.
        end = skip_space(text, position)
        ended = text.startswith(tokens.section_end, end)
        return calls, end + len(tokens.section_end) if ended else position

    def _read_call(self, text: str, start: int) -> tuple[ParsedCall, int]:
        tokens = self.tokens
        marks = re.compile("|".join(map(re.escape, (*tokens, THINK[1]))))
        head_start = start + len(tokens.call)
        mark = marks.search(text, head_start)
        if mark is None or mark.group() != tokens.separator:
            raw, _, position, unclosed = close(text, start, head_start, tokens.call_end, marks)
            error = f"the call has no {tokens.separator}; the form is {self.form}"
            return failed(raw, unclosed or error), position
        head = self._head(text, text[head_start : mark.start()].strip(), mark.end())
        value, end, error = decode_json(text, head.body)
        if head.fenced and not error:
            fence = _FENCE.match(text, end)
            end = fence.end() if fence else end
        raw, rest, position, unclosed = close(text, start, end, tokens.call_end, marks)
        if not error and rest:
            error = f"invalid JSON: text follows the arguments; the form is {self.form}"
        if not error and not head.name:
            error = f"the call has no function name; the form is {self.form}"
        if unclosed or error:
            return failed(raw, unclosed or error, head.name), position
        return call_with(head.name, value, raw, head.call_id), position


class DeepSeekFormat(_SectionFormat):
    """See the module. Writes as V3.1 does, or as V3 and R1 do."""

    tokens = _DEEPSEEK
    listing: tuple[str, ...] = (_DEEPSEEK.section,)
    markers: tuple[str, ...] = (*_DEEPSEEK, *THINK)

    def __init__(self, name: str, *, fenced: bool):
        """Args:
        fenced: write the arguments in a fenced block, as V3 and R1 do.
        """
        self.name = name
        self._fenced = fenced
        self._between = "\n" if fenced else ""
        example = self._render("tool-name", "arguments-as-json", 0)
        self.form = _DEEPSEEK.section + example + _DEEPSEEK.section_end

    def render_result(self, text: str) -> str:
        """A tool result, between the tokens that the models' templates write around it."""
        return f"<｜tool▁output▁begin｜>{text}<｜tool▁output▁end｜>"

    def _render(self, name: str, arguments: str, index: int) -> str:
        if self._fenced:
            body = f"function{_DEEPSEEK.separator}{name}\n```json\n{arguments}\n```"
        else:
            body = f"{name}{_DEEPSEEK.separator}{arguments}"
        return f"{_DEEPSEEK.call}{body}{_DEEPSEEK.call_end}"

    def _head(self, text: str, head: str, body: int) -> _Head:
        fenced = _FENCED.match(text, body)
        if fenced is None:
            return _Head(head, "", body)
        return _Head(fenced[1].strip(), "", fenced.end(), fenced=True)


class KimiFormat(_SectionFormat):
    """See the module."""

    name = "kimi_k2"
    tokens = _KIMI
    listing: tuple[str, ...] = ("<|im_system|>tool_declare<|im_middle|>",)
    markers: tuple[str, ...] = (*_KIMI, *THINK)
    form = (
        f"{_KIMI.section}{_KIMI.call}functions.tool-name:0{_KIMI.separator}arguments-as-json"
        f"{_KIMI.call_end}{_KIMI.section_end}"
    )

    def _render(self, name: str, arguments: str, index: int) -> str:
        return f"{_KIMI.call}functions.{name}:{index}{_KIMI.separator}{arguments}{_KIMI.call_end}"

    def _head(self, text: str, head: str, body: int) -> _Head:
        found = _KIMI_ID.fullmatch(head)
        return _Head(found[1] if found else head, head, body)


DEEPSEEK_V3 = DeepSeekFormat("deepseek_v3", fenced=True)
DEEPSEEK_V31 = DeepSeekFormat("deepseek_v31", fenced=False)
KIMI_K2 = KimiFormat()
