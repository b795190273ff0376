"""What every format promises: calls come back as they were written, and no text breaks a parser."""

import json

import msgspec
import pytest
from format_cases import ARGUMENTS, FORMATS, MARKERS, TEXTS, WORDS, tool
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout_sidecar.formats import ParsedCall, get_format

pytestmark = pytest.mark.parametrize("name", FORMATS)

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


def same(a, b) -> bool:
    """Equal with equal types: 1 is not True, 1.0 is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def written(render, *call) -> str:
    """What `render` writes; a call that the format cannot write is no example."""
    try:
        return render(*call)
    except ValueError as error:
        assume("which would end it" not in str(error))
        raise


def parsed_back(name: str, calls, text: str) -> list[ParsedCall]:
    tools = [tool(*call) for call in calls]
    return get_format(name).parse(text, tools=tools)


@SETTINGS
@given(function=WORDS, arguments=ARGUMENTS, content=st.sampled_from(["", "Let me see."]))
def test_a_rendered_call_parses_back(name: str, function: str, arguments: dict, content: str):
    text = written(get_format(name).render_turn, content, [(function, arguments)])
    (call,) = parsed_back(name, [(function, arguments)], text)
    assert call.error == ""
    assert call.name == function
    assert same(call.arguments, arguments)
    assert call.raw in text


@SETTINGS
@given(first=ARGUMENTS, second=ARGUMENTS)
def test_several_calls_parse_back_in_order(name: str, first: dict, second: dict):
    calls = [("f", first), ("g", second), ("h", {})]
    text = written(get_format(name).render_calls, calls)
    parsed = parsed_back(name, calls, text)
    assert [(call.name, call.error) for call in parsed] == [("f", ""), ("g", ""), ("h", "")]
    assert same([call.arguments for call in parsed], [first, second, {}])


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_letter_by_letter(name: str, text: str):
    found = get_format(name)
    arguments = {"a": text, "b": [text, {"k": text}]}
    (call,) = parsed_back(name, [("f", arguments)], found.render_call("f", arguments))
    assert call.arguments == arguments


def test_texts_with_markers_come_back_or_are_refused(name: str):
    found = get_format(name)
    refused = []
    for marker in (*found.markers, "</parameter>", "</｜DSML｜parameter>"):
        arguments = {"a": f"x{marker}y\n{marker}"}
        try:
            text = found.render_call("f", arguments)
        except ValueError:
            refused.append(marker)
            continue
        (call,) = parsed_back(name, [("f", arguments)], text)
        assert call.arguments == arguments
    assert refused == UNWRITABLE.get(name, [])


UNWRITABLE = {
    "qwen3_coder": ["</parameter>"],
    "seed_oss": ["</parameter>"],
    "minimax_m2": ["</parameter>"],
    "deepseek_v32": ["</｜DSML｜parameter>"],
    "deepseek_v4": ["</｜DSML｜parameter>"],
    "glm45": ["</arg_value>"],
    "glm47": ["</arg_value>"],
    "functiongemma": ["<escape>"],
    "gemma4": ['<|"|>'],
}
"""Formats without escapes cannot write the text that ends a text."""

PIECES = st.sampled_from(
    [
        *MARKERS,
        *("<think>", "</think>", "\n", " ", "x", '{"name": "f"}', '{"name":', "[f(a=1", "[f(", ")"),
        *("]", "}", "{", '"', "'", ",", ":", "call:f{", "a:1", "f", "\\ud800", "9" * 30, "1e999"),
        *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "```json\n", "```"),
        *('<invoke name="f">', '<parameter name="a">', "</invoke>", "to=functions.f", "print("),
        *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "f(a='\\d')", "f(a=b)", "NaN"),
    ]
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pieces=st.lists(PIECES, max_size=14), think_open=st.booleans())
def test_no_text_breaks_the_parser_and_its_answer_can_be_sent(name: str, pieces, think_open: bool):
    text = "".join(pieces)
    calls = get_format(name).parse(text, think_open=think_open, tools=[tool("f", {"a": 1})])
    for call in calls:
        assert call.raw in text
        assert (call.arguments is None) == bool(call.error)
        msgspec.msgpack.encode([call.name, call.arguments, call.call_id])


@SETTINGS
@given(arguments=ARGUMENTS, cut=st.floats(0, 1))
def test_a_call_that_was_cut_short_is_no_call(name: str, arguments: dict, cut: float):
    found = get_format(name)
    arguments = {**arguments, "z": [1, 2]}
    text = written(found.render_call, "f", arguments)
    # Before the closing marker: up to the end of the last value.
    text = text[: int(cut * text.rindex("2"))]
    calls = parsed_back(name, [("f", arguments)], text)
    assert all(call.error for call in calls)


def test_a_call_without_the_end_of_its_end_is_reported_once(name: str):
    found = get_format(name)
    for written in (found.render_call("f", {"a": "x"}), found.render_calls([("f", {}), ("g", {})])):
        names = [call.name for call in found.parse(written)]
        parsed = found.parse(written[:-1])
        if name not in (
            "deepseek_v3",
            "deepseek_v31",
            "kimi_k2",
        ):  # the end of a section may be missing
            assert len(parsed) == len(names)
            assert parsed[-1].error
        assert [call.name for call in parsed if not call.error] == names[
            : len(names) - bool(parsed[-1].error)
        ]


@pytest.mark.parametrize("deep", ["[" * 50_000, '{"a":' * 50_000, "(" * 50_000, "{a:" * 50_000])
def test_deep_nesting_is_an_error_not_a_crash(name: str, deep: str):
    found = get_format(name)
    text = found.render_call("f", {"a": 12345})
    for call in found.parse(text.replace("12345", deep), tools=[tool("f", {"a": {}})]):
        assert call.error


@pytest.mark.parametrize("think_open", [False, True])
def test_thinking_holds_no_calls(name: str, think_open: bool):
    found = get_format(name)
    opened, closed = found.think
    call = found.render_call("f", {})
    thought = f"the form is {call}" if name != "harmony" else "the form is {...}"
    prefix = "" if think_open and name != "harmony" else opened
    names = [c.name for c in found.parse(f"{prefix}{thought}{closed}{call}", think_open=think_open)]
    assert names == ["f"]
    if name != "harmony":
        assert found.parse(f"{prefix}{call}", think_open=think_open) == []
        assert found.parse(f"{call}{opened}{call}") == []


def test_an_answer_is_no_call(name: str):
    found = get_format(name)
    for text in (
        "",
        "The answer is 4.\n#### 4",
        '{"answer": 4}',
        "[1, 2]",
        "f(x) = [x(1)]",
        "see [f](g)",
    ):
        assert found.parse(text) == []


def test_system_text_lists_tools_and_shows_the_form(name: str):
    found = get_format(name)
    text = found.system_text([tool("get_weather", {"city": "x"})])
    assert '"name": "get_weather"' in text
    assert text.endswith(found.form)


def test_a_result_is_in_its_text(name: str):
    assert "42 °C" in get_format(name).render_result("42 °C")
