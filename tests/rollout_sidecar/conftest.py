"""Tokenizers small enough to read: bytes, four merges, ChatML tokens, and a template with Qwen2.5's branches."""

import json
from pathlib import Path

import pytest
from tokenizer_cases import CHATML_TEMPLATE, THINK_TEMPLATE, TINY_TEMPLATE, write_tokenizer
from tokenizers import Tokenizer

from rollout_sidecar.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json."""
    return write_tokenizer(tmp_path_factory.mktemp("tiny_tokenizer"), TINY_TEMPLATE)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_tokenizer_folder: Path) -> ChatTokenizer:
    """Its template lists tools and has a tool role."""
    return ChatTokenizer.from_folder(tiny_tokenizer_folder)


@pytest.fixture(scope="session")
def chatml_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Its template knows neither tools nor a tool role."""
    folder = tmp_path_factory.mktemp("chatml_tokenizer")
    return ChatTokenizer.from_folder(write_tokenizer(folder, CHATML_TEMPLATE))


@pytest.fixture(scope="session")
def think_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Its generation prompt ends in an open <think>."""
    folder = tmp_path_factory.mktemp("think_tokenizer")
    return ChatTokenizer.from_folder(write_tokenizer(folder, THINK_TEMPLATE))


@pytest.fixture(scope="session")
def make_tokenizer(tiny_tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """Makes a tiny tokenizer: a template, added tokens that are special, others that are not, more end-of-sequence
    ids, and variables of the template."""

    def make(
        template: str = TINY_TEMPLATE, special=(), added=(), eos_ids=(), normalizer=None, **kwargs
    ) -> ChatTokenizer:
        folder = tmp_path_factory.mktemp("made_tokenizer")
        tokenizer = Tokenizer.from_file(str(tiny_tokenizer_folder / "tokenizer.json"))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.add_special_tokens(list(special))
        tokenizer.add_tokens(list(added))
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*eos_ids]}))
        return ChatTokenizer.from_folder(folder, template_kwargs=kwargs)

    return make


@pytest.fixture(scope="session")
def qwen3(qwen3_folder: Path) -> ChatTokenizer:
    """The real Qwen3 tokenizer; its template drops the thinking before the last question."""
    return ChatTokenizer.from_folder(qwen3_folder)
