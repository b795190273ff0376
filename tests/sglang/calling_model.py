"""A model made by hand that calls the calculator, so that a real engine plays whole conversations with tools.

Its head has a row for what may follow a token, by chance: a line break (the end of the generation prompt) is followed
by a call or by one of four answers, each of them a token of its own, and those by a token that ends the turn. There are
as many of these as there are places where models name them: the chat template's, and those of tokenizer_config.json,
config.json and generation_config.json. Two random Llama layers make every log-prob depend on the whole context.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sglang_cases import make_model
from tokenizers import AddedToken

from tooljax.model import tiny

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 7"}}\n</tool_call>'
ANSWERS = ("#### 19", "#### 20", "#### 21", "#### 22")
STOPS = {
    "template": "<|im_end|>",
    "tokenizer_config": "<|end_1|>",
    "config": "<|end_2|>",
    "generation_config": "<|end_3|>",
}
MESSAGES = [{"role": "user", "content": "What is 12 + 7?"}]


@dataclass(frozen=True)
class CallingModel:
    """A Hugging Face folder, and what is in it."""

    folder: Path
    model: Any
    """transformers' float32 model."""
    ids: dict[str, int]
    """Of the line break, the call, the answers and the ends of turns, by their texts."""


def make_calling_model(folder: Path, *, seed: int = 0) -> CallingModel:
    """Other seeds give other layers, which fit the same tokens."""
    tokenizer = tiny.train_tokenizer([], 300)  # bytes alone
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (CALL, *ANSWERS)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in STOPS.values()]
    )
    tiny.write_tokenizer(tokenizer, folder)
    vocab = tokenizer.get_vocab()
    ids = {text: vocab[text] for text in (CALL, *ANSWERS, *STOPS.values())}
    ids["\n"] = tokenizer.encode("\n").ids[0]
    _set(folder / "tokenizer_config.json", eos_token=STOPS["tokenizer_config"])
    model = make_model(
        folder,
        vocab=tokenizer.get_vocab_size(),
        stop=ids[STOPS["config"]],
        seed=seed,
        scale=0.03,
        alter=lambda weights: _write_head(weights, ids, seed),
    )
    end = {"eos_token_id": [ids[STOPS["generation_config"]]]}
    (folder / "generation_config.json").write_text(json.dumps(end))
    return CallingModel(folder, model, ids)


def _write_head(weights: dict[str, np.ndarray], ids: dict[str, int], seed: int) -> None:
    """Logits of about 0 with a spread of 1, and higher ones for what should follow."""
    draw = np.random.default_rng(seed)
    embedding = np.random.default_rng(100).normal(size=weights["model.embed_tokens.weight"].shape)
    direction = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    head = draw.normal(size=embedding.shape)
    followers = {"\n": {CALL: 9.0} | dict.fromkeys(ANSWERS, 8.0), CALL: {STOPS["template"]: 13.0}}
    followers |= {answer: {end: 13.0} for answer, end in zip(ANSWERS, STOPS.values(), strict=True)}
    for token, after in followers.items():
        for follower, logit in after.items():
            head[ids[follower]] += logit * direction[ids[token]]
    width = embedding.shape[1]
    weights["model.embed_tokens.weight"][:] = direction
    weights["lm_head.weight"][:] = head / np.sqrt(
        width
    )  # the last norm's output has the length sqrt(width)


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
