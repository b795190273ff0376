"""Calls that cannot be read: each is reported once, with its reason, and does not hide the next."""

import re

import pytest
from format_cases import FORMATS, tool

from rollout_sidecar.formats import get_format

TOOL = {
    "function": {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "object"}, "b": {"type": "array"}}},
    }
}
QWEN = "<tool_call><function=f>{}</function></tool_call>"
MINIMAX = "<minimax:tool_call>{}</minimax:tool_call>"
DSML = (
    '<｜DSML｜function_calls><｜DSML｜invoke name="f">{}</｜DSML｜invoke></｜DSML｜function_calls>'
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "qwen3_coder",
            "<tool_call></tool_call>",
            "there is no call between <tool_call> and </tool_call>",
        ),
        ("qwen3_coder", "<tool_call>", "no closing </tool_call>"),
        ("qwen3_coder", "<tool_call><function=f></function>", "no closing </tool_call>"),
        ("qwen3_coder", "<tool_call><function=f>", "no closing </function>"),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1",
            "the argument 'a' has no closing </parameter>",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1</function></tool_call>",
            "the argument 'a' has no closing",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f>a=1</function></tool_call>",
            "neither an argument nor </function> begins at 'a=1",
        ),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>", "no function name"),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "no call begins at"),
        ("qwen3_coder", "<function=f></function>", "not between <tool_call> and </tool_call>"),
        (
            "qwen3_coder",
            QWEN.format("<parameter=a>\n{x:1}\n</parameter>"),
            "value of 'a' is not valid JSON: Expecting",
        ),
        (
            "minimax_m2",
            MINIMAX.format('<invoke name="f"><parameter name="b">[1] 2</parameter></invoke>'),
            "value of 'b' is not valid JSON: text follows the value: '2'",
        ),
        (
            "minimax_m2",
            "<minimax:tool_call><invoke name=f></invoke></minimax:tool_call>",
            "no call begins at '<invoke name=f>",
        ),
        (
            "deepseek_v32",
            DSML.format('<｜DSML｜parameter name="c" string="false">x</｜DSML｜parameter>'),
            "value of 'c' is not valid JSON",
        ),
        ("glm45", "<tool_call></tool_call>", "does not begin with a function name"),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>', "does not begin with a function name"),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key></tool_call>",
            "no argument begins at '<arg_key>a</arg_key>",
        ),
        ("glm45", "<tool_call>f", "no closing </tool_call>"),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>[</arg_value></tool_call>",
            "value of 'a' is not valid JSON",
        ),
        ("llama3_json", '{"name": "f", "parameters": {x:1}}', "invalid JSON: .* at character 29"),
        ("llama3_json", '{"name": "f", "param', "invalid JSON"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', '"parameters" must be a JSON object'),
        ("llama3_json", "<|python_tag|>print(1)", "no call follows <|python_tag|>; the form is"),
        ("llama3_json", "<|python_tag|>", "no call follows"),
        ("llama3_json", '<|python_tag|>{"parameters": {}}', 'has no "name"'),
        ("llama3_json", "<|python_tag|>search.call(1)", "every argument as name=value, not '1'"),
        ("pythonic", "[f(1)]", "every argument as name=value, not '1'"),
        ("pythonic", "[f(a=b)]", "cannot read the argument 'a': 'b' is not a literal"),
        ("pythonic", "[f(a=open('x').read())]", "is not a literal: write the value itself"),
        ("pythonic", "[f(a=[x for x in (1,)])]", "is not a literal"),
        ("pythonic", "[f(a=f'{x}')]", "is not a literal"),
        ("pythonic", "[f(a=b'x')]", "is not a literal"),
        ("pythonic", "[f(a={1, 2})]", "is not a literal"),
        ("pythonic", "[f(a={1: 2})]", "keys of an object must be strings"),
        ("pythonic", "[f(a=1e999)]", "too large"),
        ("pythonic", "[f(a=-99999999999999999999)]", "does not fit 64 bits"),
        ("pythonic", "[f(a='\\ud800')]", "half of a surrogate pair"),
        ("pythonic", "[f(a=1, a=2)]", "'a' is given twice"),
        ("pythonic", "[f(a=(1]))]", "cannot read the argument 'a'"),
        ("pythonic", "[f(**x)]", "cannot read"),
        ("pythonic", "[f(a=1", "the call has no closing )"),
        ("pythonic", "[f(a='x", "the call has no closing )"),
        ("pythonic", "[f(a=1)", "the list of calls has no closing ]"),
        ("pythonic", "[f(a=1),", "the list of calls has no closing ]"),
        ("gemma3", "```tool_code\n```", "the block of calls is empty"),
        ("gemma3", "```tool_code\nf(a=1)\n", "no closing ```"),
        ("gemma3", "```tool_code\nx = 1\n```", "no call begins at 'x = 1"),
        ("gemma3", "```tool_code\nprint(f(a=1)\n```", "print( has no closing )"),
        ("mistral", "[TOOL_CALLS]", "no call follows [TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] I will call f", "no call follows [TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]", "holds no call"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{x}", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "the arguments must be a JSON object"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "no closing ]"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}}]', 'has no "name"'),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
            "no <｜tool▁call▁begin｜> follows",
        ),
        (
            "deepseek_v31",
            "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>",
            "the call has no <｜tool▁sep｜>",
        ),
        (
            "deepseek_v31",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
            "no closing <｜tool▁call▁end｜>",
        ),
        (
            "deepseek_v31",
            "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "no function name",
        ),
        (
            "deepseek_v31",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} x<｜tool▁call▁end｜>",
            "text follows the arguments",
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{x<|tool_call_end|>",
            "invalid JSON",
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "no function name",
        ),
        ("minimax_m1", "<tool_calls></tool_calls>", "there is no call"),
        ("minimax_m1", '<tool_calls>{"name": "f"}', "no closing </tool_calls>"),
        ("minimax_m1", "<tool_calls>\nf()\n</tool_calls>", "invalid JSON"),
        ("functiongemma", "<start_function_call>f{}<end_function_call>", "no call:name{ follows"),
        (
            "functiongemma",
            "<start_function_call>call:f{a:<escape>x}<end_function_call>",
            "a text has no closing <escape>",
        ),
        ("gemma4", "<|tool_call>call:f{a:London}<tool_call|>", 'write a text as <|"|>text<|"|>'),
        ("gemma4", "<|tool_call>call:f{a:1 b:2}<tool_call|>", "expected , or } at"),
        ("gemma4", "<|tool_call>call:f{a}<tool_call|>", "no : follows the argument name 'a'"),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", "no value begins at"),
        ("gemma4", "<|tool_call>call:f{:1}<tool_call|>", "no argument name begins at"),
        (
            "gemma4",
            "<|tool_call>call:f{a:99999999999999999999}<tool_call|>",
            "does not fit 64 bits",
        ),
        ("gemma4", "<|tool_call>call:f{} x<tool_call|>", "text follows the arguments"),
        ("gemma4", "<|tool_call>call:f{a:1}", "no closing <tool_call|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{x:1}<|call|>", "invalid JSON"),
        (
            "harmony",
            "<|channel|>commentary to=functions.f<|message|>{} x<|call|>",
            "text follows the arguments",
        ),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{}", "no closing <|call|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|call|>", "has no <|message|>"),
        ("harmony", "<|channel|>commentary to=functions.f", "has no <|message|>"),
    ],
)
def test_a_failed_attempt_is_reported_with_its_reason(name: str, text: str, message: str):
    (call,) = get_format(name).parse(text, tools=[TOOL])
    assert call.arguments is None
    assert re.search(".*".join(map(re.escape, message.split(".*"))), call.error)
    assert call.raw
    assert call.raw in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_call_does_not_hide_the_next(name: str):
    found = get_format(name)
    good = found.render_call("g", {"a": 1})
    bad = good.replace("1", "{x")
    first, second = found.parse(f"{bad}\n{good}", tools=[tool("g", {"a": {}})])
    assert first.error
    assert (second.name, second.arguments) == ("g", {"a": 1})


@pytest.mark.parametrize("name", ["mistral_v3", "minimax_m2", "minimax_m1", "kimi_k2", "pythonic"])
def test_a_bad_call_does_not_hide_those_beside_it(name: str):
    text = get_format(name).render_calls([("f", {"a": 1}), ("g", {"a": 22222}), ("h", {"a": 3})])
    parsed = get_format(name).parse(text.replace("22222", "?"))
    assert [call.name for call in parsed if not call.error][0] == "f"
    assert [bool(call.error) for call in parsed][:2] == [False, name != "minimax_m2"]


@pytest.mark.parametrize("name", FORMATS)
def test_raw_texts_of_a_turn_are_all_of_its_calls(name: str):
    found = get_format(name)
    written = found.render_calls([("f", {"a": "x"}), ("g", {})])
    rest = written
    for call in found.parse(written):
        assert call.raw in rest
        rest = rest.replace(call.raw, "", 1)
    assert rest.strip() in ("", "<|start|>")


@pytest.mark.parametrize(
    ("name", "function", "arguments", "message"),
    [
        (
            "qwen3_coder",
            "f",
            {"a": "x</parameter>"},
            "the argument 'a' of 'f': its text holds </parameter>, which would",
        ),
        ("qwen3_coder", "f>", {}, "cannot write the name 'f>' in a tag"),
        ("glm45", "f", {"a": ["</arg_value>"]}, "its text holds </arg_value>"),
        ("glm45", "f", {"": 1}, "cannot write the argument name ''"),
        ("glm45", "f g", {}, "cannot write the name 'f g'"),
        ("gemma4", "f", {"a": '<|"|>'}, "a text that holds"),
        ("gemma4", "f{", {}, "cannot write the name 'f{'"),
        ("pythonic", "f(", {}, r"cannot name the tool 'f\('"),
    ],
)
def test_what_a_format_cannot_write(name: str, function: str, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        get_format(name).render_call(function, arguments)


def test_long_bad_texts_are_read_in_time_linear_in_them():
    for name in FORMATS:
        found = get_format(name)
        for marker in (*found.markers[:2], "[f(", "{", '"', "'", "to=functions.f<|message|>"):
            found.parse(marker * 4_000)
