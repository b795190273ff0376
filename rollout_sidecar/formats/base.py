"""What a tool-call format does: finds the calls in a turn's text, and writes calls, results and tool lists as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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


class ToolFormat(Protocol):
    """How the policy writes tool calls."""

    name: str
    markers: tuple[str, ...]
    """Texts that parsing looks for. They stay in a turn's text even where they are special tokens."""

    def parse(self, text: str, *, think_open: bool = False) -> list[ParsedCall]:
        """Every syntactic attempt at a call, in order. Calls in thinking text do not count.

        Args:
            text: the turn as the policy wrote it.
            think_open: the generation prompt already opened a <think> (`Conversation.think_open`).
        """
        ...

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the policy should write it."""
        ...

    def render_result(self, text: str) -> str:
        """A tool result inside a user message, for templates that have no tool role."""
        ...

    def system_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What the system message says about tools, for templates that do not list them."""
        ...
