"""The format that a chat template asks for: small templates written here, and real ones where they are at hand."""

import json

import pytest
from format_cases import FORMATS, tool
from template_cases import from_template, load, model_folders

from rollout_sidecar.formats import choose_format, explain_choice, get_format
from rollout_sidecar.tokenizer import ChatTokenizer

TURNS = (
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{%- set f = call.function %}CALL{%- endfor %}<|end_of_turn|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
TOOLS = "{%- if tools %}{{ tools | tojson }} LISTING {%- endif %}"
VALUES = "{%- for k, v in f.arguments.items() %}{}{%- endfor %}"


def template(call: str, listing: str = "") -> ChatTokenizer:
    return from_template(TOOLS.replace("LISTING", listing) + TURNS.replace("CALL", call))


HERMES_CALL = (
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
)
QWEN_CALL = (
    "<tool_call><function={{ f.name }}>"
    + VALUES.replace("{}", "<parameter={{ k }}>\n{{ v }}\n</parameter>")
    + "</function></tool_call>"
)
GLM_CALL = (
    "<tool_call>{{ f.name }}"
    + VALUES.replace("{}", "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>")
    + "</tool_call>"
)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (HERMES_CALL, "hermes"),
        (QWEN_CALL, "qwen3_coder"),
        (GLM_CALL, "glm47"),
        (
            GLM_CALL.replace("<arg_", "{{ '\n' }}<arg_").replace("</tool", "{{ '\n' }}</tool"),
            "glm45",
        ),
        ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "llama3_json"),
        (
            '<|python_tag|>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
            "llama3_json",
        ),
        ("[{{ f.name }}(x={{ f.arguments.x }})]", "pythonic"),
        ('[{{ f.name }}(x="{{ f.arguments.x }}")]', "pythonic"),
        ("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", "mistral"),
        (
            '[TOOL_CALLS][{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}]',
            "mistral_v3",
        ),
        # A template that takes arguments only as text.
        (HERMES_CALL.replace("f.arguments | tojson", "f.arguments + ''"), "hermes"),
    ],
)
def test_the_call_that_a_template_writes_decides(call: str, name: str):
    choice = explain_choice(template(call, "use [func_name1(x=1)]"))
    assert choice.format.name == name
    assert choice.reason == "the chat template writes tool calls in this format"


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_template_says_when_it_lists_tools_decides_if_it_writes_no_calls(name: str):
    choice = explain_choice(template("", " ".join(get_format(name).listing)))
    # Two formats of a family may ask for calls in the same words.
    assert choice.format.listing == get_format(name).listing
    assert "when it lists tools" in choice.reason


def test_a_template_that_knows_no_tools_gets_hermes(chatml_tokenizer: ChatTokenizer):
    choice = explain_choice(chatml_tokenizer)
    assert choice.format.name == "hermes"
    assert "knows no tools" in choice.reason


@pytest.mark.parametrize(
    "call",
    [
        "<<{{ f.name }} {{ f.arguments.x }}>>",
        # What would be Llama's JSON if it stood alone.
        '<TOOLCALL>{{ \'\n\' }}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</TOOLCALL>',
    ],
)
def test_an_unknown_format_is_said(call: str):
    choice = explain_choice(template(call, "write <<tool x>>"))
    assert choice.format.name == "hermes"
    assert (
        "neither that nor how it writes a call is a format known here; set the format"
        in choice.reason
    )


def test_the_tiny_tokenizer_has_hermes(tiny_tokenizer: ChatTokenizer):
    assert choose_format(tiny_tokenizer).name == "hermes"


# --- real templates ---

REAL = {
    "deepseek_r1_distill_qwen": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "devstral": "mistral",
    "gemma_3": "hermes",
    "gemma_4": "gemma4",
    "glm_4_6": "glm45",
    "glm_4_7": "glm47",
    "gpt_oss": "harmony",
    "kimi_k2": "kimi_k2",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "minimax_m1": "minimax_m1",
    "minimax_m2": "minimax_m2",
    "ministral_3": "mistral",
    "mistral_nemo": "mistral_v3",
    "mistral_small_3_2": "mistral",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_coder": "qwen3_coder",
    "seed_oss": "seed_oss",
    "smollm2": "hermes",
}
KNOWS_TOOLS = [name for name in REAL if name not in ("gemma_3", "smollm2")]


@pytest.mark.parametrize("model", REAL)
def test_real_templates(model: str):
    assert explain_choice(load(model)).format.name == REAL[model]


@pytest.mark.parametrize("model", KNOWS_TOOLS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"city": 'Zü"rich\n\\ 東京', "days": 3, "exact": True},
        {"where": {"lat": [1.5, {"deep": None}]}, "x": "<b> & </think> </tool_call> 'it'"},
    ],
    ids=["none", "scalars", "nested"],
)
def test_a_call_that_a_real_template_writes_parses_back(model: str, arguments: dict):
    tokenizer = load(model)
    call = written_call(tokenizer, arguments)
    found = choose_format(tokenizer)
    text = tokenizer.special_pattern.sub(
        lambda match: match.group() if match.group() in found.markers else "", call
    )
    (parsed,) = found.parse(text, tools=[tool("get_weather", arguments)])
    assert parsed.error == ""
    assert (parsed.name, parsed.arguments) == ("get_weather", arguments)


def written_call(tokenizer: ChatTokenizer, arguments: dict) -> str:
    """What a template writes for a turn that is one call."""
    user = {"role": "user", "content": "How is the weather?"}
    tools = [tool("get_weather", arguments)]
    before = tokenizer.render([user], tools, add_generation_prompt=False)
    for content in ("", None):
        for given in (arguments, json.dumps(arguments, ensure_ascii=False)):
            call = {
                "id": "abcdefgh1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": given},
            }
            turn = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                text = tokenizer.render([user, turn], tools, add_generation_prompt=False)
            except ValueError:
                continue
            written = text.removeprefix(before)
            if "get_weather" in written:
                return written.removeprefix("<|start_header_id|>assistant<|end_header_id|>\n\n")
    raise AssertionError("the template writes no calls")


@pytest.mark.parametrize("model", [folder.name for folder in model_folders()])
def test_every_real_template_gets_a_format_and_a_reason(model: str):
    try:
        tokenizer = load(model)
    except ValueError as error:
        pytest.skip(f"not a template for plain conversations: {error}")
    choice = explain_choice(tokenizer)
    assert choice.format.name in FORMATS
    assert choice.reason
