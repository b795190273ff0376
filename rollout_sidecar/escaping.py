"""Keeps the texts of control tokens in messages from becoming control tokens.

Before a template sees messages, every such text in them is replaced by a placeholder; when the rendered text is
encoded, a placeholder becomes the ordinary tokens of the text it stands for. So only the template and the policy can
open or close a turn, whatever tools, users, schemas and arguments hold.

What stays as it is: the format's own markers and thinking tags in what assistants wrote, and, where the tokenizer does
not call them special, in system and user messages too: prompts explain the format ("think inside <think>").
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rollout_sidecar.errors import safe_text
from rollout_sidecar.formats.base import ToolFormat
from rollout_sidecar.protocol import Message
from rollout_sidecar.tokenizer import SENTINEL, ChatTokenizer

# Private-use characters around a number stand for a text that must be encoded as plain text.
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
# In messages these are escaped too, so that nobody can write a placeholder, or what probes of templates look for.
_OURS = re.compile(f"[{_OPEN}{_CLOSE}]|{SENTINEL}")

_TAG = re.compile(r"</?\w+>")


class Escaper:
    """Escapes the parts of one rendering, and encodes its text."""

    def __init__(self, tokenizer: ChatTokenizer, tool_format: ToolFormat):
        self._tokenizer = tokenizer
        self._by_assistants, self._by_people = _kept(tokenizer, tool_format)
        self._found: list[str] = []
        self.count = 0
        """Control-token texts that were escaped."""

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as `templates.normalise` gives them, escaped."""
        return [self._message(message) for message in messages]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Function schemas, escaped: names, descriptions, keys and values."""
        return [self._replace(dict(tool), frozenset()) for tool in tools]

    def plain(self, text: str) -> str:
        """Rendered text with every placeholder replaced by what it stands for."""
        if not self._found:
            return text
        return _PLACEHOLDER.sub(lambda match: self._found[int(match.group(1))], text)

    def after(self, text: str, length: int) -> str | None:
        """What follows the first `length` characters of plain(text), still escaped; None if they end in the middle of
        an escaped text."""
        seen = position = 0
        for match in _PLACEHOLDER.finditer(text):
            literal = match.start() - position
            if seen + literal >= length:
                break
            seen += literal + len(self._found[int(match.group(1))])
            position = match.end()
            if seen > length:
                return None
        return text[position + length - seen :]

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. Without anything escaped it is encoded in one go, so ids equal the template's."""
        if not self._found:
            return self._tokenizer.encode(text) if text else []
        ids: list[int] = []
        # Splitting at a pattern with one group gives text, number, text, number, ..., text.
        for i, piece in enumerate(_PLACEHOLDER.split(text)):
            if i % 2:
                ids += self._tokenizer.encode(self._found[int(piece)], plain=True)
            elif piece:
                ids += self._tokenizer.encode(piece)
        return ids

    def _message(self, message: Message) -> Message:
        role = message.get("role")
        keep: frozenset[str] = frozenset()
        if role == "assistant":
            keep = self._by_assistants
        elif role != "tool":
            keep = self._by_people
        # Names and arguments of calls are somebody's values also where the policy wrote them.
        return {
            key: self._replace(value, keep if isinstance(value, str) else frozenset())
            for key, value in message.items()
        }

    def _replace(self, value: Any, keep: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self._replace_text(value, keep)
        if isinstance(value, Mapping):
            return {
                self._replace(key, keep): self._replace(item, keep) for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._replace(item, keep) for item in value]
        return value

    def _replace_text(self, text: str, keep: frozenset[str]) -> str:
        if text.isascii() and SENTINEL not in text and self._tokenizer.lacks_control(text):
            return text
        if self._tokenizer.hides_control(text):
            self.count += 1
            return self._placeholder(text)

        def control(match: re.Match[str]) -> str:
            if match.group() in keep:
                return match.group()
            self.count += 1
            return self._placeholder(match.group())

        text = _OURS.sub(lambda match: self._placeholder(match.group()), text)
        return self._tokenizer.control_pattern.sub(control, text)

    def _placeholder(self, text: str) -> str:
        self._found.append(text)
        return f"{_OPEN}{len(self._found) - 1}{_CLOSE}"


@lru_cache(maxsize=8)
def _kept(
    tokenizer: ChatTokenizer, tool_format: ToolFormat
) -> tuple[frozenset[str], frozenset[str]]:
    """Texts that stay as they are in what assistants wrote, and in what people wrote."""
    by_assistants = frozenset({*tool_format.markers, *tool_format.think})
    by_people = frozenset(
        text
        for text in by_assistants
        if _TAG.fullmatch(text) and tokenizer.token_id(text) not in tokenizer.special_ids
    )
    return by_assistants, by_people


def safe(value: Any) -> Any:
    """The same value with text that UTF-8 can hold: JSON may escape half of a surrogate pair, which has no tokens."""
    if isinstance(value, str):
        return safe_text(value)
    if isinstance(value, Mapping):
        return {safe(key): safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [safe(item) for item in value]
    return value
