"""The harmony format of gpt-oss: a turn is a series of messages, and one that has a recipient is a call.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
    <|constrain|>json<|message|>{"city": "Zürich"}<|call|>

(on one line). Read by the format's published grammar, not by the openai-harmony library: that needs token ids and a
vocabulary which it downloads. Tests compare the two where the vocabulary is at hand.

There is no <think>: what the model thinks are messages in the channel "analysis". A message with a recipient is a call
in whatever channel it is, since thoughts have none.
"""

import re
from collections.abc import Sequence
from typing import Any

from rollout_sidecar.formats.base import BaseFormat, Call, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import call_with, decode_json, failed, skip_space

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = re.compile("|".join(map(re.escape, (_END, _CALL, _RETURN, _START))))
_HEADER_ENDS = re.compile("|".join(map(re.escape, (_MESSAGE, _END, _CALL, _RETURN, _START))))
_RECIPIENT = re.compile(r"(?:^|(?<=[\s>]))to=([^\s<]*)")
_NOBODY = frozenset({"all", "assistant", "user"})


class HarmonyFormat(BaseFormat):
    """See the module."""

    name = "harmony"
    markers: tuple[str, ...] = (_CALL, _START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _RETURN)
    think: tuple[str, str] = (f"{_CHANNEL}analysis{_MESSAGE}", _END)
    listing: tuple[str, ...] = ("namespace functions {",)
    stop_texts: tuple[str, ...] = (_CALL, _RETURN)
    form = (
        f"{_CHANNEL}commentary to=functions.tool_name {_CONSTRAIN}json{_MESSAGE}arguments-as-json"
        f"{_CALL}"
    )

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every message to a tool. `think_open` means nothing here."""
        calls: list[ParsedCall] = []
        position = 0
        while position < len(text):
            start = position
            header_end = _HEADER_ENDS.search(text, position)
            if header_end is None or header_end.group() != _MESSAGE:
                stop = len(text) if header_end is None else header_end.end()
                recipient = _recipient(text[start : header_end.start() if header_end else stop])
                if recipient:
                    error = f"the call to {recipient!r} has no {_MESSAGE}; the form is {self.form}"
                    calls.append(failed(text[start:stop], error))
                position = stop
                continue
            body = header_end.end()
            recipient = _recipient(text[start : header_end.start()])
            position = self._read(text, start, body, recipient, calls)
        return calls

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn. The prompt ends in `<|start|>assistant`, so the first has no such header."""
        return f"{_START}assistant".join(
            f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}{to_json(arguments)}{_CALL}"
            for name, arguments in calls
        )

    def render_turn(self, content: str, calls: Sequence[Call]) -> str:
        """Text as a final message; before calls as a preamble. Text in harmony's own form stays as it is."""
        if content and not content.startswith(_CHANNEL):
            channel = "commentary" if calls else "final"
            content = f"{_CHANNEL}{channel}{_MESSAGE}{content}" + (_END if calls else "")
        if content and calls:
            content += f"{_START}assistant"
        return content + (self.render_calls(calls) if calls else "")

    def _read(
        self, text: str, start: int, body: int, recipient: str, calls: list[ParsedCall]
    ) -> int:
        """Reads the message whose content begins at `body`; returns where the next one begins."""
        value: Any = None
        end, error = body, ""
        if recipient:
            value, end, error = decode_json(text, body)
        mark = _ENDS.search(text, end)
        stop = len(text) if mark is None else mark.start() if mark.group() == _START else mark.end()
        if not recipient:
            return stop
        name = recipient.removeprefix("functions.")
        raw = text[start:stop]
        if mark is None or mark.group() == _START:
            error = f"the call has no closing {_CALL}"
        elif not error and skip_space(text, end) < mark.start():
            error = f"invalid JSON: text follows the arguments; the form is {self.form}"
        calls.append(failed(raw, error, name) if error else call_with(name, value, raw))
        return stop


def _recipient(header: str) -> str:
    """Who a message is for; "" if that is nobody in particular."""
    found = _RECIPIENT.search(header)
    return "" if found is None or found[1] in _NOBODY else found[1]


HARMONY = HarmonyFormat()
