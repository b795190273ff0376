"""Builds a small decoder and its tokenizer from nothing: for the quickstart, and for tests that need a real model.

The tokenizer is byte-level BPE, trained on the given texts, with every digit a token of its own: copying a number
never seen before is then copying digits. On request, numbers that the texts often have are tokens instead. The chat
template is ChatML with a short list of tools.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tooljax.model import hf
from tooljax.model.decoder import Decoder, DecoderConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tool_call>' }}
    {%- for tool in tools %}
        {{- ' ' ~ tool.function.name ~ '(' ~ (tool.function.parameters.properties | join(', ')) ~ ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab: int, *, whole_numbers: bool = False) -> Tokenizer:
    """Byte-level BPE with individual digits, or with whole numbers as far as merges go; `vocab` is an upper bound."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=not whole_numbers),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json with the chat template."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def tiny_config(
    vocab: int, *, embed: int = 128, layers: int = 4, max_positions: int = 512
) -> DecoderConfig:
    """A Llama-shaped decoder of about a million parameters."""
    return DecoderConfig(
        family="llama",
        vocab=vocab,
        embed=embed,
        layers=layers,
        q_heads=embed // 32,
        kv_heads=max(1, embed // 64),
        head_dim=32,
        ffw=embed * 3,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tied_head=True,
        max_positions=max_positions,
        dtype="float32",
    )


def build(
    folder: str | Path,
    texts: Iterable[str],
    *,
    vocab: int,
    embed: int,
    layers: int,
    seed: int,
    whole_numbers: bool = False,
) -> None:
    """Writes a Hugging Face folder with a fresh tokenizer and randomly initialised weights."""
    tokenizer = train_tokenizer(texts, vocab, whole_numbers=whole_numbers)
    config = tiny_config(tokenizer.get_vocab_size(), embed=embed, layers=layers)
    hf.save(Decoder(config, rngs=nnx.Rngs(seed)), folder, source=None)
    write_tokenizer(tokenizer, folder)


def chat_texts(demonstrations: str | Path) -> list[str]:
    """What a tokenizer for demonstrations should know: their messages, and the line that lists the tools."""
    texts = []
    for line in Path(demonstrations).read_text().splitlines():
        row = json.loads(line)
        names = [
            f" {tool['function']['name']}({', '.join(tool['function']['parameters']['properties'])})"
            for tool in row["tools"] or ()
        ]
        texts += ["system\n<tool_call>" + "".join(names), "user\n", "assistant\n"]
        texts += ["user\n<tool_response>\n", "\n</tool_response>"]
        texts += [message["content"] for message in row["messages"]]
    return texts
