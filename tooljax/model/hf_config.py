"""Hugging Face config.json to and from `DecoderConfig`.

Everything that would make the decoder compute something else than the model's own code is refused by name: no field
is ignored that changes the result.
"""

import json
from pathlib import Path
from typing import Any, Literal

from tooljax.model.decoder import DecoderConfig, Llama3RopeScaling

Family = Literal["llama", "qwen2", "qwen3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

KEPT_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "attention_dropout",
    "use_cache",
)
"""What a saved config.json takes over from the folder that it was trained from."""

_SHAPES = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "q_heads": "num_attention_heads",
    "ffw": "intermediate_size",
    "max_positions": "max_position_embeddings",
}


def read_config(path: str | Path, dtype: Literal["float32", "bfloat16"]) -> DecoderConfig:
    """The shape of the model in a Hugging Face folder. Raises ValueError naming the field that does not fit."""
    file = Path(path) / "config.json"
    fields = _read_json(file)
    family = _family(file, fields)
    _refuse_unsupported(file, fields, family)
    shapes: dict[str, Any] = {n: _whole(file, fields, field) for n, field in _SHAPES.items()}
    theta, scaling = _rope(file, fields)
    kv_heads = _whole(file, fields, "num_key_value_heads", shapes["q_heads"])
    head_dim = _head_dim(file, fields, family)
    norm_eps = float(_need(file, fields, "rms_norm_eps"))
    try:
        return DecoderConfig(
            family=family,
            **shapes,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            norm_eps=norm_eps,
            tied_head=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            rope_scaling=scaling,
            dtype=dtype,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def config_fields(cfg: DecoderConfig) -> dict[str, Any]:
    """config.json of a decoder, in the form that transformers 4 and 5 and the engines all read."""
    architecture = next(name for name, family in ARCHITECTURES.items() if family == cfg.family)
    scaling = cfg.rope_scaling
    return {
        "architectures": [architecture],
        "model_type": cfg.family,
        **{field: getattr(cfg, name) for name, field in _SHAPES.items()},
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "tie_word_embeddings": cfg.tied_head,
        "torch_dtype": cfg.dtype,
    }


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: model.path must be a Hugging Face model folder")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(fields).__name__}")
    return fields


def _family(file: Path, fields: dict[str, Any]) -> Family:
    architectures = fields.get("architectures") or []
    known = [name for name in architectures if name in ARCHITECTURES]
    if len(architectures) != 1 or not known:
        raise ValueError(
            f"{file}: architectures={architectures} is not supported; "
            f"the decoder runs one of {[*ARCHITECTURES]}"
        )
    family = ARCHITECTURES[known[0]]
    # A Mistral saved as LlamaForCausalLM would otherwise lose its sliding window without a word.
    if fields.get("model_type", family) != family:
        raise ValueError(
            f"{file}: model_type={fields['model_type']!r} contradicts architectures={architectures}"
        )
    return family


def _refuse_unsupported(file: Path, fields: dict[str, Any], family: Family) -> None:
    refused: list[tuple[str, str]] = []
    if fields.get("hidden_act", "silu") != "silu":
        refused.append(("hidden_act", "the decoder has silu only"))
    # Qwen2 has its QKV bias whatever this field says, and none elsewhere.
    if family != "qwen2" and fields.get("attention_bias"):
        refused.append(("attention_bias", f"the decoder has no attention bias for {family}"))
    if fields.get("mlp_bias"):
        refused.append(("mlp_bias", "the decoder has no feed-forward bias"))
    if fields.get("quantization_config"):
        refused.append(("quantization_config", "dequantise the weights first"))
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        refused.append(("partial_rotary_factor", "the decoder rotates whole heads"))
    if any(kind != "full_attention" for kind in fields.get("layer_types") or []):
        refused.append(("layer_types", "the decoder has full attention only"))
    elif family != "llama" and "layer_types" not in fields and _windowed(fields):
        refused.append(("use_sliding_window", "the decoder has full attention only"))
    for field, why in refused:
        raise ValueError(f"{file}: {field}={fields[field]!r} is not supported: {why}")


def _windowed(fields: dict[str, Any]) -> bool:
    """Whether a Qwen config without layer_types gives some layer a sliding window (4096 by default)."""
    windows_from = fields.get("max_window_layers", 28)
    return (
        bool(fields.get("use_sliding_window"))
        and fields.get("sliding_window", 4096) is not None
        and windows_from < fields.get("num_hidden_layers", 0)
    )


def _rope(file: Path, fields: dict[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Theta and scaling, from rope_parameters (transformers 5) or rope_scaling and rope_theta (before)."""
    field = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(field) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: {field}={rope!r} must be an object")
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"{file}: {field}={rope!r} is not supported; "
            "the decoder has rope_type 'default' and 'llama3', the same in all layers"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{file}: {field}={rope!r}: the decoder rotates whole heads")
    if kind == "default":
        return theta, None
    numbers = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (float(_need(file, rope, name, field)) for name in numbers)
    original = _whole(file, rope, "original_max_position_embeddings", where=field)
    if not 0 < low < high:
        raise ValueError(
            f"{file}: {field} needs 0 < low_freq_factor={low} < high_freq_factor={high}"
        )
    return theta, Llama3RopeScaling(factor, low, high, original)


def _head_dim(file: Path, fields: dict[str, Any], family: Family) -> int:
    if fields.get("head_dim") is not None:
        return _whole(file, fields, "head_dim")
    if family == "qwen3":  # whose heads are 128 wide unless the config says otherwise
        return 128
    embed, heads = fields["hidden_size"], fields["num_attention_heads"]
    if embed % heads:
        raise ValueError(
            f"{file}: hidden_size={embed} is not a multiple of num_attention_heads={heads}; "
            "set head_dim"
        )
    return embed // heads


def _need(file: Path, fields: dict[str, Any], field: str, where: str = "") -> Any:
    if fields.get(field) is None:
        raise ValueError(f"{file}: {where + '.' if where else ''}{field} is missing")
    return fields[field]


def _whole(
    file: Path, fields: dict[str, Any], field: str, default: int | None = None, where: str = ""
) -> int:
    if fields.get(field) is None and default is not None:
        return default
    value = _need(file, fields, field, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{file}: {where + '.' if where else ''}{field}={value!r} must be a positive integer"
        )
    return value
