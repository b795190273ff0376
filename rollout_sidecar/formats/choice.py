"""Which format a chat template asks for: what it writes for a tool call and for a list of tools.

A call that the template writes decides: the format that reads it back, and among several the one that would have
written it most alike. If the template writes no calls, what it says to the policy when it lists tools decides. A
template that knows no tools leaves the choice to us, and the answer is hermes.
"""

from collections.abc import Iterator
from difflib import SequenceMatcher
from os.path import commonprefix
from typing import Any, NamedTuple

from rollout_sidecar.formats.base import ToolFormat
from rollout_sidecar.formats.registry import FORMATS, HERMES, UNMARKED
from rollout_sidecar.tokenizer import ChatTokenizer

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "description": "A number."}},
            "required": ["x"],
        },
    },
}
_USER: dict[str, Any] = {"role": "user", "content": "x"}


class Choice(NamedTuple):
    """A format, and why it was chosen, as a sentence."""

    format: ToolFormat
    reason: str


def choose_format(tokenizer: ChatTokenizer) -> ToolFormat:
    """The format of the tokenizer's chat template."""
    return explain_choice(tokenizer).format


def explain_choice(tokenizer: ChatTokenizer) -> Choice:
    """The format of the tokenizer's chat template, and why."""
    for written in _written_calls(tokenizer):
        readers = [found for found in FORMATS if _reads(tokenizer, found, written)]
        if readers:
            nearest = max(readers, key=lambda found: _likeness(found, written))
            return Choice(nearest, "the chat template writes tool calls in this format")
    listed = _rendered(tokenizer, [_USER], add_generation_prompt=True)
    if "probe_tool" not in listed:
        return Choice(HERMES, "the chat template knows no tools, so the choice is free")
    for found in FORMATS:
        if all(text in listed for text in found.listing):
            return Choice(
                found, "the chat template asks for calls in this format when it lists tools"
            )
    return Choice(
        HERMES,
        "the chat template lists tools, but neither that nor how it writes a call is a format known here; set the "
        "format if the model was trained on one",
    )


def _written_calls(tokenizer: ChatTokenizer) -> Iterator[str]:
    """What the template writes after its generation prompt for a turn that is a call, in the ways that templates
    want to be told about one."""
    before = _rendered(tokenizer, [_USER], add_generation_prompt=False)
    prompt = _rendered(tokenizer, [_USER], add_generation_prompt=True).removeprefix(before)
    for content in ("", None):
        for arguments in ({"x": 1}, '{"x": 1}'):
            function = {"name": "probe_tool", "arguments": arguments}
            call = {"id": "probe0000", "type": "function", "function": function}
            turn = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = _rendered(tokenizer, [_USER, turn], add_generation_prompt=False)
            written = text[len(commonprefix([before, text])) :].removeprefix(prompt)
            if "probe_tool" in written:
                yield written


def _reads(tokenizer: ChatTokenizer, tool_format: ToolFormat, written: str) -> bool:
    # What a conversation would hand to the parser has only the format's own special tokens left.
    text = tokenizer.special_pattern.sub(
        lambda match: match.group() if match.group() in tool_format.markers else "", written
    )
    calls = tool_format.parse(text, tools=[_TOOL])
    if len(calls) != 1 or calls[0].name != "probe_tool" or list(calls[0].arguments or ()) != ["x"]:
        return False
    # Formats without a marker also read calls of others that begin a line.
    return tool_format not in UNMARKED or text.lstrip().startswith(calls[0].raw)


def _likeness(tool_format: ToolFormat, written: str) -> float:
    call = tool_format.render_call("probe_tool", {"x": 1})
    return SequenceMatcher(None, call, written, autojunk=False).ratio()


def _rendered(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], *, add_generation_prompt: bool
) -> str:
    """What the template writes; "" if it refuses."""
    try:
        return tokenizer.render(messages, [_TOOL], add_generation_prompt=add_generation_prompt)
    except ValueError:
        return ""
