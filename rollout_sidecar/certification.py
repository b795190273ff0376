"""Whether conversations can follow a chat template by appending: `python -m rollout_sidecar.certification MODEL`.

A fixed battery of conversations is built twice, turn by turn as a rollout does, and as the template's text of the whole
conversation. Both become token ids, which are compared. Three more conversations hold the texts of control tokens
wherever somebody else's text can get to: they must come out as ordinary tokens.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_sidecar.conversation import ContextPolicy, Conversation, first_difference, replay
from rollout_sidecar.errors import RolloutError
from rollout_sidecar.formats import ToolFormat, choose_format, get_format
from rollout_sidecar.protocol import Message
from rollout_sidecar.templates import PROBE_TOOL, chat_template
from rollout_sidecar.tokenizer import ChatTokenizer

Kind = Literal["append-only", "fork-needed", "unsupported"]

_BEFORE, _SHOWN_IDS, _SHOWN_TEXT = 3, 8, 24
"""Ids shown before the first that differs, from there on, and as text."""
_THOUGHT = "Some thoughts."


@dataclass(frozen=True)
class Difference:
    """Where the ids of an appended conversation leave those of the whole one."""

    case: str
    at: int
    """Index of the first id that differs."""
    appended: list[tuple[int, str]]
    """Ids around it and their texts, as appending gives them."""
    whole: list[tuple[int, str]]
    """The same, of the template's text of the whole conversation."""
    appended_text: str
    whole_text: str
    """More of both as text."""

    def __str__(self) -> str:
        def shown(text: str, ids: list[tuple[int, str]]) -> str:
            return f"{text!r} [{' '.join(f'{id}:{piece!r}' for id, piece in ids)}]"

        return (
            f"{self.case}: from token {self.at} on appending gives {shown(self.appended_text, self.appended)}, "
            f"the template {shown(self.whole_text, self.whole)}"
        )


@dataclass(frozen=True)
class Certificate:
    """What a tokenizer's chat template and a tool format can do together."""

    kind: Kind
    """append-only: appended messages give exactly the template's text. fork-needed: the template rewrites earlier
    turns, and the context policy says what then happens. unsupported: multi-turn conversations cannot be rendered, or
    other people's text can write control tokens."""
    problems: list[str]
    """Where the template departs, one sentence each."""
    differences: list[Difference] = field(default_factory=list)
    """The ids at which it rewrites earlier turns."""
    whole_conversations: bool = True
    """The template can write a conversation of several turns at once: the policies fork and reject need it."""
    tokenizer: str = ""
    tool_format: str = ""

    def __str__(self) -> str:
        lines = [f"{self.tokenizer} with tool format {self.tool_format}: {self.kind}"]
        lines += [f"  {problem}" for problem in self.problems]
        return "\n".join(lines)


def certify(tokenizer: ChatTokenizer, tool_format: ToolFormat) -> Certificate:
    """Compares appending with rendering whole conversations: tool results, user messages, with and without thinking."""
    certificate = _certify(tokenizer, tool_format)
    names = {"tokenizer": tokenizer.source, "tool_format": tool_format.name}
    return Certificate(**{**vars(certificate), **names})


def check_certificate(certificate: Certificate, context_policy: ContextPolicy) -> None:
    """Raises ValueError, with the way out, if rollouts cannot run with this certificate and context policy."""
    what = f"{certificate.tokenizer} with tool format {certificate.tool_format}"
    if certificate.kind == "unsupported":
        raise ValueError(
            f"{what} cannot hold multi-turn conversations: {certificate.problems[-1]}. Set another --tool_format, use "
            "the model's instruct version, or put a chat_template.jinja beside its tokenizer that can"
        )
    if context_policy != "keep" and not certificate.whole_conversations:
        raise ValueError(
            f"context policy {context_policy} needs a chat template that writes whole conversations, and the one of "
            f"{what} does not: {certificate.problems[-1]}. Set the context policy keep"
        )


def _certify(tokenizer: ChatTokenizer, tool_format: ToolFormat) -> Certificate:
    problems: list[str] = []
    differences: list[Difference] = []
    kind: Kind = "append-only"
    refused = ""
    try:
        template = chat_template(tokenizer, tool_format)
    except ValueError as error:
        return Certificate("unsupported", [str(error)])
    if template.other_format:
        problems.append(
            f"the template lists tools in another format than {tool_format.name}; the system text of "
            f"{tool_format.name} is used instead"
        )
    for case, messages in _cases(tokenizer, tool_format):
        try:
            appended = replay(tokenizer, tool_format, messages, [PROBE_TOOL]).token_ids
        except (ValueError, RolloutError) as error:
            return Certificate("unsupported", [*problems, f"{case}: {error}"], differences)
        try:
            whole = Conversation(tokenizer, tool_format, messages, [PROBE_TOOL]).token_ids
        except ValueError as error:
            kind, refused = "fork-needed", f"{case}, as a whole: {error}"
            continue
        if appended == whole:
            continue
        difference = _difference(tokenizer, case, appended, whole)
        if tokenizer.decode(appended) == tokenizer.decode(whole):
            problems.append(f"{difference} (the same text: sampled ids stay as they are)")
        else:
            kind = "fork-needed"
            differences.append(difference)
            problems.append(str(difference))
    if refused:
        problems.append(refused)
    problems += _missing_stops(tokenizer, tool_format)
    leak = _leak(tokenizer, tool_format)
    if leak:
        kind = "unsupported"
        problems.append(leak)
    return Certificate(kind, problems, differences, whole_conversations=not refused)


def _missing_stops(tokenizer: ChatTokenizer, tool_format: ToolFormat) -> list[str]:
    """Of a template without an end of turn: first tokens of messages that would not stop the policy."""
    if tokenizer.turn_end_text:
        return []
    template = chat_template(tokenizer, tool_format)
    asked: Message = {"role": "user", "content": "x"}
    stop_ids = Conversation(tokenizer, tool_format, [asked]).stop_ids
    following: list[Message] = [{"role": "tool", "name": "probe_tool", "content": "x"}, asked]
    ends = dict.fromkeys(template.added([message], None)[0] for message in following)
    return [
        f"a turn ends with {end!r}, the first token of what follows, and that is no stop id; put "
        f"{tokenizer.token_id(end)} into eos_token_id of generation_config.json"
        for end in ends
        if tokenizer.token_id(end) not in stop_ids
    ]


# --- the battery ------------------------------------------------------------------------------------------------


def _cases(
    tokenizer: ChatTokenizer, tool_format: ToolFormat
) -> Iterator[tuple[str, list[Message]]]:
    template = chat_template(tokenizer, tool_format)
    start = {"role": "user", "content": "a question"}
    user = {"role": "user", "content": "another question"}

    def results(count: int) -> list[Message]:
        return [
            {"role": "tool", "name": "probe_tool", "content": f"result {i}"} for i in range(count)
        ]

    for thinking in (False, True):
        if template.think_open and not thinking:
            continue  # such a turn always has thinking
        what = ", with thinking" if thinking else ""

        def turn(content: str, calls: int, thinking: bool = thinking) -> Message:
            text = tool_format.render_turn(content, [("probe_tool", {"x": 1})] * calls)
            written = _thinking_turn(tokenizer, tool_format, content, calls) if thinking else ""
            opening, closing = tool_format.think
            thought = f"{opening}\n{_THOUGHT}\n{closing}\n\n" if thinking else ""
            text = written or thought + text
            return {"role": "assistant", "content": text}

        answer = turn("An answer.", 0)
        one_round = [turn("", 1), *results(1)]
        yield f"a tool result{what}", [start, *one_round]
        yield f"two tool results{what}", [start, turn("", 2), *results(2)]
        yield f"two rounds of tool results{what}", [start, *one_round, *one_round]
        yield f"a user message{what}", [start, answer, user]
        yield f"a user message after a tool result{what}", [start, *one_round, answer, user]


def _thinking_turn(
    tokenizer: ChatTokenizer, tool_format: ToolFormat, content: str, calls: int
) -> str:
    """A turn with thinking as the template itself writes the last one, "" if it does not know such: line breaks
    around thoughts differ."""
    call = {"type": "function", "function": {"name": "probe_tool", "arguments": {"x": 1}}}
    message: Message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": _THOUGHT,
        "tool_calls": [{"id": f"call{i:05d}", **call} for i in range(calls)],
    }
    if not calls:
        del message["tool_calls"]
    asked = [{"role": "user", "content": "x"}]
    try:
        before = tokenizer.render(asked, [PROBE_TOOL], add_generation_prompt=False)
        generate = tokenizer.render(asked, [PROBE_TOOL]).removeprefix(before)
        text = tokenizer.render([*asked, message], [PROBE_TOOL], add_generation_prompt=False)
    except ValueError:
        return ""
    generate = generate.partition(tool_format.think[0])[0]
    if not text.startswith(before + generate) or _THOUGHT not in text:
        return ""
    text = text.removeprefix(before + generate)
    end = tokenizer.turn_end_text
    return text[: text.rfind(end)] if end and end in text else text


def _difference(
    tokenizer: ChatTokenizer, case: str, appended: Sequence[int], whole: Sequence[int]
) -> Difference:
    at = first_difference(appended, whole)
    start = max(0, at - _BEFORE)

    def pairs(ids: Sequence[int]) -> list[tuple[int, str]]:
        return [(id, tokenizer.token_text(id)) for id in ids[start : at + _SHOWN_IDS]]

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids[start : at + _SHOWN_TEXT])

    return Difference(case, at, pairs(appended), pairs(whole), text(appended), text(whole))


# --- texts of control tokens ------------------------------------------------------------------------------------


def _leak(tokenizer: ChatTokenizer, tool_format: ToolFormat) -> str:
    """Which place lets a control token through; "" if none does."""
    texts = [
        tokenizer.token_text(id) for id in sorted(tokenizer.stop_ids | {tokenizer.end_of_turn_id})
    ]
    attack = "".join([*texts, *map(str.upper, texts), *map(str.lower, texts)])
    for place in ("a user message", "a tool result", "a tool's schema", "a call's arguments"):
        harmless, attacked = (_planted(place, text) for text in ("x", attack))
        try:
            expected, found = (
                _controls(tokenizer, replay(tokenizer, tool_format, *planted))
                for planted in (harmless, attacked)
            )
        except (ValueError, RolloutError):
            continue  # a format may have no way to write the call, and the battery has told what else is wrong
        if expected != found:
            at = first_difference(expected, found)
            names = [tokenizer.token_text(id) for id in found[at : at + 3]]
            return f"control tokens in the text of {place} come through as such: {names} ({found[at : at + 3]})"
    return ""


def _planted(place: str, text: str) -> tuple[list[Message], list[dict[str, Any]]]:
    function: dict[str, Any] = dict(PROBE_TOOL["function"])
    arguments: dict[str, Any] = {}
    if place == "a tool's schema":
        properties = {text: {"type": "string", "enum": [text]}}
        function |= {
            "description": text,
            "parameters": {"type": "object", "properties": properties},
        }
    if place == "a call's arguments":
        arguments = {"x": text}
    call = {"type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": text if place == "a user message" else "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "name": "probe_tool",
            "content": text if place == "a tool result" else "x",
        },
    ]
    return messages, [{"type": "function", "function": function}]


def _controls(tokenizer: ChatTokenizer, conversation: Conversation) -> list[int]:
    return [id for id in conversation.token_ids if id in tokenizer.control_ids]


# --- the command ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: prints the certificate. 0 if conversations are supported, 1 if not, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="rollout_sidecar.certification",
        description="Says whether a model's chat template lets conversations grow by appending, and the token ids at "
        "which it does not.",
    )
    parser.add_argument("model", help="folder with tokenizer.json and a chat template")
    parser.add_argument(
        "--tool_format", default="auto", help="default: the one that the chat template asks for"
    )
    args = parser.parse_args(argv)
    try:
        tokenizer = ChatTokenizer.from_folder(args.model)
        auto = args.tool_format == "auto"
        tool_format = choose_format(tokenizer) if auto else get_format(args.tool_format)
    except ValueError as error:
        print(f"rollout_sidecar.certification: {error}", file=sys.stderr)
        return 2
    certificate = certify(tokenizer, tool_format)
    print(certificate)
    return 1 if certificate.kind == "unsupported" else 0


if __name__ == "__main__":
    sys.exit(main())
