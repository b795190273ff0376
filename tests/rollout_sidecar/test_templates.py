"""What templates lack, thinking, demonstrations, and the real Qwen3 template."""

import os
import shutil

import pytest
from tokenizer_cases import NEXT_ROLE_ENDS

from rollout_sidecar.conversation import Conversation, demonstration
from rollout_sidecar.formats import get_format
from rollout_sidecar.formats.hermes import HermesFormat
from rollout_sidecar.tokenizer import ChatTokenizer

HERMES = get_format("hermes")
USER = [{"role": "user", "content": "2 + 2?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
END = 2
"""<|im_end|> of the tiny tokenizers."""


def result(text: str) -> dict:
    return {"role": "tool", "content": text}


def sample(conversation: Conversation, ids: list[int], version: int = 0) -> str:
    return conversation.append_completion(ids, [-0.5] * len(ids), version)


def observe(conversation: Conversation, *messages: dict) -> list[int]:
    ids = conversation.render_observation(messages)
    conversation.append_observation(messages, ids)
    return ids


# --- what templates lack ---------------------------------------------------------------------------------------


def test_template_that_lists_tools_in_another_format_is_overruled(tiny_tokenizer_folder, tmp_path):
    shutil.copy(tiny_tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if tools %}Call as [f(x)]: {{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for m in messages %}{{ m.role + ': ' + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    text = tokenizer.decode(Conversation(tokenizer, HERMES, USER, TOOLS).token_ids)
    assert "Call as" not in text
    assert HERMES.system_text(TOOLS) in text


def test_thinking_that_the_prompt_opened_hides_calls(
    think_tokenizer: ChatTokenizer, tiny_tokenizer: ChatTokenizer
):
    written = HERMES.render_call("f", {})
    for tokenizer, expected in ((think_tokenizer, 0), (tiny_tokenizer, 1)):
        conversation = Conversation(tokenizer, HERMES, USER)
        assert conversation.think_open == (expected == 0)
        assert len(conversation.parse_calls(written)) == expected
        assert len(conversation.parse_calls(f"Hm.</think>{written}")) == 1


def test_thinking_is_kept_where_the_template_would_drop_it(think_tokenizer: ChatTokenizer):
    conversation = Conversation(think_tokenizer, HERMES, USER)
    sample(conversation, [*think_tokenizer.encode("Hm.\n</think>\n\n4"), END])
    observe(conversation, {"role": "user", "content": "Sure?"})
    text = think_tokenizer.decode(conversation.token_ids)
    assert "<think>\nHm.\n</think>\n\n4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>" in text


MISTRAL_LIKE = """\
{%- set ns = namespace(index=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}
        {{- '<|im_start|>tool ' + m.tool_call_id + ' ' + m.content + '<|im_end|>' }}
    {%- elif m.tool_calls %}
        {{- '<|im_start|>' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + call.id }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- elif m.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + m.content + '<|im_end|>' }}
    {%- else %}
        {{- raise_exception('no role ' + m.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}
"""
"""Takes results only after calls with ids of nine letters, users and answers only in turn, and no system message."""

ALTERNATING = """\
{%- for m in messages %}
    {%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
    {{- '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}
"""
"""As Gemma's: users and assistants in turn, and nothing else."""


@pytest.mark.parametrize("policy", ["keep", "fork"])
def test_results_get_the_calls_and_ids_that_a_template_insists_on(make_tokenizer, policy):
    """Consecutive results stay messages of their own, with the ids of their calls."""
    tokenizer = make_tokenizer(MISTRAL_LIKE)
    conversation = Conversation(tokenizer, HERMES, USER, context_policy=policy)
    call = HERMES.render_call("f", {"x": 1})
    sample(conversation, [*tokenizer.encode(f"{call}\n{call}"), END])
    observe(conversation, result("4"), result("5"))
    added = (
        "<|im_start|>tool call00000 4<|im_end|><|im_start|>tool call00001 5<|im_end|><|im_start|>"
    )
    before = tokenizer.decode(conversation.token_ids).removesuffix(added)
    assert before != tokenizer.decode(conversation.token_ids)
    # The template writes calls in its own way: they are kept as sampled, or the context is forked.
    assert (f"{call}\n{call}<|im_end|>" in before) == (policy == "keep")
    written = '<tool_call>f{"x": 1}call00000<tool_call>f{"x": 1}call00001<|im_end|>'
    assert (written in before) == (policy == "fork")
    sample(conversation, [*tokenizer.encode("4"), END])
    observe(conversation, {"role": "user", "content": "Sure?"})
    assert tokenizer.decode(conversation.token_ids).endswith(
        "<|im_start|>Sure?<|im_end|><|im_start|>"
    )
    assert (
        sum(sum(s.loss_mask) for s in conversation.earlier_streams) + sum(conversation.loss_mask)
        == len(tokenizer.encode(f"{call}\n{call}")) + 3
    )


def test_a_call_that_cannot_be_read_stays_text_and_its_answer_becomes_a_user_message(
    make_tokenizer,
):
    tokenizer = make_tokenizer(MISTRAL_LIKE)
    conversation = Conversation(tokenizer, HERMES, USER, context_policy="fork")
    sample(conversation, [*tokenizer.encode("<tool_call>{</tool_call>"), END])
    observe(conversation, result("invalid JSON"))
    assert tokenizer.decode(conversation.token_ids) == (
        "<|im_start|>2 + 2?<|im_end|><|im_start|><tool_call>{</tool_call><|im_end|>"
        "<|im_start|><tool_response>\ninvalid JSON\n</tool_response><|im_end|><|im_start|>"
    )
    assert conversation.earlier_streams == []


@pytest.mark.parametrize("policy", ["keep", "fork", "reject"])
def test_messages_are_joined_where_users_and_assistants_must_alternate(make_tokenizer, policy):
    tokenizer = make_tokenizer(ALTERNATING)
    messages = [{"role": "system", "content": "Be brief."}, *USER, {"role": "user", "content": "!"}]
    conversation = Conversation(tokenizer, HERMES, messages, context_policy=policy)
    sample(conversation, [*tokenizer.encode("a"), END])
    observe(conversation, result("4"), result("5"), {"role": "user", "content": "Sure?"})
    assert tokenizer.decode(conversation.token_ids) == (
        "<|im_start|>user Be brief.\n\n2 + 2?\n!<|im_end|><|im_start|>assistant a<|im_end|><|im_start|>user "
        "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>\nSure?<|im_end|>"
        "<|im_start|>assistant "
    )


def test_a_system_message_alone_becomes_the_users(make_tokenizer):
    tokenizer = make_tokenizer(ALTERNATING)
    conversation = Conversation(tokenizer, HERMES, [{"role": "system", "content": "Go."}])
    text = tokenizer.decode(conversation.token_ids)
    assert text == "<|im_start|>user Go.<|im_end|><|im_start|>assistant "


@pytest.mark.parametrize("policy", ["keep", "fork", "reject"])
def test_a_turn_that_ends_with_the_next_messages_first_token(make_tokenizer, policy):
    """The token is there once, with loss if the policy sampled it."""
    tokenizer = make_tokenizer(NEXT_ROLE_ENDS, special=["<|obs|>", "<|bot|>"], eos_ids=[1])
    observation_id = tokenizer.token_id("<|obs|>")

    class Format(HermesFormat):
        stop_texts: tuple[str, ...] = ("<|obs|>", "<|not a token|>")

    tool_format = Format()
    for ids, sampled in (([50, observation_id], 2), ([50], 1)):
        conversation = Conversation(tokenizer, tool_format, USER, context_policy=policy)
        assert conversation.stop_ids == {1, END, observation_id}
        assert sample(conversation, ids) == tokenizer.decode([50])
        observe(conversation, result("4"))
        assert conversation.token_ids.count(observation_id) == 1
        assert sum(conversation.loss_mask) == sampled
        assert tokenizer.decode(conversation.token_ids).endswith("<|obs|>4<|bot|>")


def test_ids_that_the_policy_gave_its_calls_reach_the_results(make_tokenizer):
    kimi = get_format("kimi_k2")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'tool' %}of {{ m.tool_call_id }} {% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokenizer = make_tokenizer(template, special=kimi.markers[:5])
    for policy in ("keep", "fork"):
        conversation = Conversation(tokenizer, kimi, USER, context_policy=policy)
        for number in (3, 4):
            turn = kimi.render_calls([("f", {}), ("g", {})]).replace(":0", f":{number}")
            sample(conversation, [*tokenizer.encode(turn), END])
            observe(conversation, result("4"), result("5"))
            text = tokenizer.decode(conversation.token_ids)
            assert f"tool of functions.f:{number} 4<|im_end|>" in text
            assert "tool of functions.g:1 5<|im_end|>" in text
        assert conversation.earlier_streams == []


def test_calls_know_the_tools(tiny_tokenizer: ChatTokenizer):
    """A format that writes values without their type reads them by the tool's schema."""
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    coder = get_format("qwen3_coder")
    turn = coder.render_call("f", {"x": "4"})
    with_schema, without = (Conversation(tiny_tokenizer, coder, USER, t) for t in (tools, None))
    assert with_schema.parse_calls(turn)[0].arguments == {"x": "4"}
    assert without.parse_calls(turn)[0].arguments == {"x": 4}


# --- demonstrations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_tokenizer", "chatml_tokenizer"])
def test_demonstration_has_the_tokens_of_the_same_rollout(
    name: str, request: pytest.FixtureRequest
):
    tokenizer = request.getfixturevalue(name)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "assistant", "content": "#### 4"}
    shown = demonstration(tokenizer, HERMES, [*USER, calling, result("4"), answer], TOOLS)

    rollout = Conversation(tokenizer, HERMES, USER, TOOLS)
    sample(rollout, [*tokenizer.encode(HERMES.render_call("f", {"x": 1})), END])
    observe(rollout, result("4"))
    sample(rollout, [*tokenizer.encode("#### 4"), END])
    assert shown.token_ids == rollout.token_ids
    assert shown.loss_mask == rollout.loss_mask
    assert shown.model_text() == HERMES.render_call("f", {"x": 1}) + "\n#### 4"


def test_demonstration_leaves_out_what_the_prompt_opened(think_tokenizer: ChatTokenizer):
    answer = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n4"}
    shown = demonstration(think_tokenizer, HERMES, [*USER, answer])
    assert shown.model_text() == "Hm.\n</think>\n\n4"


@pytest.mark.parametrize(
    "roles", ["user", "assistant", "user assistant user", "user assistant assistant"]
)
def test_demonstration_needs_questions_and_answers(tiny_tokenizer: ChatTokenizer, roles: str):
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    with pytest.raises(ValueError, match="a demonstration (starts with|has two)"):
        demonstration(tiny_tokenizer, HERMES, messages)


# --- Qwen3 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("results", [["4"], ["4", "5"]])
@pytest.mark.parametrize("think", ["", "<think>\nHm.\n</think>\n\n"])
def test_qwen3_appends_what_its_template_writes(
    qwen3: ChatTokenizer, think: str, results: list[str]
):
    turn = think + HERMES.render_call("f", {"x": 1})
    conversation = Conversation(qwen3, HERMES, USER, TOOLS)
    sample(conversation, [*qwen3.encode(turn), 151645])
    n = len(conversation.token_ids)
    observation = observe(conversation, *map(result, results))
    # <|im_end|> (sampled), "\n" (inserted), <|im_start|>
    assert conversation.token_ids[n - 1 : n + 2] == [151645, 198, 151644]
    assert conversation.loss_mask[n - 1 : n + 2] == [True, False, False]
    assert observation.count(151644) == 2
    messages = [*USER, {"role": "assistant", "content": turn}, *map(result, results)]
    assert conversation.token_ids == qwen3.encode(qwen3.render(messages, TOOLS))


def test_qwen3_keeps_thinking_over_two_turns(qwen3: ChatTokenizer):
    conversation = Conversation(qwen3, HERMES, USER)
    first = [*qwen3.encode("<think>\nHm.\n</think>\n\n4"), 151645]
    sample(conversation, first)
    observe(conversation, {"role": "user", "content": "Sure?"})
    second = [*qwen3.encode("<think>\nYes.\n</think>\n\nSure."), 151645]
    sample(conversation, second)
    assert sum(conversation.loss_mask) == len(first) + len(second)
    assert qwen3.decode(conversation.token_ids) == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n4<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\nYes.\n</think>\n\nSure.<|im_end|>"
    )


# --- SmolLM2 ----------------------------------------------------------------------------------------------------


def test_smollm2_gets_tools_and_results_in_the_messages_that_it_knows():
    path = os.environ.get("TOOLJAX_TEST_MODEL")
    if not path:
        pytest.skip("TOOLJAX_TEST_MODEL names no folder")
    tokenizer = ChatTokenizer.from_folder(path)
    turn = HERMES.render_call("f", {"x": 1})
    conversation = Conversation(tokenizer, HERMES, USER, TOOLS)
    sample(conversation, [*tokenizer.encode(turn), tokenizer.end_of_turn_id])
    observe(conversation, result("4"))
    messages = [
        {"role": "system", "content": HERMES.system_text(TOOLS)},
        *USER,
        {"role": "assistant", "content": turn},
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"},
    ]
    assert conversation.token_ids == tokenizer.encode(tokenizer.render(messages))
