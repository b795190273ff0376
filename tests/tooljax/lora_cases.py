"""A small policy with adapters, opened as the entry points do, and adapters that change something."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from policy_mesh_cases import settings

from tooljax.config import Config
from tooljax.config.schema import LoraConfig
from tooljax.policy import Policy, load_policy, make_updater
from tooljax.update import Updater


def lora_settings(folder: Path, *, dtype: Any = "float32", lora: Any = None, **mesh: Any) -> Config:
    """Of the small decoder that `policy_mesh_cases` writes to the folder."""
    given = LoraConfig(rank=4, alpha=8.0) if lora is None else lora
    config = settings(folder, dtype=dtype, **mesh)
    # Not clipped: gradients are read from the moments.
    return replace(config, lora=given, optimizer=replace(config.optimizer, clip_norm=1e9))


def opened(config: Config) -> tuple[Policy, Updater]:
    policy = load_policy(config)
    return policy, make_updater(config, policy, total_updates=10, learning_rate=1e-2)


def busy_adapters(policy: Policy, *, size: float = 0.2, seed: int = 0) -> Any:
    """Adapters as after some training: every A and B is random."""
    rng = np.random.default_rng(seed)

    def value(x: jax.Array) -> jax.Array:
        return jax.device_put((size * rng.standard_normal(x.shape)).astype(np.float32), x.sharding)

    return jax.tree.map(value, policy.trained)
