import json
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sidecar.formats import get_format

HERMES = get_format("hermes")


def call(name: str = "A", arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def names(text: str, **options) -> list[str]:
    return [parsed.name for parsed in HERMES.parse(text, **options)]


def error(text: str) -> str:
    (parsed,) = HERMES.parse(text)
    assert parsed.arguments is None
    return parsed.error


def test_one_call():
    text = 'Let me see.\n<tool_call>\n{"arguments": {"x":1},  "name": "f"}\n</tool_call>'
    (parsed,) = HERMES.parse(text)
    assert (parsed.name, parsed.arguments, parsed.error) == ("f", {"x": 1}, "")
    assert parsed.raw == '<tool_call>\n{"arguments": {"x":1},  "name": "f"}\n</tool_call>'


def test_many_calls_in_order_with_duplicates():
    assert names(call("A") + "\n" + call("B") + " and " + call("A")) == ["A", "B", "A"]


def test_no_call():
    assert HERMES.parse("The answer is 4. #### 4") == []
    assert HERMES.parse("") == []


@pytest.mark.parametrize(
    ("text", "think_open", "expected"),
    [
        (f"<think>call {call('A')}</think>{call('A')}", False, ["A"]),
        (f"<think>{call('A')}</think>no more", False, []),
        (f"<think>{call('A')}", False, []),
        (f"{call('A')}<think>hm", False, []),
        (f"{call('A')}</think>{call('B')}", True, ["B"]),
        (f"{call('A')}", True, []),
        # A prompt that opened the thinking, and a caller who did not say so.
        (f"{call('A')}</think>{call('B')}", False, ["B"]),
        # "<think>" and "</think>" mentioned in thinking text.
        (f"<think>a <think> b</think>{call('A')}</think>{call('B')}", False, ["B"]),
        (f"<think>x</think>{call('A')}<think>y</think>{call('B')}", False, ["B"]),
        (f"<think>the form is <tool_call></think>{call('A')}", False, ["A"]),
    ],
)
def test_thinking_text_holds_no_calls(text: str, think_open: bool, expected: list[str]):
    assert names(text, think_open=think_open) == expected


def test_markers_inside_strings_are_text():
    text = call("write", json.dumps({"text": "</think> </tool_call> <tool_call> <think>"}))
    (parsed,) = HERMES.parse(text)
    assert parsed.arguments == {"text": "</think> </tool_call> <tool_call> <think>"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '<tool_call>{"name": "f", "arguments": {x:1}}</tool_call>',
            "invalid JSON: .* at character 28",
        ),
        ("<tool_call></tool_call>", "invalid JSON"),
        ("<tool_call>", "no closing </tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}}', "no closing </tool_call>"),
        ('<tool_call>{"name": "f", "argum', "no closing </tool_call>"),
        ('<tool_call>{"name": "f"} {"name": "g"}</tool_call>', "text follows the object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'has no "name"'),
        ('<tool_call>["f", {}]</tool_call>', "must be a JSON object of the form"),
        (call("f", "[1]"), '"arguments" must be a JSON object'),
        (call("f", '"x = 1"'), '"arguments" must be a JSON object'),
        (call("f", '{"x": NaN}'), "NaN is not a JSON value"),
        (call("f", '{"x": 1e999}'), "too large"),
        (call("f", '{"x": ' + "9" * 25 + "}"), "does not fit 64 bits; write it as a string"),
        (call("f", '{"x": "\\ud800"}'), "half of a surrogate pair"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
    ],
)
def test_every_failed_attempt_is_reported_with_its_reason(text: str, message: str):
    assert re.search(message, error(text))


def test_a_bad_call_does_not_hide_the_next():
    good = call("A")
    for bad in ("<tool_call>{oops}</tool_call>", '<tool_call>{"name": "f",'):
        first, second = HERMES.parse(bad + "\n" + good)
        assert first.error
        assert first.raw.strip() == bad
        assert second.name == "A"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("null", {}),
        (r'"{\"x\": 1}"', {"x": 1}),
        ('{"x": 1, "x": 2}', {"x": 2}),
        ('{"code": "a\nb"}', {"code": "a\nb"}),
    ],
    ids=["null", "JSON text", "repeated key", "line break in a string"],
)
def test_harmless_slips_are_accepted(arguments: str, expected: dict):
    (parsed,) = HERMES.parse(call("f", arguments))
    assert (parsed.arguments, parsed.error) == (expected, "")


def test_arguments_may_be_left_out():
    (parsed,) = HERMES.parse('<tool_call>{"name": "now"}</tool_call>')
    assert (parsed.name, parsed.arguments, parsed.error) == ("now", {}, "")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(min_size=1), st.dictionaries(st.text(), JSON_VALUES, max_size=3))
def test_a_rendered_call_parses_back(name: str, arguments: dict):
    (parsed,) = HERMES.parse("So: " + HERMES.render_call(name, arguments))
    assert (parsed.name, parsed.arguments, parsed.error) == (name, arguments, "")


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "f"}',
        '{"name":',
        "\\ud800",
        "9" * 30,
        "x",
        "\n",
    ]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(PIECES, max_size=12), st.booleans())
def test_no_text_breaks_the_parser_and_its_answer_can_be_sent(pieces: list[str], think_open: bool):
    text = "".join(pieces)
    calls = HERMES.parse(text, think_open=think_open)
    assert len(calls) <= text.count("<tool_call>")
    for parsed in calls:
        assert parsed.raw in text
        assert (parsed.arguments is None) == bool(parsed.error)
        msgspec.msgpack.encode([parsed.name, parsed.arguments])


def test_system_text_lists_tools_and_shows_the_form():
    tool = {"type": "function", "function": {"name": "é", "description": "<d>"}}
    text = HERMES.system_text([tool])
    assert f"<tools>\n{json.dumps(tool, ensure_ascii=False)}\n</tools>" in text
    assert text.endswith(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def test_unknown_format():
    with pytest.raises(
        ValueError, match="unknown tool format 'xml'; there are: deepseek_v3, .*, hermes, .*"
    ):
        get_format("xml")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("qwen25", "hermes"),  # SGLang
        ("llama3", "llama3_json"),
        ("deepseekv31", "deepseek_v31"),
        ("gpt-oss", "harmony"),  # verl
        ("glm", "glm45"),
        ("seed", "seed_oss"),
        ("minimax", "minimax_m2"),
        ("kimi", "kimi_k2"),
    ],
)
def test_names_of_other_projects_are_known(theirs: str, ours: str):
    assert get_format(theirs).name == ours
