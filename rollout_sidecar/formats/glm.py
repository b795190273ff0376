"""GLM's format since 4.5: `<tool_call>NAME`, then `<arg_key>` and `<arg_value>` in pairs, then `</tool_call>`.

GLM 4.5 and 4.6 put each on a line of its own, 4.7 writes no line breaks; both formats here read either. Texts are
written as they are, everything else as JSON, so the tool's schema says which it is. There are no escapes: a value ends
at its first closing tag.
"""

import re
from collections.abc import Mapping
from typing import Any

from rollout_sidecar.formats.base import THINK, BaseFormat, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import checked, close, failed, scan, skip_space
from rollout_sidecar.formats.schemas import parameters_of, read_value

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_OPENING = re.compile(_OPEN)
_MARKS = re.compile(f"{_CLOSE}|{_OPEN}|{THINK[1]}")
_NAME = re.compile(r'\s*([^\s<>{}"]+)\s*(?=<|$)')
_PAIR = re.compile(rf"{_KEY}([^<]*){_KEY_END}\s*{_VALUE}(.*?){_VALUE_END}", re.DOTALL)


class GlmFormat(BaseFormat):
    """See the module."""

    markers: tuple[str, ...] = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END, *THINK)
    listing: tuple[str, ...] = (_OPEN, _KEY, _VALUE)
    stop_texts: tuple[str, ...] = ("<|observation|>", "<|user|>")

    def __init__(self, name: str, *, newline: str):
        """Args:
        newline: what is written between the parts.
        """
        self.name = name
        self._newline = newline
        pair = f"{_KEY}argument-name{_KEY_END}{newline}{_VALUE}value{_VALUE_END}{newline}"
        self.form = f"{_OPEN}tool-name{newline}{pair}{_CLOSE}"

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""

        def read(text: str, start: int) -> tuple[list[ParsedCall], int]:
            call, position = self._read(text, start, tools)
            return [call], position

        return scan(text, _OPENING, read, think_open=think_open)

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call, written as GLM's templates write it."""
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"the {self.name} format cannot write the name {name!r} (rename the tool)"
            )
        parts = [_OPEN + name]
        for key, value in arguments.items():
            written = value if isinstance(value, str) else to_json(value)
            if "<" in key or key != key.strip() or not key:
                raise ValueError(
                    f"the {self.name} format cannot write the argument name {key!r} (rename it)"
                )
            if _VALUE_END in written:
                raise ValueError(
                    f"the {self.name} format cannot write the argument {key!r} of {name!r}: its text holds "
                    f"{_VALUE_END}, which would end it (reword the text)"
                )
            parts += [_KEY + key + _KEY_END, _VALUE + written + _VALUE_END]
        return self._newline.join([*parts, _CLOSE])

    def _read(self, text: str, start: int, tools: Tools | None) -> tuple[ParsedCall, int]:
        head = _NAME.match(text, start + len(_OPEN))
        name, position = (head[1], head.end()) if head else ("", start + len(_OPEN))
        parameters = parameters_of(tools, name)
        arguments: dict[str, Any] = {}
        error = (
            "" if name else f"the call does not begin with a function name; the form is {self.form}"
        )
        while not error:
            position = skip_space(text, position)
            pair = _PAIR.match(text, position)
            if pair is None:
                break
            key = pair[1].strip()
            arguments[key], error = read_value(pair[2], parameters, key)
            position = pair.end()
        raw, rest, after, unclosed = close(text, start, position, _CLOSE, _MARKS)
        if rest and not error:
            error = f"no argument begins at {rest[:20]!r}; the form is {self.form}"
        if unclosed or error:
            return failed(raw, unclosed or error, name), after
        return checked(name, arguments, raw), after


GLM_45 = GlmFormat("glm45", newline="\n")
GLM_47 = GlmFormat("glm47", newline="")
