import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from rollout_sidecar.tokenizer import ChatTokenizer, normalise_stop

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tiny_tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(tiny_tokenizer_folder, tmp_path / "model"))


def edit(folder: Path, **config) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def test_renders_the_template_and_encodes_it_without_adding_tokens(tiny_tokenizer: ChatTokenizer):
    text = tiny_tokenizer.render(MESSAGES)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tiny_tokenizer.encode(text)
    assert [id for id in ids if id < 3] == [1, 2, 1]
    assert tiny_tokenizer.decode(ids) == text
    assert tiny_tokenizer.decode(ids, skip_special=True) == "user\nhello\nassistant\n"


@pytest.mark.parametrize("text", ["tool  tool", "naïve 😀 \x00", "<|im_end|>", " a<|im_start|>b"])
def test_plain_encoding_has_no_special_tokens_and_decodes_to_the_same_text(
    tiny_tokenizer: ChatTokenizer, text: str
):
    ids = tiny_tokenizer.encode(text, plain=True)
    assert not set(ids) & tiny_tokenizer.special_ids
    assert tiny_tokenizer.decode(ids) == text


def test_plain_encoding_leaves_the_other_encoding_as_it_was(tiny_tokenizer: ChatTokenizer):
    assert len(tiny_tokenizer.encode("<|im_end|>", plain=True)) > 1
    assert tiny_tokenizer.encode("<|im_end|>") == [2]


def test_the_ids_that_were_given_are_the_callers_to_change(tiny_tokenizer: ChatTokenizer):
    first = tiny_tokenizer.encode("the same prompt")
    expected = list(first)
    first.append(0)
    assert tiny_tokenizer.encode("the same prompt") == expected
    marked = "<|im_end|>"  # which of the two encodings is meant is not mixed up
    assert tiny_tokenizer.encode(marked) != tiny_tokenizer.encode(marked, plain=True)


def test_a_text_that_lacks_control_tokens_at_a_glance_has_none(tiny_tokenizer: ChatTokenizer):
    assert tiny_tokenizer.lacks_control("what is 2 + 2?")
    for token_id in tiny_tokenizer.control_ids:
        assert not tiny_tokenizer.lacks_control(f"a {tiny_tokenizer.token_text(token_id)} b")


def test_control_tokens_are_special_ones_and_those_that_frame_conversations(make_tokenizer):
    # The template writes <tool_response>; runs of spaces and words are ordinary though they are added tokens.
    added = [
        "<tool_response>",
        "<|obs|>",
        "<｜User｜>",
        "<table>",
        "\n\n",
        "    ",
        "user",
        "system",
    ]
    tokenizer = make_tokenizer(added=added)
    assert tokenizer.special_ids == {0, 1, 2}
    framing = set(map(tokenizer.token_id, added[:3]))
    assert tokenizer.control_ids == {0, 1, 2} | framing
    text = "a<tool_response>    b<|obs|><table><｜User｜><|im_end|>"
    assert framing < set(tokenizer.encode(text))
    ids = tokenizer.encode(text, plain=True)
    assert not tokenizer.control_ids & set(ids)
    assert {tokenizer.token_id("    "), tokenizer.token_id("<table>")} < set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.leading_control("<|obs|>x") == "<|obs|>"
    assert tokenizer.leading_control("x<|obs|>") == ""


def test_plain_encoding_where_the_model_itself_knows_the_text():
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -2.0) for c in "</s>ab")]
    unigram = Tokenizer(models.Unigram(pieces, unk_id=0))
    unigram.add_special_tokens(["<s>", "</s>"])
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    tokenizer = ChatTokenizer(unigram, {"default": template}, named_tokens={"eos_token": "</s>"})
    plain = Tokenizer.from_str(unigram.to_str())
    plain.encode_special_tokens = True
    assert plain.encode("a<s>").ids[-1] == 1  # the switch alone does not help
    ids = tokenizer.encode("ab<s>b</s>a<", plain=True)
    assert ids == [unigram.token_to_id(c) for c in "ab<s>b</s>a<"]


def test_a_merge_is_applied(tiny_tokenizer: ChatTokenizer):
    assert len(tiny_tokenizer.encode("tool")) == 1


def test_vocabulary_size_and_hash(tiny_tokenizer: ChatTokenizer, folder: Path):
    # 3 special tokens, 256 bytes, 4 merges
    assert tiny_tokenizer.vocab_size == 263
    assert ChatTokenizer.from_folder(folder).vocab_hash == tiny_tokenizer.vocab_hash
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|end_of_text|>"))
    assert ChatTokenizer.from_folder(folder).vocab_hash != tiny_tokenizer.vocab_hash


def test_stop_ids_are_the_union_of_every_source(folder: Path):
    # The template ends turns with <|im_end|> (2); the other files name other ids.
    edit(folder, eos_token={"content": "<|endoftext|>", "special": True})
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (folder / "config.json").write_text('{"eos_token_id": 9}')
    tokenizer = ChatTokenizer.from_folder(folder)
    assert tokenizer.end_of_turn_id == 2
    assert tokenizer.stop_ids == {0, 2, 7, 8, 9}


def test_end_of_turn_is_the_templates_and_not_eos_token(folder: Path):
    edit(folder, eos_token="<|endoftext|>")
    tokenizer = ChatTokenizer.from_folder(folder)
    assert (tokenizer.end_of_turn_id, tokenizer.turn_end_text) == (2, "<|im_end|>")


def test_template_without_end_of_turn_falls_back_to_eos_token(folder: Path):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    edit(folder, chat_template=template, eos_token="<|endoftext|>")
    tokenizer = ChatTokenizer.from_folder(folder)
    assert (tokenizer.end_of_turn_id, tokenizer.turn_end_text) == (0, "")
    edit(folder, eos_token=None)
    with pytest.raises(ValueError, match=r"has no token that ends a turn.*set eos_token"):
        ChatTokenizer.from_folder(folder)


def test_missing_tokenizer_json(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json \(a slow tokenizer is converted"):
        ChatTokenizer.from_folder(tmp_path)


def test_missing_template(folder: Path):
    edit(folder, chat_template=None)
    with pytest.raises(ValueError, match=r"has no chat template: .*use the instruct model"):
        ChatTokenizer.from_folder(folder)


def test_broken_files_are_named(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ChatTokenizer.from_folder(folder)
    (folder / "config.json").write_text("{}")
    edit(folder, chat_template="{% if %}")
    with pytest.raises(
        ValueError, match=r"chat template 'default' of .* is not valid Jinja: line 1"
    ):
        ChatTokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        ChatTokenizer.from_folder(folder)


def test_template_file_beats_the_config(folder: Path):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert ChatTokenizer.from_folder(folder).render(MESSAGES) == "hello<|im_end|>"


def test_named_templates(folder: Path):
    named = [
        {"name": "default", "template": "{% for m in messages %}D{{ m.content }}{% endfor %}"},
        {"name": "tool_use", "template": "{% for m in messages %}T{{ m.content }}{% endfor %}"},
    ]
    edit(folder, chat_template=named)
    tokenizer = ChatTokenizer.from_folder(folder)
    assert tokenizer.render(MESSAGES) == "Dhello"
    assert tokenizer.render(MESSAGES, [{"type": "function"}]) == "Thello"


def test_template_environment_is_the_one_templates_are_written_for(folder: Path):
    template = """\
{% for m in messages %}
    {% if loop.index0 == 2 %}{% break %}{% endif %}
    {{- {"a": "<é>"} | tojson }}|{{ strftime_now("%d %b %Y") }}|{{ bos_token }}|{{ flag }}
    {% generation %}G{{ m.content }}{% endgeneration %}
{% endfor %}"""
    edit(folder, chat_template=template, bos_token="<|endoftext|>")
    tokenizer = ChatTokenizer.from_folder(folder, template_kwargs={"flag": 5})
    one = '{"a": "<é>"}|26 Jul 2024|<|endoftext|>|5\nGhello'
    assert tokenizer.render(MESSAGES * 3) == one + one


def test_a_rejected_conversation_says_which_roles(folder: Path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    edit(folder, chat_template=template)
    tokenizer = ChatTokenizer.from_folder(folder)
    with pytest.raises(
        ValueError, match=r"cannot render messages with roles \[system\]: no system"
    ):
        tokenizer.render([{"role": "system", "content": "x"}])


def test_templates_are_sandboxed(folder: Path):
    edit(
        folder,
        chat_template="{% for m in messages %}{{ m.content }}{{ ''.__class__.__mro__ }}{% endfor %}",
    )
    with pytest.raises(ValueError, match="unsafe"):
        ChatTokenizer.from_folder(folder).render(MESSAGES)


@pytest.mark.parametrize(
    "ids", [[5, 6], [5, 6, 248046], [5, 6, 248046, 248046]], ids=["stripped", "kept", "twice"]
)
def test_normalised_turn_ends_in_its_stop_id_exactly_once(ids: list[int]):
    assert normalise_stop(ids, 248046) == [5, 6, 248046]


def test_qwen3_renders_as_transformers_does():
    path = os.environ.get("TOOLJAX_TEST_QWEN3_TOKENIZER")
    if not path:
        pytest.skip("TOOLJAX_TEST_QWEN3_TOKENIZER names no folder")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ours = ChatTokenizer.from_folder(path)
    assert (ours.end_of_turn_id, ours.stop_ids) == (151645, {151645})
    call = {"type": "function", "function": {"name": "f", "arguments": {"é": "<b>"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nHm\n</think>\n\nSo", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    for given in (None, tools):
        expected = theirs.apply_chat_template(
            messages, tools=given, add_generation_prompt=True, tokenize=False
        )
        text = ours.render(messages, given)
        assert text == expected
        assert ours.encode(text) == theirs(expected, add_special_tokens=False)["input_ids"]
