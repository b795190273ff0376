"""Turns a Llama-family GGUF file with SmolLM2's tokenizer into a Hugging Face folder, for the tests.

    python tests/tools/gguf_to_hf.py IN.gguf OUT_FOLDER [--dtype float32|bfloat16]

Weights are dequantised; the tokenizer and the chat template are rebuilt from the GGUF's metadata. Other model
families and other tokenizers are refused: a wrong pre-tokenizer would change every token id without a word.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, output: Path, dtype: str) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `output`."""
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    family, pre = fields["general.architecture"], fields["tokenizer.ggml.pre"]
    if (family, pre) != ("llama", "smollm"):
        raise SystemExit(
            f"{source} is {family} with tokenizer {pre}; only llama with smollm is known"
        )
    output.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(reader, fields, DTYPES[dtype]))
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = _model_config(fields, tied="lm_head.weight" not in tensors, dtype=dtype)
    _write_json(output / "config.json", config)
    _tokenizer(fields).save(str(output / "tokenizer.json"))
    _write_json(output / "tokenizer_config.json", _tokenizer_config(fields))


def _tensors(
    reader: GGUFReader, fields: dict[str, Any], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Each weight under its Hugging Face name, [out, in]."""
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest axis first
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if tensor.name in OUTER_NAMES:
            name = OUTER_NAMES[tensor.name]
        else:
            _, layer, part, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"
            if part in heads:
                weight = _rotary_halves(weight, heads[part])
        yield name, np.ascontiguousarray(weight.astype(dtype))


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF has the two numbers that rotary embedding turns together side by side, Hugging Face half a head apart."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _model_config(fields: dict[str, Any], *, tied: bool, dtype: str) -> dict[str, Any]:
    heads, embed = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": embed,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": embed // heads,
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: 9.999999747e-06 was 1e-5.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that takes digits one by one, as SmolLM2's does."""
    texts, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(texts, kinds, strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    texts = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": texts[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": texts[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": texts[fields["tokenizer.ggml.padding_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A SmolLM2 GGUF file as a Hugging Face folder.")
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.output, arguments.dtype)
