"""The formats of FunctionGemma and Gemma 4: `call:NAME{key:value,...}` between special tokens.

    <start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}<end_function_call>
    <|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>

Texts stand between two quoting tokens and have no escapes; keys are bare or quoted the same way; the rest looks like
JSON. JSON's own quoted texts are read too. Gemma 3's format is in `pythonic`.
"""

import re
from collections.abc import Mapping
from typing import Any

from rollout_sidecar.formats.base import THINK, BaseFormat, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import (
    checked,
    close,
    decode_json,
    failed,
    finite,
    integer,
    scan,
    skip_space,
)

_NAME = re.compile(r"[^\s{}<>|:,\"]+")
_HEAD = re.compile(rf"\s*call\s*:\s*({_NAME.pattern})\s*(?=\{{)")
_BARE_KEY = re.compile(r"[^\s{}\[\],:<>\"']+")
_SCALAR = re.compile(r"[^\s{}\[\],:<>\"']+")
_NUMBER = re.compile(r"-?\d+")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_MAX_DEPTH = 100


class _BadValueError(ValueError):
    """A value that cannot be read, with the reason."""


class GemmaFormat(BaseFormat):
    """See the module."""

    def __init__(
        self,
        name: str,
        *,
        call: tuple[str, str],
        quote: str,
        result: tuple[str, str],
        listing: str,
        think: tuple[str, str] = THINK,
    ):
        """Args:
        call: what stands before and after a call.
        quote: what stands before and after a text.
        result: what stands before and after a tool's result.
        """
        self.name = name
        self.listing: tuple[str, ...] = (listing,)
        self.markers: tuple[str, ...] = (*call, quote, *think)
        # The model hands over to the tool by beginning its result.
        self.stop_texts: tuple[str, ...] = (result[0],)
        self.form = f"{call[0]}call:tool_name{{argument:{quote}text{quote},other:3}}{call[1]}"
        self._call, self._quote, self._result, self.think = call, quote, result, think
        self._opening = re.compile(re.escape(call[0]))
        self._marks = re.compile("|".join(map(re.escape, (*call, think[1]))))

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""
        return scan(text, self._opening, self._read, think_open=think_open, think=self.think)

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the models' templates write it."""
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"the {self.name} format cannot write the name {name!r} (rename the tool)"
            )
        return f"{self._call[0]}call:{name}{self._write(dict(arguments))}{self._call[1]}"

    def render_result(self, text: str) -> str:
        """A tool result between the tokens for one."""
        return f"{self._result[0]}{text}{self._result[1]}"

    def _read(self, text: str, start: int) -> tuple[list[ParsedCall], int]:
        head = _HEAD.match(text, start + len(self._call[0]))
        position = head.end() if head else start + len(self._call[0])
        name = head[1] if head else ""
        value, error = {}, "" if head else f"no call:name{{ follows; the form is {self.form}"
        if head:
            try:
                value, position = self._value(text, position)
            except _BadValueError as problem:
                error = str(problem)
        raw, rest, after, unclosed = close(text, start, position, self._call[1], self._marks)
        if rest and not error:
            error = f"text follows the arguments: {rest[:20]!r}; the form is {self.form}"
        if unclosed or error:
            return [failed(raw, unclosed or error, name)], after
        return [checked(name, value, raw)], after

    # --- values ---

    def _value(self, text: str, position: int, depth: int = 0) -> tuple[Any, int]:
        position = skip_space(text, position)
        if depth > _MAX_DEPTH:
            raise _BadValueError("the arguments are nested too deeply")
        if text.startswith(self._quote, position):
            return self._text(text, position)
        if text.startswith("{", position):
            return self._items(text, position, "}", depth)
        if text.startswith("[", position):
            return self._items(text, position, "]", depth)
        if text.startswith('"', position):
            value, end, error = decode_json(text, position)
            if error:
                raise _BadValueError(error)
            return value, end
        scalar = _SCALAR.match(text, position)
        if scalar is None:
            raise _BadValueError(f"no value begins at {text[position : position + 20]!r}")
        return _scalar(scalar.group(), self._quote), scalar.end()

    def _text(self, text: str, position: int) -> tuple[str, int]:
        begin = position + len(self._quote)
        end = text.find(self._quote, begin)
        if end < 0:
            raise _BadValueError(f"a text has no closing {self._quote}")
        return text[begin:end], end + len(self._quote)

    def _items(self, text: str, position: int, closing: str, depth: int) -> tuple[Any, int]:
        """The object or list that begins at `position`."""
        listed: list[Any] = []
        named: dict[str, Any] = {}
        position = skip_space(text, position + 1)
        while not text.startswith(closing, position):
            if closing == "}":
                key, position = self._key(text, position)
                named[key], position = self._value(text, position, depth + 1)
            else:
                item, position = self._value(text, position, depth + 1)
                listed.append(item)
            position = skip_space(text, position)
            if text.startswith(",", position):
                position = skip_space(text, position + 1)
            elif not text.startswith(closing, position):
                near = text[position : position + 20]
                raise _BadValueError(f"expected , or {closing} at {near!r}")
        return (named if closing == "}" else listed), position + 1

    def _key(self, text: str, position: int) -> tuple[str, int]:
        if text.startswith(self._quote, position):
            key, end = self._text(text, position)
        elif text.startswith('"', position):
            key, end, error = decode_json(text, position)
            if error:
                raise _BadValueError(error)
        else:
            bare = _BARE_KEY.match(text, position)
            if bare is None:
                raise _BadValueError(
                    f"no argument name begins at {text[position : position + 20]!r}"
                )
            key, end = bare.group(), bare.end()
        end = skip_space(text, end)
        if not text.startswith(":", end):
            raise _BadValueError(f"no : follows the argument name {key[:40]!r}")
        return key, end + 1

    def _write(self, value: Any) -> str:
        if isinstance(value, str):
            if self._quote in value:
                raise ValueError(
                    f"the {self.name} format cannot write a text that holds {self._quote}, which would end it "
                    "(reword the text)"
                )
            return self._quote + value + self._quote
        if isinstance(value, Mapping):
            written = [f"{self._write_key(key)}:{self._write(item)}" for key, item in value.items()]
            return "{" + ",".join(written) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._write, value)) + "]"
        return to_json(value)

    def _write_key(self, key: str) -> str:
        return key if _BARE_KEY.fullmatch(key) else self._write(key)


def _scalar(text: str, quote: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return integer(text) if _NUMBER.fullmatch(text) else finite(text)
    except ValueError as problem:
        if _NUMBER.fullmatch(text) or "too large" in str(problem):
            raise _BadValueError(str(problem)) from problem
        raise _BadValueError(
            f"{text[:40]!r} is no value: write a text as {quote}text{quote}"
        ) from problem


FUNCTION_GEMMA = GemmaFormat(
    "functiongemma",
    call=("<start_function_call>", "<end_function_call>"),
    quote="<escape>",
    result=("<start_function_response>", "<end_function_response>"),
    listing="<start_function_declaration>",
)
GEMMA_4 = GemmaFormat(
    "gemma4",
    call=("<|tool_call>", "<tool_call|>"),
    quote='<|"|>',
    result=("<|tool_response>", "<tool_response|>"),
    listing="<|tool>declaration:",
    think=("<|channel>", "<channel|>"),
)
