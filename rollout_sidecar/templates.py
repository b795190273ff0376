"""What a chat template can do, and conversations as its text. `rollout_sidecar.conversation` turns that into tokens.

A template is asked only two things: the text of the first prompt, and the text that new messages add after an
assistant's turn. Where it lacks something (a list of tools, a tool role, tool calls in earlier messages), the tool
format's own text stands in. `certify` says whether the two answers add up to what the template would write for the
whole conversation.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rollout_sidecar.formats.base import ToolFormat
from rollout_sidecar.tokenizer import SENTINEL, ChatTokenizer

Message = Mapping[str, Any]

_ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": SENTINEL},
]
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class ChatTemplate:
    """A tokenizer's template, used with one tool format."""

    def __init__(self, tokenizer: ChatTokenizer, tool_format: ToolFormat):
        self._tokenizer = tokenizer
        self._format = tool_format
        self.turn_end = tokenizer.turn_end_text
        self.lists_tools, self.other_format = self._probe_tools()
        """Whether the template tells the policy about tools in this format; whether it does in another one."""
        self.has_tool_role = self._probe_tool_role()
        self.has_tool_calls = self._probe_tool_calls()
        user = _ASKED[:1]
        without = tokenizer.render(user, add_generation_prompt=False)
        self.generation_prompt = tokenizer.render(user).removeprefix(without)
        """What the template writes before each assistant turn."""
        opened = self.generation_prompt.rfind("<think>")
        self.think_open = opened > self.generation_prompt.rfind("</think>")
        """The generation prompt ends inside a <think>."""
        self.think_prefix = self.generation_prompt[opened:] if self.think_open else ""
        """That <think> and what follows it: the part of an assistant's text that is never sampled."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """The text of a conversation, up to where the policy goes on."""
        prepared = self._prepare(messages)
        if tools and not self.lists_tools:
            prepared = _with_system_text(prepared, self._format.system_text(tools))
            tools = None
        return self._tokenizer.render(prepared, tools)

    def added(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """The text that `messages` add after an assistant turn and its end-of-turn token: separator, messages,
        generation prompt."""
        tools = tools if self.lists_tools else None
        text = self._tokenizer.render([*_ASKED, *self._prepare(messages)], tools)
        _, found, tail = text.partition(SENTINEL)
        if not found or not tail.startswith(self.turn_end):
            raise ValueError(
                f"the chat template does not write the end of turn {self.turn_end!r} after an assistant's content when "
                f"messages follow; it wrote {tail[:60]!r}"
            )
        return tail[len(self.turn_end) :]

    def assistant_text(self, message: Message) -> str:
        """An assistant message as the policy would write it: content, then its tool calls."""
        calls = [
            self._format.render_call(call["name"], call["arguments"])
            for call in map(_function, message.get("tool_calls") or [])
        ]
        content = _text(message.get("content"))
        return "\n".join([content, *calls] if content else calls)

    def _prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as this template takes them: text contents, no None, and no roles or fields it ignores."""
        prepared: list[dict[str, Any]] = []
        in_results = False
        for message in messages:
            fields = {key: value for key, value in message.items() if value is not None}
            fields["content"] = _text(message.get("content"))
            if fields.get("tool_calls"):
                if self.has_tool_calls:
                    fields["tool_calls"] = [
                        {**call, "function": _function(call)} for call in fields["tool_calls"]
                    ]
                else:
                    fields["content"] = self.assistant_text(message)
                    del fields["tool_calls"]
            is_result = fields.get("role") == "tool" and not self.has_tool_role
            if is_result:
                fields = {"role": "user", "content": self._format.render_result(fields["content"])}
            if is_result and in_results:
                prepared[-1]["content"] += "\n" + fields["content"]
            else:
                prepared.append(fields)
            in_results = is_result
        return prepared

    def _probe_tools(self) -> tuple[bool, bool]:
        try:
            text = self._tokenizer.render(_ASKED[:1], [_PROBE_TOOL])
        except ValueError:
            return False, False
        listed = "probe_tool" in text
        ours = self._format.markers[0] in text
        return listed and ours, listed and not ours

    def _probe_tool_role(self) -> bool:
        """A template that writes any role's name and content alike has no tool role: models were not trained on it."""

        def rendered(role: str) -> str:
            return self._tokenizer.render([*_ASKED, {"role": role, "content": "a result"}])

        try:
            text = rendered("tool")
        except ValueError:
            return False
        try:
            unknown = rendered("otherRole")
        except ValueError:
            unknown = ""
        return "a result" in text and unknown.replace("otherRole", "tool") != text

    def _probe_tool_calls(self) -> bool:
        call = {"type": "function", "function": {"name": "probe_tool", "arguments": {"x": 1}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self._tokenizer.render([_ASKED[0], message], add_generation_prompt=False)
        except ValueError:
            return False
        return "probe_tool" in text and self._format.markers[0] in text


@lru_cache(maxsize=8)
def chat_template(tokenizer: ChatTokenizer, tool_format: ToolFormat) -> ChatTemplate:
    """The template of a tokenizer, probed once."""
    return ChatTemplate(tokenizer, tool_format)


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    system = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip("\n")}
    return [system, *messages[1:]]


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            return "".join(part["text"] for part in content)
        raise ValueError(
            "a message has parts that are not text; images and videos are not supported"
        )
    raise ValueError(f"a message's content is a {type(content).__name__}, expected a string")


def _function(call: Any) -> dict[str, Any]:
    """Name and arguments of an OpenAI tool call. Its arguments may be JSON text, as OpenAI sends them."""
    function = call.get("function") or call if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if "name" not in function or not isinstance(arguments, Mapping):
        raise ValueError(f"a message's tool call lacks a name or an arguments object: {call!r}")
    return {**function, "arguments": dict(arguments)}


# --- certification ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificate:
    """Whether appending is enough to follow a template."""

    kind: Literal["append-only", "fork-needed", "unsupported"]
    """append-only: appended messages give exactly the template's text. fork-needed: the template rewrites earlier
    turns; conversations keep them as they were sampled. unsupported: multi-turn conversations cannot be rendered."""
    problems: list[str]
    """Where the template departs, one sentence each."""


def certify(tokenizer: ChatTokenizer, tool_format: ToolFormat) -> Certificate:
    """Compares appending with rendering whole conversations: tool results, user messages, with and without thinking."""
    try:
        template = chat_template(tokenizer, tool_format)
    except ValueError as error:
        return Certificate("unsupported", [str(error)])
    problems: list[str] = []
    if template.other_format:
        problems.append(
            f"the template lists tools in another format than {tool_format.name}; the system text of "
            f"{tool_format.name} is used instead"
        )
    kind: Literal["append-only", "fork-needed"] = "append-only"
    if not tokenizer.turn_end_text:
        return Certificate("unsupported", [*problems, "the template has no end-of-turn token"])
    for name, conversation in _cases(template, tool_format):
        try:
            difference = _difference(template, conversation)
        except ValueError as error:
            return Certificate("unsupported", [*problems, f"{name}: {error}"])
        if difference:
            kind = "fork-needed"
            problems.append(f"{name}: {difference}")
    return Certificate(kind, problems)


def _cases(template: ChatTemplate, tool_format: ToolFormat):
    call = tool_format.render_call("probe_tool", {"x": 1})
    result = {"role": "tool", "content": "first result"}
    user = {"role": "user", "content": "another question"}
    for thinking in (False, True):
        if template.think_open and not thinking:
            continue  # such a turn always has thinking
        what = ", with thinking" if thinking else ""
        think = "<think>\nSome thoughts.\n</think>\n\n" if thinking else ""
        answer = {"role": "assistant", "content": think + "An answer."}
        calling = {"role": "assistant", "content": think + call}
        start = {"role": "user", "content": "a question"}
        yield f"a tool result{what}", [start, calling, result]
        yield f"two tool results{what}", [start, calling, result, result]
        yield f"a user message{what}", [start, answer, user]
        yield f"a user message after a tool result{what}", [start, calling, result, answer, user]


def _difference(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """ "" if appending gives the text of the whole conversation, else where the two part."""
    tools = [_PROBE_TOOL]
    appended = template.prompt(messages[:1], tools)
    rest = messages[1:]
    while rest:
        turn, *rest = rest
        count = next((i for i, m in enumerate(rest) if m["role"] == "assistant"), len(rest))
        appended += turn["content"].removeprefix(template.think_prefix)
        appended += template.turn_end + template.added(rest[:count], tools)
        rest = rest[count:]
    whole = template.prompt(messages, tools)
    if appended == whole:
        return ""
    pairs = enumerate(zip(appended, whole, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(appended), len(whole)))
    near = slice(max(0, at - 20), at + 40)
    return f"appending gives {appended[near]!r}, the template {whole[near]!r}"
