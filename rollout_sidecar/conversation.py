"""The token-exact record of one conversation: what the policy saw and what it sampled, token by token.

Sampled ids are stored as the engine returned them and never go through text again. Messages are rendered once, when
they arrive: the prompt as a whole, later ones as the text that they add. `loss_mask` is True exactly for ids that
`append_completion` was given, so padding, separators and end-of-turn tokens that were inserted here never count, and
an end-of-sequence token that was sampled does, whatever its id.

Texts of special tokens inside messages ("<|im_end|>" in a tool result) are encoded as plain text: only the template
and the policy can open or close a turn.

Reasoning of earlier turns is kept as sampled, also where the template would drop it (see `certify`).
"""

import re
from collections.abc import Sequence
from typing import Any

from rollout_sidecar.formats.base import ParsedCall, ToolFormat
from rollout_sidecar.protocol import Message, VersionSpan
from rollout_sidecar.templates import Certificate, certify, chat_template
from rollout_sidecar.tokenizer import ChatTokenizer

__all__ = ["Certificate", "Conversation", "certify", "demonstration"]

# Private-use characters around a number stand for a text that must be encoded as plain text.
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class Conversation:
    """Grows by turns: append_completion, then append_observation, and so on."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tool_format: ToolFormat,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
    ):
        """Renders the prompt.

        Args:
            messages: what the policy is asked; tool results, earlier turns and system messages may be among them.
            tools: OpenAI function schemas of the tools it may call. None and [] offer none.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        self._tokenizer = tokenizer
        self._format = tool_format
        self._template = chat_template(tokenizer, tool_format)
        self._tools = list(tools or [])
        self._turn_texts: list[str] = []
        self._awaits_completion = True
        # A format's markers may be special tokens; calls in a turn's text need them.
        self._unspoken = tokenizer.special_ids - {
            tokenizer.token_id(marker) for marker in tool_format.markers
        }

        self.messages: list[Message] = list(messages)
        """The conversation as text."""
        self.escaped_special_tokens = self._count_escaped(messages)
        """Special-token texts in messages, encoded as plain text."""
        escaped = _Escaped(tokenizer, tool_format)
        text = self._template.prompt(escaped.messages(messages), escaped.tools(self._tools))
        self.token_ids: list[int] = escaped.encode(text)
        """Prompt, completions and observations in the order the policy saw them."""
        self.prompt_tokens = len(self.token_ids)
        self.loss_mask: list[bool] = [False] * self.prompt_tokens
        """True exactly where the policy sampled the token."""
        self.rollout_log_probs: list[float] = [0.0] * self.prompt_tokens
        """0 where loss_mask is False."""
        self.version_spans: list[VersionSpan] = []
        """Which policy version sampled which tokens; one span a turn."""

    @property
    def think_open(self) -> bool:
        """The generation prompt opens a <think> that the turn's text goes on with: give it to the format's parse."""
        return self._template.think_open

    def append_completion(
        self, ids: Sequence[int], log_probs: Sequence[float], policy_version: int
    ) -> str:
        """Appends a turn as it was sampled and returns its text, without special tokens.

        Its last id may be a stop id or not: what the template needs to close the turn comes with the next
        observation, with mask 0.
        """
        if len(ids) != len(log_probs):
            raise ValueError(f"{len(ids)} sampled ids came with {len(log_probs)} log-probs")
        if not self._awaits_completion:
            raise ValueError(
                "a completion follows a prompt or an observation, not another completion"
            )
        start = len(self.token_ids)
        self.token_ids.extend(ids)
        self.loss_mask.extend([True] * len(ids))
        self.rollout_log_probs.extend(log_probs)
        if ids:
            span = VersionSpan(start=start, end=start + len(ids), policy_version=policy_version)
            self.version_spans.append(span)
        text = self._tokenizer.decode([id for id in ids if id not in self._unspoken])
        self._turn_texts.append(text)
        self.messages.append({"role": "assistant", "content": text})
        self._awaits_completion = False
        return text

    def parse_calls(self, text: str) -> list[ParsedCall]:
        """The tool calls in a turn's text; knows whether the generation prompt opened a <think>."""
        return self._format.parse(text, think_open=self.think_open)

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that appending `messages` would add: the end of turn if the policy did not sample it, separator,
        messages, generation prompt."""
        if self._awaits_completion:
            raise ValueError("an observation follows a completion")
        escaped = _Escaped(self._tokenizer, self._format)
        text = self._template.added(escaped.messages(messages), escaped.tools(self._tools))
        if self.token_ids[-1] != self._tokenizer.end_of_turn_id or not self.loss_mask[-1]:
            text = self._tokenizer.turn_end_text + text
        return escaped.encode(text)

    def append_observation(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Appends `messages`, whose tokens `ids` came from `render_observation`, with mask 0."""
        if self._awaits_completion:
            raise ValueError("an observation follows a completion")
        self.token_ids.extend(ids)
        self.loss_mask.extend([False] * len(ids))
        self.rollout_log_probs.extend([0.0] * len(ids))
        self.messages.extend(messages)
        self.escaped_special_tokens += self._count_escaped(messages)
        self._awaits_completion = True

    def model_text(self) -> str:
        """What the policy wrote, one line break between turns: a reward on it cannot be earned by a tool's text."""
        return "\n".join(self._turn_texts)

    def full_text(self) -> str:
        """Everything after the prompt, observations included: what verl gives to reward functions."""
        return self._tokenizer.decode(self.token_ids[self.prompt_tokens :], skip_special=True)

    def _count_escaped(self, messages: Sequence[Message]) -> int:
        escaped = _Escaped(self._tokenizer, self._format)
        escaped.messages(messages)
        return sum(text not in (_OPEN, _CLOSE) for text in escaped.found)


def demonstration(
    tokenizer: ChatTokenizer,
    tool_format: ToolFormat,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
) -> Conversation:
    """A conversation whose assistant turns were written by somebody else, as if the policy had sampled them.

    Its tokens are those that a rollout with the same turns would have, and loss_mask is True on each turn and its end
    of turn. Messages before the first assistant turn are the prompt. Log-probs are 0, the policy version is 0.
    """
    roles = [message.get("role") for message in messages]
    if "assistant" not in roles or roles[0] == "assistant" or roles[-1] != "assistant":
        raise ValueError(
            f"a demonstration starts with a question and ends with an assistant message, got roles {roles}"
        )
    first = roles.index("assistant")
    conversation = Conversation(tokenizer, tool_format, messages[:first], tools)
    template = chat_template(tokenizer, tool_format)
    observation: list[Message] = []
    for message in messages[first:]:
        if message.get("role") != "assistant":
            observation.append(message)
            continue
        if conversation.version_spans:
            if not observation:
                raise ValueError("a demonstration has two assistant messages in a row")
            ids = conversation.render_observation(observation)
            conversation.append_observation(observation, ids)
            observation = []
        escaped = _Escaped(tokenizer, tool_format)
        text = template.assistant_text(escaped.messages([message])[0])
        ids = escaped.encode(text.removeprefix(template.think_prefix) + tokenizer.turn_end_text)
        conversation.append_completion(ids, [0.0] * len(ids), policy_version=0)
    return conversation


class _Escaped:
    """Replaces special-token texts in messages before rendering, and encodes them as plain text afterwards."""

    def __init__(self, tokenizer: ChatTokenizer, tool_format: ToolFormat):
        self._tokenizer = tokenizer
        self._markers = frozenset(tool_format.markers)
        self.found: list[str] = []

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Assistant messages keep the format's markers: there they are the format, not somebody's text."""
        return [
            self._replace(
                message, self._markers if message.get("role") == "assistant" else frozenset()
            )
            for message in messages
        ]

    def tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._replace(tool, frozenset()) for tool in tools]

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. Without anything escaped it is encoded in one go, so ids equal the template's."""
        ids: list[int] = []
        # Splitting at a pattern with one group gives text, number, text, number, ..., text.
        for i, piece in enumerate(_PLACEHOLDER.split(text)):
            if i % 2:
                ids += self._tokenizer.encode(self.found[int(piece)], plain=True)
            elif piece:
                ids += self._tokenizer.encode(piece)
        return ids

    def _replace(self, value: Any, keep: frozenset[str]) -> Any:
        if isinstance(value, str):
            # Characters that look like a placeholder's are escaped too, so that nobody can write one.
            value = re.sub(
                f"[{_OPEN}{_CLOSE}]", lambda match: self._placeholder(match.group()), value
            )
            return self._tokenizer.special_pattern.sub(
                lambda match: (
                    match.group() if match.group() in keep else self._placeholder(match.group())
                ),
                value,
            )
        if isinstance(value, dict):
            return {key: self._replace(item, keep) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._replace(item, keep) for item in value]
        return value

    def _placeholder(self, text: str) -> str:
        self.found.append(text)
        return f"{_OPEN}{len(self.found) - 1}{_CLOSE}"
