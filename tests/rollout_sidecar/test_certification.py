"""What certificates say about templates that append, rewrite, refuse, and let control tokens through."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizer_cases import NEXT_ROLE_ENDS, THINK_TEMPLATE, TINY_TEMPLATE, write_tokenizer

from rollout_sidecar.certification import Certificate, certify, check_certificate, main
from rollout_sidecar.conversation import ContextPolicy
from rollout_sidecar.formats import choose_format, get_format
from rollout_sidecar.formats.hermes import HermesFormat
from rollout_sidecar.tokenizer import ChatTokenizer

HERMES = get_format("hermes")
POLICIES: tuple[ContextPolicy, ...] = ("keep", "fork", "reject")


def test_templates_that_only_append(tiny_tokenizer: ChatTokenizer, chatml_tokenizer: ChatTokenizer):
    for tokenizer in (tiny_tokenizer, chatml_tokenizer):
        certificate = certify(tokenizer, HERMES)
        assert certificate == Certificate(
            "append-only", [], tokenizer=tokenizer.source, tool_format="hermes"
        )
        for policy in POLICIES:
            check_certificate(certificate, policy)


def test_a_template_that_rewrites_is_shown_with_the_ids(think_tokenizer: ChatTokenizer):
    certificate = certify(think_tokenizer, HERMES)
    assert certificate.kind == "fork-needed"
    # Its tool results are user messages, which make it drop the thinking too.
    assert [difference.case for difference in certificate.differences] == [
        "a tool result, with thinking",
        "two tool results, with thinking",
        "two rounds of tool results, with thinking",
        "a user message, with thinking",
        "a user message after a tool result, with thinking",
    ]
    difference = certificate.differences[3]
    # "...<think>\nSome" where the template goes on with "An": the first three ids are equal.
    encode = think_tokenizer.encode
    assert [id for id, _ in difference.appended[:5]] == encode("nt\n<t")
    assert [id for id, _ in difference.whole[:5]] == encode("nt\nAn")
    assert difference.whole[2:4] == [(encode("\n")[0], "\n"), (encode("A")[0], "A")]
    assert difference.appended_text.startswith("nt\n<think>\nSome")
    n, line = encode("n")[0], str(certificate)
    assert "the template 'nt\\nAn answer.<|im_end|>\\n<|im_start|>user" in line
    assert f"[{n}:'n' {encode('t')[0]}:'t' {encode(chr(10))[0]}:'\\n' {encode('A')[0]}:'A'" in line
    for policy in POLICIES:
        check_certificate(certificate, policy)


def test_the_same_text_in_other_tokens_is_told_and_rewrites_nothing(make_tokenizer):
    # The prompt ends with "t", and the tokenizer makes one token of "tool".
    tokenizer = make_tokenizer(TINY_TEMPLATE.replace("assistant\\n", "assistant\\nt"))

    class Continuing(HermesFormat):
        def render_calls(self, calls):
            return "ool " + super().render_calls(calls)

    certificate = certify(tokenizer, Continuing())
    assert certificate.kind == "append-only"
    assert certificate.differences == []
    assert "the same text: sampled ids stay as they are" in certificate.problems[0]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}",
            "a tool result: .*does not write an end-of-turn token",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' and loop.index0 %}{{ raise_exception('one question') }}"
            "{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
            "one question",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}",
            r"does not write the end of turn '<\|im_end\|>'",
        ),
    ],
)
def test_templates_that_cannot_carry_a_conversation_are_unsupported(
    make_tokenizer, template: str, problem: str
):
    certificate = certify(make_tokenizer(template), HERMES)
    assert certificate.kind == "unsupported"
    message = rf"cannot hold multi-turn conversations: .*{problem}.*\. Set another --tool_format"
    for policy in POLICIES:
        with pytest.raises(ValueError, match=message):
            check_certificate(certificate, policy)


def test_a_template_that_writes_no_earlier_turns_can_only_be_appended_to(make_tokenizer):
    template = TINY_TEMPLATE + (
        "{% if messages | selectattr('role', 'eq', 'assistant') | list | length > 1 %}"
        "{{ raise_exception('one answer') }}{% endif %}"
    )
    certificate = certify(make_tokenizer(template), HERMES)
    assert (certificate.kind, certificate.whole_conversations) == ("fork-needed", False)
    check_certificate(certificate, "keep")
    for policy in POLICIES[1:]:
        with pytest.raises(
            ValueError, match=f"context policy {policy} needs .*one answer.*context policy keep"
        ):
            check_certificate(certificate, policy)


def test_a_token_that_ends_turns_and_would_not_stop_the_policy_is_told(make_tokenizer):
    tokens = ["<|obs|>", "<|bot|>"]
    tokenizer = make_tokenizer(NEXT_ROLE_ENDS, special=tokens, eos_ids=[1])
    certificate = certify(tokenizer, HERMES)
    assert certificate.kind == "append-only"
    missing = tokenizer.token_id("<|obs|>")
    assert certificate.problems == [
        "a turn ends with '<|obs|>', the first token of what follows, and that is no stop id; put "
        f"{missing} into eos_token_id of generation_config.json"
    ]
    stopping = make_tokenizer(NEXT_ROLE_ENDS, special=tokens, eos_ids=[1, missing])
    assert certify(stopping, HERMES).problems == []


def test_a_template_that_lists_tools_in_another_format_is_told(make_tokenizer):
    certificate = certify(
        make_tokenizer(
            "{% if tools %}Call as [f(x)]: {{ tools | tojson }}<|im_end|>{% endif %}"
            "{% for m in messages %}{{ m.role + ': ' + m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
        HERMES,
    )
    assert certificate.kind == "append-only"
    assert "another format than hermes" in certificate.problems[0]


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("'user'", "a user message"),
        ("'tool'", "a tool result"),
    ],
)
def test_a_template_that_undoes_escaping_is_unsupported(make_tokenizer, written: str, place: str):
    """`<|IM_END|>` is no token until the template lower-cases it."""
    template = TINY_TEMPLATE.replace(
        "{%- for message in messages %}",
        "{%- for m in messages %}{%- set message = dict(m, content=m.content | lower)"
        f" if m.role == {written} else m %}}",
    )
    certificate = certify(make_tokenizer(template), HERMES)
    assert certificate.kind == "unsupported"
    assert f"control tokens in the text of {place} come through" in certificate.problems[-1]
    assert "<|im_end|>" in certificate.problems[-1]


def test_the_command_prints_the_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_tokenizer(tmp_path / "appends", TINY_TEMPLATE)
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder} with tool format hermes: append-only\n"
    folder = write_tokenizer(tmp_path / "thinks", THINK_TEMPLATE)
    assert main([str(folder), "--tool_format", "qwen3_coder"]) == 0
    assert (
        f"{folder} with tool format qwen3_coder: fork-needed\n  a tool result, with thinking: from token"
        in (capsys.readouterr().out)
    )
    folder = write_tokenizer(
        tmp_path / "cannot", "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert main([str(folder)]) == 1
    assert main([str(tmp_path)]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    assert main([str(folder), "--tool_format", "morse"]) == 2
    assert "morse" in capsys.readouterr().err


# --- real tokenizers --------------------------------------------------------------------------------------------


def test_smollm2(smollm2_folder: Path):
    tokenizer = ChatTokenizer.from_folder(smollm2_folder)
    assert certify(tokenizer, choose_format(tokenizer)).kind == "append-only"


def test_qwen3(qwen3: ChatTokenizer):
    certificate = certify(qwen3, choose_format(qwen3))
    assert certificate.tool_format == "hermes"
    assert certificate.kind == "fork-needed"
    assert {difference.case for difference in certificate.differences} == {
        "a user message, with thinking",
        "a user message after a tool result, with thinking",
    }
    # <|im_start|> assistant \n, then <think> where the template drops it.
    difference = certificate.differences[0]
    assert [id for id, _ in difference.appended[:4]] == [151644, 77091, 198, 151667]
    assert difference.whole[3] == (2082, "An")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama3_1", "append-only"), ("gemma3", "append-only"), ("deepseek_v3", "fork-needed")],
)
def test_other_families(name: str, kind: str):
    folder = Path(os.environ.get("TOOLJAX_TEST_TOKENIZERS", "-")) / name
    if not folder.is_dir():
        pytest.skip("TOOLJAX_TEST_TOKENIZERS names no folder with this tokenizer")
    tokenizer = ChatTokenizer.from_folder(folder)
    certificate = certify(tokenizer, choose_format(tokenizer))
    assert certificate.kind == kind
    # DeepSeek's template opens the results of a second round differently.
    assert all("two rounds" in difference.case for difference in certificate.differences)
    assert replace(certificate, differences=[]).whole_conversations
