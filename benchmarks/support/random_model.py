"""A random model of a real one's shape, with a tokenizer of its size whose every id is text: for measuring speed."""

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tool_call> ' ~ (tools | tojson) ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'user' if message.role == 'tool' else message.role %}
    {{- '<|im_start|>' ~ role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SIZES: dict[str, dict[str, int]] = {
    # The larger ones are Qwen2.5's.
    "tiny": {"vocab": 2048, "embed": 128, "layers": 2, "heads": 2, "kv_heads": 1, "ffw": 256},
    "0.5B": {"vocab": 151936, "embed": 896, "layers": 24, "heads": 14, "kv_heads": 2, "ffw": 4864},
    "1.5B": {
        "vocab": 151936,
        "embed": 1536,
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
        "ffw": 8960,
    },
    "3B": {
        "vocab": 151936,
        "embed": 2048,
        "layers": 36,
        "heads": 16,
        "kv_heads": 2,
        "ffw": 11008,
    },
}


def write_model(folder: Path, size: str, *, max_positions: int) -> None:
    """config.json, model.safetensors in bfloat16 and the tokenizer of a random Qwen2 model."""
    import torch
    from safetensors.torch import save_file

    shape = SIZES[size]
    head_dim = shape["embed"] // shape["heads"]
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": shape["vocab"],
        "hidden_size": shape["embed"],
        "intermediate_size": shape["ffw"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "dtype": "bfloat16",
        "use_sliding_window": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator) * 0.02).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    embed, ffw, kv = shape["embed"], shape["ffw"], shape["kv_heads"] * head_dim
    tensors = {
        "model.embed_tokens.weight": normal(shape["vocab"], embed),
        "model.norm.weight": ones(embed),
    }
    for layer in range(shape["layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = ones(embed)
        for name, width in (("q", embed), ("k", kv), ("v", kv)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(width, embed)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = normal(width)
        tensors[f"{prefix}self_attn.o_proj.weight"] = normal(embed, embed)
        tensors[f"{prefix}mlp.gate_proj.weight"] = normal(ffw, embed)
        tensors[f"{prefix}mlp.up_proj.weight"] = normal(ffw, embed)
        tensors[f"{prefix}mlp.down_proj.weight"] = normal(embed, ffw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, shape["vocab"])


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Byte-level BPE without merges: text is encoded byte by byte, and every other id decodes to four letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "abcdefghijklmnopqrst"
    for number in range(vocab - len(tokens)):
        word = ""
        for _ in range(4):
            number, letter = divmod(number, len(letters))
            word = letters[letter] + word
        tokens.append(word)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
