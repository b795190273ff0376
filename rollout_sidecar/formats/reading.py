"""What parsers of calls share: text outside thinking, JSON within the limits of the wire, and where a bad call ends.

The rules are the same in every format. Thinking holds no calls, and a thinking that is not closed means that the turn
has none. What a call's own strings hold is text, whatever it looks like. A call that cannot be read is reported with
its reason, and does not hide the next one.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollout_sidecar.formats.base import THINK, ParsedCall

Read = Callable[[str, int], tuple[list[ParsedCall], int]]
"""Reads what begins at a position: the calls there, and where to read on."""

LINE_START = rf"(?:^|(?<={re.escape(THINK[1])}))[ \t]*"
"""For formats whose calls have no marker (with re.MULTILINE): where a line or the text after thinking begins."""


def scan(
    text: str,
    opening: re.Pattern[str],
    read: Read,
    *,
    think_open: bool,
    think: tuple[str, str] = THINK,
) -> list[ParsedCall]:
    """The calls that `read` finds where `opening` matches, after the last thinking that is not inside a call."""
    think_start, think_end = think
    marks = re.compile(
        f"{re.escape(think_start)}|{re.escape(think_end)}|(?:{opening.pattern})", opening.flags
    )
    calls: list[ParsedCall] = []
    position, thinking = 0, think_open
    while True:
        if thinking:
            end = text.find(think_end, position)
            if end < 0:
                return []
            calls, position, thinking = [], end + len(think_end), False
        mark = marks.search(text, position)
        if mark is None:
            return calls
        if mark.group() == think_start:
            thinking, position = True, mark.end()
        elif mark.group() == think_end:  # closes a think that the prompt opened
            calls, position = [], mark.end()
        else:
            found, position = read(text, mark.start())
            calls += _with_surroundings(found, text[mark.start() : position])


def _with_surroundings(calls: list[ParsedCall], block: str) -> list[ParsedCall]:
    """The calls of a block, with what stands around them: together their raw texts are the block."""
    starts: list[int] = []
    position = 0
    for call in calls:
        starts.append(max(position, block.find(call.raw, position)))
        position = starts[-1] + len(call.raw)
    ends = [*starts[1:], len(block)]
    starts[:1] = [0]
    return [
        replace(call, raw=block[start:end].strip())
        for call, start, end in zip(calls, starts, ends, strict=False)
    ]


def skip_space(text: str, position: int) -> int:
    """The first position from `position` on that holds no white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def decode_json(text: str, start: int) -> tuple[Any, int, str]:
    """The JSON value at `start`, where it ends, and what is wrong with it. With an error the end is `start`.

    Accepts line breaks inside strings and repeated keys (the last one counts). Refuses what cannot travel: NaN,
    infinities, integers beyond 64 bits.
    """
    start = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        return None, start, "invalid JSON: nested too deeply"
    except json.JSONDecodeError as problem:
        at = problem.pos - start
        return None, start, f"invalid JSON: {problem.msg} at character {at} of the call"
    except ValueError as problem:
        return None, start, f"invalid JSON: {problem}"
    return value, end, ""


def close(
    text: str, start: int, end: int, closing: str, marks: re.Pattern[str]
) -> tuple[str, str, int, str]:
    """Ends the call that begins at `start` and whose content ends at `end`, at the next of `marks`.

    Returns:
        the call's text; what stands between the content and `closing`; where to read on; "" or that `closing` is
        missing.
    """
    mark = marks.search(text, end)
    if mark is None or mark.group() != closing:
        stop = len(text) if mark is None else mark.start()
        return text[start:stop], "", stop, f"the call has no closing {closing}"
    return text[start : mark.end()], text[end : mark.start()].strip(), mark.end(), ""


def failed(raw: str, error: str, name: str = "") -> ParsedCall:
    """A call that cannot be executed."""
    return ParsedCall(name, None, raw, error)


def unclosed(calls: list[ParsedCall], raw: str, error: str) -> list[ParsedCall]:
    """The calls of a block that does not end: its last call fails, or `raw` does if there is none."""
    if not calls:
        return [failed(raw, error)]
    last = calls[-1]
    return [*calls[:-1], last if last.error else failed(last.raw, error, last.name)]


def checked(name: str, arguments: dict[str, Any], raw: str, call_id: str = "") -> ParsedCall:
    """A call that can be executed, unless its texts cannot be encoded."""
    try:
        # JSON may escape half of a surrogate pair, which no encoding can carry.
        json.dumps([name, arguments, call_id], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return failed(raw, "invalid JSON: a \\u escape is half of a surrogate pair")
    except RecursionError:
        return failed(raw, "the arguments are nested too deeply", name)
    return ParsedCall(name, arguments, raw, call_id=call_id)


def call_with(name: str, arguments: Any, raw: str, call_id: str = "", key: str = "") -> ParsedCall:
    """A call with arguments as decoded from JSON. None is no arguments; a text is JSON once more."""
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = ""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        what = f'"{key}"' if key else "the arguments"
        return failed(raw, f"{what} must be a JSON object", name)
    return checked(name, arguments, raw, call_id)


def call_from_object(
    value: Any, raw: str, form: str, keys: tuple[str, ...] = ("arguments",)
) -> ParsedCall:
    """A call from a JSON object with "name" and one of `keys`."""
    if not isinstance(value, dict):
        return failed(raw, f"the call must be a JSON object of the form {form}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return failed(raw, f'the call has no "name"; its form is {form}')
    key = next((key for key in keys if key in value), keys[0])
    call_id = value.get("id")
    return call_with(
        name, value.get(key), raw, call_id if isinstance(call_id, str) else "", key=key
    )


def integer(text: str) -> int:
    """An integer that fits 64 bits: records of calls travel as MessagePack. Raises ValueError for others."""
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the integer {text[:24]} does not fit 64 bits; write it as a string")
    return int(text)


def finite(text: str) -> float:
    """A finite number. Raises ValueError for others."""
    if float(text) in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:24]} is too large")
    return float(text)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON value")


_DECODER = json.JSONDecoder(
    strict=False, parse_int=integer, parse_float=finite, parse_constant=_no_constant
)
