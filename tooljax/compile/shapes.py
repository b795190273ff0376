"""Shapes of the Qwen2.5 and Qwen3 models up to 32B: what their config.json says, so that none has to be there.

From the config.json of each model on huggingface.co/Qwen. A test compares their numbers of weights with those that the
model cards give.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from tooljax.model.decoder import DecoderConfig
from tooljax.model.hf import read_config


def _qwen2(
    embed: int, layers: int, q_heads: int, kv_heads: int, ffw: int, *, head_dim=128, tied=False
) -> DecoderConfig:
    return DecoderConfig(
        family="qwen2",
        vocab=151936 if tied else 152064,
        embed=embed,
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffw=ffw,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_head=tied,
        max_positions=32768,
        qkv_bias=True,
    )


def _qwen3(embed: int, layers: int, q_heads: int, ffw: int, *, tied=False) -> DecoderConfig:
    return replace(
        _qwen2(embed, layers, q_heads, 8, ffw, tied=tied),
        family="qwen3",
        vocab=151936,
        max_positions=40960,
        qkv_bias=False,
        qk_norm=True,
    )


SHAPES: dict[str, DecoderConfig] = {
    "Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, head_dim=64, tied=True),
    "Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, tied=True),
    "Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, tied=True),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944),
    "Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824),
    "Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648),
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12288),
    "Qwen3-14B": _qwen3(5120, 40, 40, 17408),
    "Qwen3-32B": _qwen3(5120, 64, 64, 25600),
}


def shape_of(path: str, dtype: Literal["float32", "bfloat16"]) -> DecoderConfig:
    """The shape in a folder's config.json; without a folder, of the model that the path's last part names.

    ValueError: neither is there, or the config.json is one that the decoder does not run.
    """
    if path and (Path(path) / "config.json").is_file():
        return read_config(path, dtype)
    name = Path(path).name.removesuffix("-Instruct").removesuffix("-Base")
    if name not in SHAPES:
        raise ValueError(
            f"model.path={path!r} is no folder with a config.json, and its last part names none of {[*SHAPES]}"
        )
    return replace(SHAPES[name], dtype=dtype)
