"""Real chat templates for tests: TOOLJAX_TEST_TOKENIZERS names a folder with one subfolder a model.

A subfolder holds what a model's does (tokenizer.json, tokenizer_config.json), or chat_template.jinja alone: then a
tokenizer of bytes stands in, in which the texts that look like special tokens of the template are special tokens.
"""

import os
import re
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout_sidecar.tokenizer import ChatTokenizer

ROOT = os.environ.get("TOOLJAX_TEST_TOKENIZERS", "")

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"]{1,40}[|｜]?>|<[a-z_]+[|]>|｜DSML｜|\[/?[A-Z_]{3,}\]|</?start_of_turn>|<end_of_turn>|\]~!?b\[|\[e~\["
    r"|<(?:begin_of_document|beginning_of_sentence|end_of_sentence|sop|seed:[a-z]+)>"
)


def model_folders() -> list[Path]:
    """The subfolders; empty when there are none to test with."""
    return sorted(path for path in Path(ROOT).iterdir() if path.is_dir()) if ROOT else []


@lru_cache(maxsize=4)
def load(name: str) -> ChatTokenizer:
    """The tokenizer of that subfolder. Skips the test when there is none."""
    if not ROOT:
        pytest.skip("set TOOLJAX_TEST_TOKENIZERS to a folder with one subfolder a model")
    folder = Path(ROOT) / name
    if (folder / "tokenizer.json").is_file():
        try:
            return ChatTokenizer.from_folder(folder)
        except ValueError as error:
            if "has no chat template" not in str(error):
                raise
            pytest.skip(str(error))
    if not (folder / "chat_template.jinja").is_file():
        pytest.skip(f"TOOLJAX_TEST_TOKENIZERS has no {name}")
    return from_template((folder / "chat_template.jinja").read_text(), source=name)


def from_template(template: str, *, source: str = "a template") -> ChatTokenizer:
    """A tokenizer of bytes whose special tokens are those of a template."""
    tokens = ["<EOS>", "<BOS>", *sorted({m.group() for m in _SPECIAL.finditer(template)})]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate([*tokens, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tokens])
    named = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
    return ChatTokenizer(tokenizer, {"default": template}, named_tokens=named, source=source)
