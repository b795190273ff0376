"""Formats that write each argument in a tag of its own: Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2 and V4.

    <tool_call><function=get_weather><parameter=city>Zürich</parameter></function></tool_call>

A value ends at the first closing tag of its argument: these formats have no escapes. Everything before that is text,
other tags included. A text that holds its own closing tag cannot be written, and `render_call` says so. Values get
their types from the tool's schema, except where the tag itself says whether it holds a text (DeepSeek).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_sidecar.formats.base import THINK, BaseFormat, Call, ParsedCall, Tools, to_json
from rollout_sidecar.formats.reading import checked, failed, scan, skip_space, unclosed
from rollout_sidecar.formats.schemas import not_json, parameters_of, read_literal, read_value


@dataclass(frozen=True)
class Tags:
    """The texts of one format. `{}` in an opening tag stands for a name."""

    block: str
    block_end: str
    call: str
    call_end: str
    argument: str
    argument_end: str
    newline: str = ""
    """What stands on both sides of a value."""
    think: tuple[str, str] = THINK
    typed: bool = False
    """Whether an argument's tag says if its value is a text: string="true" or string="false"."""
    one_a_block: bool = False
    """Whether several calls are written as several blocks."""
    tokens: tuple[str, ...] = ()
    """Special tokens that are parts of the texts above."""
    before_block: str = "\n"
    """What stands between a turn's text and its calls."""


class TaggedFormat(BaseFormat):
    """See the module. Each format is an instance."""

    def __init__(self, name: str, tags: Tags, *, listing: tuple[str, ...], result: str = ""):
        """Args:
        result: how a tool result is wrapped, with `{}` for the text, where the format has a way of its own.
        """
        self.name = name
        self.listing = listing
        self.think = tags.think
        self._tags = tags
        self._result = result
        opening = tags.call.partition("{}")
        self.markers = (tags.block, tags.block_end, *tags.tokens, *tags.think)
        self.form = self._form()
        self._opening = re.compile(f"{re.escape(tags.block)}|{re.escape(opening[0])}")
        self._call = _tag_pattern(tags.call)
        self._argument = _tag_pattern(tags.argument, typed=tags.typed)
        self._outside = re.compile(f"{re.escape(tags.block)}|{re.escape(tags.think[1])}")
        # Where reading goes on after a call that cannot be read.
        self._marks = re.compile(
            "|".join(
                map(
                    re.escape,
                    (tags.call_end, opening[0], tags.block_end, tags.block, tags.think[1]),
                )
            )
        )

    def parse(
        self, text: str, *, think_open: bool = False, tools: Tools | None = None
    ) -> list[ParsedCall]:
        """Every attempt at a call outside thinking."""

        def read(text: str, start: int) -> tuple[list[ParsedCall], int]:
            return self._read_block(text, start, tools)

        return scan(text, self._opening, read, think_open=think_open, think=self.think)

    def render_calls(self, calls: Sequence[Call]) -> str:
        """All calls of a turn, in one block or in one each."""
        tags = self._tags
        written = [self._render(name, arguments) for name, arguments in calls]
        groups = written if tags.one_a_block else ["\n".join(written)]
        return "\n".join(f"{tags.block}\n{group}\n{tags.block_end}" for group in groups)

    def render_turn(self, content: str, calls: Sequence[Call]) -> str:
        """Text, then calls."""
        if not calls:
            return content
        return (content + self._tags.before_block if content else "") + self.render_calls(calls)

    def render_result(self, text: str) -> str:
        """A tool result, as the models' own templates wrap it."""
        return self._result.replace("{}", text) if self._result else super().render_result(text)

    # --- reading ---

    def _read_block(
        self, text: str, start: int, tools: Tools | None
    ) -> tuple[list[ParsedCall], int]:
        tags = self._tags
        if not text.startswith(tags.block, start):
            raw, position = self._recover(text, start, start + 1)
            return [
                failed(raw, f"the call is not between {tags.block} and {tags.block_end}")
            ], position
        calls: list[ParsedCall] = []
        position = start + len(tags.block)
        while True:
            position = skip_space(text, position)
            if text.startswith(tags.block_end, position):
                end = position + len(tags.block_end)
                if not calls:
                    calls = [
                        failed("", f"there is no call between {tags.block} and {tags.block_end}")
                    ]
                return calls, end
            opened = self._call.match(text, position)
            if opened is not None:
                call, position = self._read_call(text, position, opened, tools)
                calls.append(call)
            elif position == len(text) or self._outside.match(text, position):
                error = f"the call has no closing {tags.block_end}"
                return unclosed(calls, text[start:position], error), position
            else:
                near = text[position : position + 20]
                raw, position = self._recover(text, position, position + 1)
                if calls and (position == len(text) or self._outside.match(text, position)):
                    continue  # half a closing tag
                calls.append(failed(raw, f"no call begins at {near!r}; the form is {self.form}"))

    def _read_call(
        self, text: str, start: int, opened: re.Match[str], tools: Tools | None
    ) -> tuple[ParsedCall, int]:
        tags = self._tags
        name = opened["name"].strip()
        parameters = parameters_of(tools, name)
        arguments: dict[str, Any] = {}
        position, error = opened.end(), "" if name else "the call has no function name"
        while True:
            position = skip_space(text, position)
            if text.startswith(tags.call_end, position):
                position += len(tags.call_end)
                raw = text[start:position]
                return (
                    failed(raw, error, name) if error else checked(name, arguments, raw)
                ), position
            argument = self._argument.match(text, position)
            end = -1 if argument is None else text.find(tags.argument_end, argument.end())
            if argument is None or end < 0:
                raw, after = self._recover(text, start, position)
                problem = self._unreadable(text, position, argument)
                return failed(raw, problem, name), after
            written = text[argument.end() : end].removeprefix(tags.newline)
            value, problem = self._value(written.removesuffix(tags.newline), argument, parameters)
            error = error or problem
            arguments[argument["name"].strip()] = value
            position = end + len(tags.argument_end)

    def _value(
        self, text: str, argument: re.Match[str], parameters: Mapping[str, Any]
    ) -> tuple[Any, str]:
        name = argument["name"].strip()
        kind = argument["string"] if self._tags.typed else None
        if kind == "true":
            return text, ""
        if kind == "false":
            value, error = read_literal(text)
            return value, error and not_json(name, error)
        return read_value(text, parameters, name)

    def _unreadable(self, text: str, position: int, argument: re.Match[str] | None) -> str:
        if argument is not None:
            return f"the argument {argument['name'].strip()!r} has no closing {self._tags.argument_end}"
        if self._marks.search(text, position) is None:
            return f"the call has no closing {self._tags.call_end}"
        return (
            f"neither an argument nor {self._tags.call_end} begins at {text[position : position + 20]!r}; "
            f"the form is {self.form}"
        )

    def _recover(self, text: str, start: int, position: int) -> tuple[str, int]:
        mark = self._marks.search(text, position)
        if mark is None:
            return text[start:], len(text)
        stop = mark.end() if mark.group() == self._tags.call_end else mark.start()
        return text[start:stop], stop

    # --- writing ---

    def _render(self, name: str, arguments: Mapping[str, Any]) -> str:
        tags = self._tags
        lines = [tags.call.format(self._tag_name(name))]
        for key, value in arguments.items():
            written = value if isinstance(value, str) else to_json(value)
            if tags.argument_end in written:
                raise ValueError(
                    f"the {self.name} format cannot write the argument {key!r} of {name!r}: its text holds "
                    f"{tags.argument_end}, which would end it (reword the text)"
                )
            opened = tags.argument.format(self._tag_name(key))
            if tags.typed:
                kind = "true" if isinstance(value, str) else "false"
                opened = f'{opened[:-1]} string="{kind}">'
            lines.append(opened + tags.newline + written + tags.newline + tags.argument_end)
        return "\n".join([*lines, tags.call_end])

    def _tag_name(self, name: str) -> str:
        if not re.fullmatch(r'[^<>"\s](?:[^<>"\n]*[^<>"\s])?', name):
            raise ValueError(
                f"the {self.name} format cannot write the name {name!r} in a tag (rename it)"
            )
        return name

    def _form(self) -> str:
        tags = self._tags
        opened = tags.argument.format("argument-name")
        if tags.typed:
            opened = f'{opened[:-1]} string="true|false">'
        value = f"{tags.newline}value{tags.newline}"
        return (
            f"{tags.block}\n{tags.call.format('tool-name')}\n{opened}{value}{tags.argument_end}\n"
            f"{tags.call_end}\n{tags.block_end}"
        )


def _tag_pattern(tag: str, *, typed: bool = False) -> re.Pattern[str]:
    before, _, after = tag.partition("{}")
    stops = re.escape(after[0])
    kind = r'(?:\s+string="(?P<string>true|false)")?' if typed else ""
    tail = re.escape(after[:-1]) + kind + re.escape(after[-1])
    return re.compile(f"{re.escape(before)}(?P<name>[^{stops}<\\n]*){tail}")


_DSML = "｜DSML｜"


def _dsml(block: str) -> Tags:
    return Tags(
        block=f"<{_DSML}{block}>",
        block_end=f"</{_DSML}{block}>",
        call=f'<{_DSML}invoke name="{{}}">',
        call_end=f"</{_DSML}invoke>",
        argument=f'<{_DSML}parameter name="{{}}">',
        argument_end=f"</{_DSML}parameter>",
        typed=True,
        tokens=(_DSML,),
        before_block="\n\n",
    )


def _qwen(block: str, **options: Any) -> Tags:
    return Tags(
        block=f"<{block}>",
        block_end=f"</{block}>",
        call="<function={}>",
        call_end="</function>",
        argument="<parameter={}>",
        argument_end="</parameter>",
        one_a_block=True,
        before_block="\n\n",
        **options,
    )


QWEN3_CODER = TaggedFormat(
    "qwen3_coder",
    _qwen("tool_call", newline="\n"),
    listing=("<tool_call>", "<function=", "<parameter="),
)
SEED_OSS = TaggedFormat(
    "seed_oss",
    _qwen("seed:tool_call", think=("<seed:think>", "</seed:think>")),
    listing=("<seed:tool_call>",),
)
MINIMAX_M2 = TaggedFormat(
    "minimax_m2",
    Tags(
        block="<minimax:tool_call>",
        block_end="</minimax:tool_call>",
        call='<invoke name="{}">',
        call_end="</invoke>",
        argument='<parameter name="{}">',
        argument_end="</parameter>",
    ),
    listing=("<minimax:tool_call>",),
    result="<response>{}</response>",
)
DEEPSEEK_V32 = TaggedFormat(
    "deepseek_v32",
    _dsml("function_calls"),
    listing=(f"<{_DSML}function_calls>",),
    result="<function_results>\n<result>{}</result>\n</function_results>",
)
DEEPSEEK_V4 = TaggedFormat(
    "deepseek_v4",
    _dsml("tool_calls"),
    listing=(f"<{_DSML}tool_calls>",),
    result="<tool_result>{}</tool_result>",
)
