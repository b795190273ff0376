"""Turns as models write them, format by format, and the calls in them."""

import pytest

from rollout_sidecar.formats import get_format

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "place": {"type": "object"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["string", "integer"]},
                "level": {"enum": [1, 2]},
                "points": {"$ref": "#/$defs/Points"},
                "anything": {},
            },
            "$defs": {"Points": {"type": "array", "items": {"type": "number"}}},
        },
    },
}
ZURICH = ("get_weather", {"city": 'Zü"rich', "days": 3})
BERN = ("get_weather", {"city": "Bern"})

CASES = {
    "hermes": (
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zü\\"rich", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    ),
    "qwen3_coder": (
        'I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZü"rich\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
    ),
    "seed_oss": (
        "<seed:think>hm</seed:think>I look.\n<seed:tool_call>\n<function=get_weather>\n"
        '<parameter=city>Zü"rich</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n'
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Bern</parameter>\n</function>\n</seed:tool_call>"
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Zü\\"rich", "days": 3}}; '
        '{"name": "get_weather", "parameters": {"city": "Bern"}}'
    ),
    "pythonic": '[get_weather(city=\'Zü"rich\', days=3), get_weather(city="Bern")]',
    "mistral_v3": (
        'I look.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zü\\"rich", "days": 3}, "id": "abcdefgh1"},'
        ' {"name": "get_weather", "arguments": {"city": "Bern"}, "id": "abcdefgh2"}]'
    ),
    "mistral": (
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Zü\\"rich", "days": 3}'
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Zü\\"rich", "days": 3}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Bern"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zü\\"rich", "days": 3}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Bern"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": (
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Zü"rich</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    "glm45": (
        '\n<think></think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zü"rich</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
    ),
    "glm47": (
        '</think>I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zü"rich</arg_value>'
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"
    ),
    "kimi_k2": (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Zü\\"rich", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1'
        '<|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "minimax_m1": (
        "<think>\nhm\n</think>\nI look.\n<tool_calls>\n"
        '{"name": "get_weather", "arguments": {"city": "Zü\\"rich", "days": 3}}\n'
        '{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_calls>'
    ),
    "minimax_m2": (
        'hm\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Zü"rich</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_weather">\n'
        '<parameter name="city">Bern</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "gemma3": "```tool_code\nprint(get_weather(city='Zü\"rich', days=3))\nget_weather(city='Bern')\n```",
    "functiongemma": (
        '<start_function_call>call:get_weather{city:<escape>Zü"rich<escape>,days:3}<end_function_call>'
        "<start_function_call>call:get_weather{city:<escape>Bern<escape>}<end_function_call>"
    ),
    "gemma4": (
        '<|channel>thought\nhm<channel|><|tool_call>call:get_weather{city:<|"|>Zü"rich<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>}<tool_call|>'
    ),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Zü\\"rich", "days": 3}<|call|><|start|>assistant '
        'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>'
    ),
}


def calls(name: str, text: str, tools=(WEATHER,), **options) -> list[tuple]:
    parsed = get_format(name).parse(text, tools=tools, **options)
    assert [call.error for call in parsed] == [""] * len(parsed)
    return [(call.name, call.arguments) for call in parsed]


@pytest.mark.parametrize("name", CASES)
def test_two_calls_of_a_turn(name: str):
    assert calls(name, CASES[name]) == [ZURICH, BERN]
    raws = [call.raw for call in get_format(name).parse(CASES[name])]
    assert [city in raw for city, raw in zip(("Zü", "Bern"), raws, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("kimi_k2", ["functions.get_weather:0", "functions.get_weather:1"]),
        ("mistral_v3", ["abcdefgh1", "abcdefgh2"]),
        ("mistral", ["", ""]),
        ("hermes", ["", ""]),
    ],
)
def test_ids_that_the_policy_gave(name: str, ids: list[str]):
    assert [call.call_id for call in get_format(name).parse(CASES[name])] == ids


def test_an_id_between_name_and_arguments():
    (call,) = get_format("mistral").parse("[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}")
    assert (call.name, call.call_id) == ("f", "abcdefgh1")


@pytest.mark.parametrize("recipient", ["all", "user", "assistant"])
def test_a_message_to_people_is_no_call(recipient: str):
    text = f"<|channel|>commentary to={recipient}<|message|>{{}}<|end|>"
    assert get_format("harmony").parse(text) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # Llama: the tag, built-in tools, text before a call, "arguments", calls without separators (Llama 4).
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        (
            "llama3_json",
            '<|python_start|>{"name": "f", "parameters": {}}<|python_end|>',
            [("f", {})],
        ),
        ("llama3_json", '<|python_tag|>search.call(query="x")', [("search", {"query": "x"})]),
        ("llama3_json", 'Let me see.\n\n{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        ("llama3_json", '{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {}}{"name": "g", "parameters": {}}\n{"name": "h", "parameters": {}}',
            [("f", {}), ("g", {}), ("h", {})],
        ),
        ("llama3_json", '{"name": "get_weather"}', [("get_weather", {})]),
        ("llama3_json", '{"name": "Bob", "age": 3}', []),
        ("llama3_json", 'The form is {"name": "f", "parameters": {}}', []),
        (
            "llama3_json",
            '<think>\n{"name": "f", "parameters": {}}\n</think>{"name": "g", "parameters": {}}',
            [("g", {})],
        ),
        # Pythonic: names and words that Python would not take, all literals, comments of brackets in texts.
        (
            "pythonic",
            '<|python_start|>[a.b-c(from="x", max-n=-1.5)]<|python_end|>',
            [("a.b-c", {"from": "x", "max-n": -1.5})],
        ),
        (
            "pythonic",
            "[f(a=true, b=None, c=(1, [2]), d={'k': \"]),(\"})]",
            [("f", {"a": True, "b": None, "c": [1, [2]], "d": {"k": "]),("}})],
        ),
        (
            "pythonic",
            "[f(a=\"two\nlines\", b=\"it's \\d\", c='''x\"''')]",
            [("f", {"a": "two\nlines", "b": "it's \\d", "c": 'x"'})],
        ),
        ("pythonic", "[\n  f(\n    a=1,\n  ),\n  g(),\n]", [("f", {"a": 1}), ("g", {})]),
        ("pythonic", "Both:\n[f()]\n[g()]", [("f", {}), ("g", {})]),
        ("pythonic", "a list [f(1)] inside a sentence, and\n[f](https://x)", []),
        # Gemma 3: a fence inside a text.
        (
            "gemma3",
            "First:\n```tool_code\nf(a='```', b=\"x\")\n```\nand\n```tool_code\ng()\n```",
            [("f", {"a": "```", "b": "x"}), ("g", {})],
        ),
        # Mistral: between the two forms; ids of Small 3.2.
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
        (
            "mistral",
            '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{}"}',
            [("f", {"a": "[TOOL_CALLS]g[ARGS]{}"})],
        ),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}', [("f", {})]),
        ("mistral", "[THINK][TOOL_CALLS]f[ARGS]{}[/THINK][TOOL_CALLS]g[ARGS]{}", [("g", {})]),
        # DeepSeek V3 without the end of the section, as its own template writes a single call.
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
            [("f", {})],
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.a.b<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [("a.b", {})],
        ),
        # Tagged: several functions in a block, texts with tags.
        (
            "qwen3_coder",
            "<tool_call><function=f></function><function=g><parameter=a>\n<parameter=b>\n</parameter></function></tool_call>",
            [("f", {}), ("g", {"a": "<parameter=b>"})],
        ),
        (
            "gemma4",
            '<|tool_call>call:f{a:[{},[],None,true,-1.5e3],<|"|>b c<|"|>:"x"}<tool_call|>',
            [("f", {"a": [{}, [], None, True, -1500.0], "b c": "x"})],
        ),
        # Harmony: an answer, a preamble, a built-in tool in the channel of thoughts.
        (
            "harmony",
            "<|channel|>analysis<|message|>to=functions.f<|end|><|start|>assistant"
            "<|channel|>final<|message|>4<|return|>",
            [],
        ),
        (
            "harmony",
            "<|channel|>analysis to=browser.search code<|message|>{}<|call|>",
            [("browser.search", {})],
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
            [("f", {})],
        ),
    ],
)
def test_what_models_also_write(name: str, text: str, expected: list[tuple]):
    assert calls(name, text) == expected


TAGGED = {
    "qwen3_coder": "<tool_call><function=get_weather><parameter={}>\n{}\n</parameter></function></tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="get_weather"><parameter name="{}">{}</parameter></invoke>'
    "</minimax:tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("argument", "written", "value"),
    [
        ("city", "3", "3"),
        ("city", "null", "null"),
        ("city", ' {"a": 1} ', ' {"a": 1} '),
        ("days", " 3 ", 3),
        ("days", "three", "three"),  # for the check of the arguments to refuse
        ("metric", "True", True),
        ("metric", "false", False),
        ("place", '{"lat": [1, null]}', {"lat": [1, None]}),
        ("place", "{'lat': [1, None]}", {"lat": [1, None]}),
        ("note", "null", None),
        ("note", "7", "7"),
        ("either", "7", 7),
        ("either", "07", "07"),
        ("level", "2", 2),
        ("points", "[1, 2.5]", [1, 2.5]),
        ("anything", "[1]", [1]),
        ("anything", "a word", "a word"),
        ("anything", '"quoted"', '"quoted"'),
        ("unknown", "3", 3),
    ],
)
def test_the_schema_says_what_a_written_value_is(name: str, argument: str, written: str, value):
    assert calls(name, TAGGED[name].format(argument, written)) == [
        ("get_weather", {argument: value})
    ]


def test_deepseek_says_itself_what_is_a_text():
    call = (
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="{}">3</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜function_calls>"
    )
    assert calls("deepseek_v32", call.format("true")) == [("f", {"a": "3"})]
    assert calls("deepseek_v32", call.format("false")) == [("f", {"a": 3})]
    assert calls("deepseek_v4", call.format("true").replace("function_calls", "tool_calls")) == [
        ("f", {"a": "3"})
    ]


@pytest.mark.parametrize("name", CASES)
def test_calls_in_thinking_do_not_count_when_the_prompt_opened_it(name: str):
    if name == "harmony":
        pytest.skip("a message with a recipient is never a thought")
    _, closed = get_format(name).think
    text = CASES[name].rpartition(closed)[2]
    assert calls(name, f"{text}{closed}{text}", think_open=True) == [ZURICH, BERN]
    assert calls(name, text, think_open=True) == []
