"""What a tool-call format does: finds the calls in a turn's text, and writes calls, results and tool lists as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Call = tuple[str, Mapping[str, Any]]
"""A tool's name and its arguments."""
Tools = Sequence[Mapping[str, Any]]
"""OpenAI function schemas."""

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class ParsedCall:
    """One attempt of the policy to call a tool, whether or not it can be executed."""

    name: str
    """"" when the call could not be parsed that far."""
    arguments: dict[str, Any] | None
    """None when error is set."""
    raw: str
    """The call as the policy wrote it, markers included."""
    error: str = ""
    """Why it could not be parsed, as a sentence for the policy; "" if it could."""
    call_id: str = ""
    """The id that the policy gave the call, in formats where it does (Kimi, Mistral); "" elsewhere."""


class ToolFormat(Protocol):
    """How the policy writes tool calls. `BaseFormat` has what most formats share."""

    name: str
    markers: tuple[str, ...]
    """Texts that parsing looks for. They stay in a turn's text even where they are special tokens."""
    think: tuple[str, str]
    """What opens and closes thinking text."""
    listing: tuple[str, ...]
    """A chat template that lists tools for this format writes all of these texts."""
    stop_texts: tuple[str, ...]
    """Tokens after which the policy waits for a tool's result, or gives its turn up, beside the template's own end of
    turn. Those that are tokens of the vocabulary belong to the stop ids."""
    form: str
    """What a call looks like: for system messages and for the sentences of parse errors."""

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every syntactic attempt at a call, in order. Calls in thinking text do not count. Never raises.

        Args:
            text: the turn as the policy wrote it, its special tokens removed except `markers`.
            think_open: the generation prompt already opened the thinking (`Conversation.think_open`).
            tools: what may be called. Formats that write values without their type read them by these schemas.
        """
        ...

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the policy should write it. Raises ValueError if the format has no way to write it."""
        ...

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn, as the policy should write them."""
        ...

    def render_turn(self, content: str, calls: Sequence[Call]) -> str:
        """An assistant's turn as the policy should write it: text, then calls."""
        ...

    def render_result(self, text: str) -> str:
        """A tool result inside a user message, for templates that have no tool role."""
        ...

    def system_text(self, tools: Tools) -> str:
        """What the system message says about tools, for templates that do not list them."""
        ...


class BaseFormat:
    """A format whose calls stand one after another, each on its own line after the turn's text.

    A subclass writes `render_call` or, if the calls of a turn belong together, `render_calls`.
    """

    name: str
    markers: tuple[str, ...]
    think: tuple[str, str] = THINK
    listing: tuple[str, ...]
    stop_texts: tuple[str, ...] = ()
    form: str

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the policy should write it. Raises ValueError if the format has no way to write it."""
        return self.render_calls([(name, arguments)])

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn."""
        return "\n".join(self.render_call(name, arguments) for name, arguments in calls)

    def render_turn(self, content: str, calls: Sequence[Call]) -> str:
        """Text, then calls."""
        return "\n".join(filter(None, [content, self.render_calls(calls) if calls else ""]))

    def render_result(self, text: str) -> str:
        """A tool result inside a user message."""
        return f"<tool_response>\n{text}\n</tool_response>"

    def system_text(self, tools: Tools) -> str:
        """The tools as JSON schemas, one a line, and the form of a call."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nThese tools are available, each described by a JSON schema:\n"
            f"<tools>\n{listed}\n</tools>\n\nTo use one, write a call in exactly this form:\n{self.form}"
        )


def to_json(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
