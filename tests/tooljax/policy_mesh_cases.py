"""A small policy on the mesh of a config, and a batch to train it on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from random_decoder import random_decoder
from update_cases import new_items

from tooljax.batch import TrainBatch, pack
from tooljax.config import Config
from tooljax.config.schema import BatchConfig, MeshConfig, ModelConfig, OptimizerConfig
from tooljax.model import hf
from tooljax.model.decoder import DecoderConfig
from tooljax.policy import Policy, layout_of, make_updater
from tooljax.update import Updater

SHAPE = DecoderConfig(
    family="qwen2",
    vocab=64,
    embed=16,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=4,
    ffw=32,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tied_head=True,
    max_positions=64,
    qkv_bias=True,
    dtype="float32",
)


def settings(folder: Path, *, dtype: Any = "float32", **mesh: Any) -> Config:
    """Of a small decoder, which is written to the folder unless it is there."""
    if not folder.exists():
        hf.save(random_decoder(SHAPE), folder)
    whole = Config(
        model=ModelConfig(path=str(folder), dtype=dtype, remat="none"),
        mesh=replace(MeshConfig(fsdp=1), **mesh),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        batch=BatchConfig(row_lengths=(16,), rows_per_microbatch=4),
    )
    return replace(whole, grpo=replace(whole.grpo, kl_coef=0.0))


def opened(config: Config) -> tuple[Policy, Updater]:
    """The policy, and its updater."""
    policy = Policy.load(config.model.path, config.model.dtype, layout_of(config))
    return policy, make_updater(config, policy, total_updates=10, learning_rate=1e-2)


def small_batch() -> TrainBatch:
    """Four rows."""
    return pack(new_items(), row_lengths=(16,), rows_multiple=4)
