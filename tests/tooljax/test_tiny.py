"""The model built from nothing: its template, its digits, its determinism, and that others can load it."""

import json
import string

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_sidecar.certification import certify
from rollout_sidecar.formats import get_format
from rollout_sidecar.tokenizer import ChatTokenizer
from tolerance import tol
from tooljax.model import hf, tiny

HERMES = get_format("hermes")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
            },
        },
    }
]
TEXTS = ["user\nYou have 37 and add 58.", "assistant\n", "#### 95", "system\n<tool_call> f(x)"]


def build(folder, seed=0):
    tiny.build(folder, TEXTS, vocab=300, embed=64, layers=2, seed=seed)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return ChatTokenizer.from_folder(folder)


def test_the_template_with_and_without_tools(tokenizer):
    messages = [{"role": "user", "content": "37 + 58?"}]
    question = "<|im_start|>user\n37 + 58?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(messages) == question
    assert tokenizer.render(messages, []) == question
    listed = "<|im_start|>system\n<tool_call> calculator(expression, digits)<|im_end|>\n"
    assert tokenizer.render(messages, TOOLS) == listed + question
    messages += [
        {"role": "assistant", "content": "So"},
        {"role": "tool", "content": "95"},
    ]
    assert tokenizer.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\n37 + 58?<|im_end|>\n<|im_start|>assistant\nSo<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n95\n</tool_response><|im_end|>\n"
    )


def test_the_template_is_append_only_and_closes_turns_with_im_end(tokenizer):
    certificate = certify(tokenizer, HERMES)
    assert (certificate.kind, certificate.problems) == ("append-only", [])
    assert tokenizer.decode([tokenizer.end_of_turn_id]) == "<|im_end|>"
    assert tokenizer.stop_ids == {tokenizer.end_of_turn_id}


def test_every_digit_is_a_token_of_its_own(folder, tokenizer):
    text = "(37+58)*12 = 1140, and 0123456789"
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert [p for p in pieces if set(p) & set(string.digits)] == list("3758121140" + "0123456789")
    # Not by luck: no token of the vocabulary joins a digit with anything.
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert [t for t in vocabulary if len(t) > 1 and set(t) & set(string.digits)] == []


def test_frequent_text_is_few_tokens_and_any_text_comes_back(tokenizer):
    assert len(tokenizer.encode("user\nYou have ")) < len("user\nYou have ") / 2
    for text in ("", "naïve 数 🙂", " \n\t  x", "<tool_call>\n{}"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(folder, tmp_path):
    again, other = build(tmp_path / "again"), build(tmp_path / "other", seed=1)
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} < set(names)
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes(), name
        same = (folder / name).read_bytes() == (other / name).read_bytes()
        assert same == (name != "model.safetensors"), name


def test_the_vocabulary_of_the_model_is_that_of_the_tokenizer(folder, tokenizer):
    cfg = hf.read_config(folder, "float32")
    assert cfg.vocab == tokenizer.vocab_size <= 300
    assert (cfg.layers, cfg.embed, cfg.tied_head) == (2, 64, True)


def test_an_untrained_model_is_close_to_uniform(folder, tokenizer):
    decoder = hf.load(folder, "float32")
    tokens = jnp.asarray(tokenizer.encode("user\nYou have 37"))[None]
    hidden = decoder.hidden(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
    logits = np.asarray(hidden @ decoder.head_weight().T, np.float64)[0]
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    entropy = -(np.exp(log_probs) * log_probs).sum(-1)
    assert (entropy > 0.8 * np.log(tokenizer.vocab_size)).all()


def test_transformers_loads_it_and_agrees(folder, tokenizer):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "37 + 58?"}]
    for tools in (None, TOOLS):
        text = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert text == tokenizer.render(messages, tools)
    ids = tokenizer.encode(text)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    decoder = hf.load(folder, "float32")
    tokens = jnp.asarray(ids)[None]
    hidden = decoder.hidden(tokens, jnp.arange(len(ids))[None], jnp.ones_like(tokens))
    logits = np.asarray(hidden @ decoder.head_weight().T)[0]
    np.testing.assert_allclose(logits, expected, **tol(jnp.float32, reduced=64))


def test_chat_texts_are_what_conversations_are_made_of(tmp_path):
    file = tmp_path / "demonstrations.jsonl"
    row = {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}
    rows = [{**row, "tools": TOOLS}, {**row, "tools": None}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = tiny.chat_texts(file)
    assert "system\n<tool_call> calculator(expression, digits)" in texts
    assert texts.count("A") == texts.count("B") == 2
    # The line that lists the tools is, word for word, what the template writes.
    tiny.write_tokenizer(tiny.train_tokenizer(texts, 300), tmp_path)
    text = ChatTokenizer.from_folder(tmp_path).render(rows[0]["messages"], TOOLS)
    assert f"<|im_start|>{texts[0]}<|im_end|>" in text


def test_numbers_are_digits_or_one_token():
    texts = [f"{number} and {number + 1}" for number in range(10, 20)]
    for whole, tokens in ((False, ["1", "7"]), (True, ["17"])):
        tokenizer = tiny.train_tokenizer(texts, 300, whole_numbers=whole)
        assert tokenizer.encode("17").tokens == tokens
