"""Certification, thinking, demonstrations, and the real Qwen3 template."""

import os
import shutil

import pytest

from rollout_sidecar.certification import certify
from rollout_sidecar.conversation import Conversation, demonstration
from rollout_sidecar.formats import get_format
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


# --- certification, thinking ------------------------------------------------------------------------------------


def test_certificates(
    tiny_tokenizer: ChatTokenizer, chatml_tokenizer: ChatTokenizer, think_tokenizer: ChatTokenizer
):
    for tokenizer in (tiny_tokenizer, chatml_tokenizer):
        assert certify(tokenizer, HERMES).kind == "append-only"
        assert certify(tokenizer, HERMES).problems == []
    certificate = certify(think_tokenizer, HERMES)
    assert certificate.kind == "fork-needed"
    assert all(p.startswith("a user message") or "tool result" in p for p in certificate.problems)
    assert "Some thoughts" in certificate.problems[0]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}",
            "does not write an end-of-turn token",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' and loop.index0 %}{{ raise_exception('one question') }}"
            "{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
            "one question",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}",
            "does not write the end of turn",
        ),
    ],
)
def test_templates_that_cannot_carry_a_conversation_are_unsupported(
    tiny_tokenizer_folder, tmp_path, template: str, problem: str
):
    shutil.copy(tiny_tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    certificate = certify(ChatTokenizer.from_folder(tmp_path), HERMES)
    assert certificate.kind == "unsupported"
    assert problem in certificate.problems[-1]


def test_template_that_lists_tools_in_another_format_is_overruled(tiny_tokenizer_folder, tmp_path):
    shutil.copy(tiny_tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if tools %}Call as [f(x)]: {{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for m in messages %}{{ m.role + ': ' + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    certificate = certify(tokenizer, HERMES)
    assert certificate.kind == "append-only"
    assert "another format than hermes" in certificate.problems[0]
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
    certificate = certify(qwen3, HERMES)
    assert certificate.kind == "fork-needed"
    assert {problem.partition(":")[0] for problem in certificate.problems} == {
        "a user message, with thinking",
        "a user message after a tool result, with thinking",
    }
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
    assert certify(tokenizer, HERMES).kind == "append-only"
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
