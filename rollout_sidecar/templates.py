"""What a chat template can do, and conversations as its text. `rollout_sidecar.conversation` turns that into tokens.

A template is asked only two things: the text of a conversation up to where the policy goes on, and the text that new
messages add after an assistant's turn. Templates differ in what they take, so each is probed once. Where it lacks
something the nearest thing that it has stands in: the tool format's own text for a list of tools, a user message for a
tool's result, the first user message for the system's, the format's text for tool calls.
`rollout_sidecar.certification` says whether the two answers add up to what the template would write for the whole
conversation.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rollout_sidecar.escaping import Escaper, safe
from rollout_sidecar.formats.base import ToolFormat
from rollout_sidecar.formats.registry import FORMATS
from rollout_sidecar.protocol import Message
from rollout_sidecar.tokenizer import SENTINEL, ChatTokenizer

Fields = dict[str, Any]

_ASKED: list[Fields] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": SENTINEL},
]
_RESULT: Fields = {
    "role": "tool",
    "content": "a result",
    "name": "probe_tool",
    "tool_call_id": "call00000",
}
PROBE_TOOL = {
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
        self.has_system_role = "probe system" in self._try(
            {"role": "system", "content": "probe system"}, _ASKED[0]
        )
        self.merges_users = not self._try(*_ASKED, *_ASKED[:1] * 2) and bool(
            self._try(*_ASKED, _ASKED[0])
        )
        """Refuses two user messages in a row."""
        self.has_tool_role, self.results_need_calls = self._probe_tool_role()
        """Whether it writes tool messages; whether only after an assistant's tool_calls."""
        self.has_tool_calls = self._probe_tool_calls()
        user = _ASKED[:1]
        without = tokenizer.render(user, add_generation_prompt=False)
        self.generation_prompt = tokenizer.render(user).removeprefix(without)
        """What the template writes before each assistant turn."""
        opening, closing = tool_format.think
        opened = self.generation_prompt.rfind(opening)
        self.think_open = opened > self.generation_prompt.rfind(closing)
        """The generation prompt ends inside thinking text."""
        self.think_prefix = self.generation_prompt[opened:] if self.think_open else ""
        """What opened it, and what follows that: the part of an assistant's text that is never sampled."""
        self._schemas = Schemas(tokenizer, tool_format, [])

    def schemas(self, tools: Sequence[Mapping[str, Any]]) -> "Schemas":
        """Function schemas as conversations need them; the last ones are kept, as most conversations have the same."""
        if self._schemas.tools != tools:
            self._schemas = Schemas(self._tokenizer, self._format, tools)
        return self._schemas

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """The text of a conversation, up to where the policy goes on."""
        prepared = self._prepare(messages)
        if tools and not self.lists_tools:
            prepared = _with_system_text(prepared, self._format.system_text(tools))
            tools = None
        return self._tokenizer.render(self._fold(prepared), tools)

    def added(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[str, str]:
        """What closes an assistant's turn when `messages` follow, and the text that they add after it: separator,
        messages, generation prompt."""
        tools = tools if self.lists_tools else None
        if self.results_need_calls and messages and messages[0].get("role") == "tool":
            return self._added_to_calls(messages, tools)
        text = self._tokenizer.render([*_ASKED, *self._fold(self._prepare(messages))], tools)
        _, found, tail = text.partition(SENTINEL)
        end = self.turn_end
        if not end or not tail.startswith(end):
            # Some end a turn with the next one's first token (GLM), or differently before another turn (gpt-oss).
            end = self._tokenizer.leading_control(tail)
        if not found or not end:
            missing = (
                f"the end of turn {self.turn_end!r}" if self.turn_end else "an end-of-turn token"
            )
            raise ValueError(
                f"the chat template does not write {missing} after an assistant's content when messages follow; it "
                f"wrote {tail[:60]!r}"
            )
        return end, tail[len(end) :]

    def assistant_text(self, message: Message) -> str:
        """An assistant message as the policy would write it: content, then its tool calls."""
        calls = [
            (call["name"], call["arguments"])
            for call in map(_function, message.get("tool_calls") or [])
        ]
        return self._format.render_turn(_text(message.get("content")), calls)

    def _added_to_calls(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[str, str]:
        """`added`, after an assistant message with as many calls as results follow."""
        roles = [message.get("role") for message in messages]
        count = next((i for i, role in enumerate(roles) if role != "tool"), len(roles))
        calls = [
            _call(
                message.get("name") or "tool",
                {"x": SENTINEL},
                message.get("tool_call_id") or _call_id(i),
            )
            for i, message in enumerate(messages[:count])
        ]
        calling = {"role": "assistant", "content": "", "tool_calls": calls}
        prepared = self._fold(self._prepare([calling, *messages]))
        text = self._tokenizer.render([_ASKED[0], *prepared], tools)
        tail = text.rpartition(SENTINEL)[2]  # some write only the first call
        ends = [*self._stop_texts(), self.turn_end]
        found = [(tail.index(end), end) for end in ends if end and end in tail]
        if not found:
            raise ValueError(
                f"the chat template writes none of the ends of turn {ends} after an assistant's tool calls; it wrote "
                f"{tail[:60]!r}"
            )
        at, end = min(found)
        return end, tail[at + len(end) :]

    def _stop_texts(self) -> list[str]:
        ids = sorted(self._tokenizer.stop_ids)
        return [*map(self._tokenizer.token_text, ids), *self._format.stop_texts]

    # --- messages as the template takes them ---

    def _prepare(self, messages: Sequence[Message]) -> list[Fields]:
        """Messages with the roles and fields that this template has; tool calls and results get ids that match."""
        prepared: list[Fields] = []
        calls: list[Fields] = []  # of the last assistant message
        structured = False
        calls_made = results = 0
        for i, message in enumerate(messages):
            fields = dict(message)
            if fields.get("role") == "assistant":
                following = [later.get("role") for later in messages[i + 1 :]]
                calls, structured = self._calls_of(message, following, calls_made)
                calls_made += len(calls)
                results = 0
                if structured:
                    fields |= {"content": self._text_beside_calls(message), "tool_calls": calls}
                elif fields.pop("tool_calls", None):
                    fields["content"] = self.assistant_text(message)
            elif fields.get("role") == "tool":
                call = (
                    calls[results] if results < len(calls) else _call("", {}, _call_id(calls_made))
                )
                results += 1
                if not self.has_tool_role or (self.results_need_calls and not structured):
                    text = self._format.render_result(fields["content"])
                    if i and messages[i - 1].get("role") == "tool":
                        prepared[-1]["content"] += "\n" + text
                        continue
                    fields = {"role": "user", "content": text}
                else:
                    fields.setdefault("tool_call_id", call["id"])
                    if call["function"]["name"]:
                        fields.setdefault("name", call["function"]["name"])
            prepared.append(fields)
        return prepared

    def _calls_of(
        self, message: Message, following: Sequence[str | None], calls_made: int
    ) -> tuple[list[Fields], bool]:
        """The calls of an assistant message, and whether the template is to write them from tool_calls."""
        if message.get("tool_calls"):
            calls = [{**call, "function": _function(call)} for call in message["tool_calls"]]
            ids = self._ids_of([call["function"] for call in calls], calls_made)
            calls = [
                {"type": "function", "id": id, **call} for id, call in zip(ids, calls, strict=True)
            ]
            return calls, self.has_tool_calls
        if following[:1] != ["tool"]:
            return [], False
        parsed = self._format.parse(message["content"])
        calls = [
            _call(call.name, call.arguments or {}, call.call_id or _call_id(calls_made + i))
            for i, call in enumerate(parsed)
        ]
        results = next((i for i, role in enumerate(following) if role != "tool"), len(following))
        # A call that cannot be read cannot be structured: the text stays as it was written.
        readable = len(parsed) == results and not any(call.error for call in parsed)
        return calls, self.results_need_calls and readable

    def _ids_of(self, functions: Sequence[Fields], calls_made: int) -> list[str]:
        """The ids that calls have in this format (Kimi: functions.f:0), or any where it has none."""
        ids = [_call_id(calls_made + i) for i in range(len(functions))]
        try:
            text = self._format.render_calls([(f["name"], f["arguments"]) for f in functions])
        except ValueError:  # this format cannot write them
            return ids
        parsed = self._format.parse(text)
        if len(parsed) != len(ids):
            return ids
        return [call.call_id or id for call, id in zip(parsed, ids, strict=True)]

    def _text_beside_calls(self, message: Message) -> str:
        text = message["content"]
        if message.get("tool_calls"):
            return text
        for call in self._format.parse(text):
            text = text.replace(call.raw, "", 1)
        return text.rstrip()

    def _fold(self, messages: list[Fields]) -> list[Fields]:
        """Joins messages that this template does not take: a system message, users one after another."""
        folded: list[Fields] = []
        system = ""
        for message in messages:
            role = message.get("role")
            if role == "system" and not self.has_system_role:
                system += message["content"] + "\n\n"
                continue
            if role == "user" and system:
                message, system = {**message, "content": system + message["content"]}, ""
            if role == "user" and self.merges_users and folded and folded[-1]["role"] == "user":
                text = f"{folded[-1]['content']}\n{message['content']}"
                folded[-1] = {**folded[-1], "content": text}
            else:
                folded.append(message)
        if system:
            folded.append({"role": "user", "content": system.removesuffix("\n\n")})
        return folded

    # --- probes ---

    def _try(self, *messages: Fields, tools: Sequence[Message] | None = None) -> str:
        """The template's text, "" if it refuses the messages."""
        try:
            return self._tokenizer.render(messages, tools)
        except ValueError:
            return ""

    def _probe_tools(self) -> tuple[bool, bool]:
        text = self._try(_ASKED[0], tools=[PROBE_TOOL])
        listed = "probe_tool" in text
        asked = {f.name for f in FORMATS if all(part in text for part in f.listing)}
        # A listing in nobody's form is taken for this format's if it shows its marker.
        shown = any(marker in text for marker in self._format.markers[:1])
        ours = self._format.name in asked or (not asked and shown)
        return listed and ours, listed and not ours

    def _probe_tool_role(self) -> tuple[bool, bool]:
        """A template that writes any role's name and content alike has no tool role: models were not trained on it.

        Some write results only after tool_calls, and some take them without, but then refuse the next turn.
        """
        calling = {
            "role": "assistant",
            "content": "",
            "tool_calls": [_call("probe_tool", {"x": 1})],
        }
        answer = {"role": "assistant", "content": "y"}
        for turn, needs_calls in ((_ASKED[1], False), (calling, True)):
            before = (_ASKED[0], turn)
            text = self._try(*before, _RESULT)
            unknown = self._try(*before, {**_RESULT, "role": "otherRole"})
            known = "a result" in text and unknown.replace("otherRole", "tool") != text
            if known and self._try(*before, _RESULT, answer, _ASKED[0]):
                return True, needs_calls
        return False, False

    def _probe_tool_calls(self) -> bool:
        calls = [_call("probe_tool", {"x": 1})]
        text = self._try(_ASKED[0], {"role": "assistant", "content": "", "tool_calls": calls})
        ours = not self._format.markers or self._format.markers[0] in text
        return "probe_tool" in text and (ours or self.results_need_calls)


class Schemas:
    """The schemas of the tools that a policy may call. Shared by conversations, so nothing may change them."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tool_format: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
    ):
        self.tools: list[dict[str, Any]] = safe(list(tools))
        """A copy."""
        escaper = Escaper(tokenizer, tool_format)
        self._plain = escaper.tools(self.tools) == self.tools

    def escaped(self, escaper: Escaper) -> list[dict[str, Any]] | None:
        """As a template may see them; None if there are none. Most hold nothing that has to be escaped."""
        return (self.tools if self._plain else escaper.tools(self.tools)) or None


@lru_cache(maxsize=8)
def chat_template(tokenizer: ChatTokenizer, tool_format: ToolFormat) -> ChatTemplate:
    """The template of a tokenizer, probed once."""
    return ChatTemplate(tokenizer, tool_format)


def normalise(messages: Sequence[Message]) -> list[Message]:
    """Messages as escaping and templates expect them: contents are text, arguments are objects, None is absent."""
    normal: list[Message] = []
    for message in messages:
        fields = {key: safe(value) for key, value in message.items() if value is not None}
        fields["content"] = _text(fields.get("content"))
        if fields.get("tool_calls"):
            fields["tool_calls"] = [
                {**call, "function": _function(call)} for call in fields["tool_calls"]
            ]
        normal.append(fields)
    return normal


def _with_system_text(messages: list[Fields], text: str) -> list[Fields]:
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


def _function(call: Any) -> Fields:
    """Name and arguments of an OpenAI tool call. Its arguments may be JSON text, as OpenAI sends them."""
    function = call.get("function") or call if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = safe(json.loads(arguments))
        except ValueError:
            arguments = None
    if "name" not in function or not isinstance(arguments, Mapping):
        raise ValueError(f"a message's tool call lacks a name or an arguments object: {call!r}")
    return {**function, "arguments": dict(arguments)}


def _call(name: str, arguments: Mapping[str, Any], call_id: str = "call00000") -> Fields:
    function = {"name": name, "arguments": dict(arguments)}
    return {"type": "function", "id": call_id, "function": function}


def _call_id(index: int) -> str:
    """Nine letters and digits: what Mistral's templates insist on."""
    return f"call{index:05d}"
