"""The trained policy as the entry points see it: loaded from a folder, updated, sent and written back."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from tooljax.adapter_files import read_adapter, write_adapter
from tooljax.config import Config
from tooljax.distributed import is_first, to_host
from tooljax.lora import (
    Adapters,
    given_adapters,
    is_adapters,
    lora_of,
    merged_params,
    new_adapters,
)
from tooljax.model import hf
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.objective import make_objective
from tooljax.optimizer import make_optimizer
from tooljax.sharding import ONE_DEVICE, Layout, make_layout, shardings
from tooljax.update import Frozen, Params, TrainState, Updater


@dataclass(frozen=True)
class Policy:
    """A decoder's structure, the weights it was loaded with, and the folder they came from."""

    graphdef: nnx.GraphDef
    params: Params
    """As loaded. The reference policy of a run is exactly these."""
    shape: DecoderConfig
    folder: str
    layout: Layout = ONE_DEVICE
    """Where the weights are, and where it is trained."""
    adapters: Adapters | None = None
    """Trained in place of the weights, where there are any."""

    @classmethod
    def load(
        cls,
        folder: str,
        dtype: Literal["float32", "bfloat16"],
        layout: Layout = ONE_DEVICE,
    ) -> "Policy":
        """Reads a Hugging Face folder, each device its part. ValueError says which file, tensor or axis is wrong."""
        if not folder:
            raise ValueError("model.path is empty: set it to a Hugging Face folder")
        mesh = layout.mesh
        decoder = hf.load(folder, dtype, partial(shardings, mesh=mesh) if mesh else None)
        graphdef, params = nnx.split(decoder)
        return cls(graphdef, params, decoder.cfg, folder, layout)

    @property
    def trained(self) -> Params:
        """What an update changes, as it starts: the adapters, or all weights."""
        return self.adapters.params if self.adapters else self.params

    def decoder(self, params: Params) -> Decoder:
        """With these weights; with these adapters beside those that were loaded."""
        if self.adapters is not None and is_adapters(params):
            return nnx.merge(self.adapters.graphdef, params, self.params)
        return nnx.merge(self.graphdef, params)

    def tensors(self, params: Params) -> Iterator[tuple[str, jax.Array]]:
        """Weights under their Hugging Face names, as they are pushed; adapters are merged, one at a time. None is one
        of the arrays given, which an update may consume."""
        decoder = self.decoder(params)
        given = {id(leaf) for leaf in jax.tree.leaves(params)}
        for name, tensor in hf.to_hf(decoder.cfg, decoder):
            yield name, jnp.copy(tensor) if id(tensor) in given else tensor

    def whole(self, params: Params) -> Params:
        """All weights, adapters merged: a second copy of those that have any."""
        decoder = self.decoder(params)
        return merged_params(decoder) if decoder.cfg.lora else params

    def save(self, params: Params, folder: str | Path) -> None:
        """Writes a Hugging Face folder with the tokenizer and template of the one the policy came from. Every process
        of a run must call it; the first one writes."""
        if is_first():
            hf.save(self.decoder(params), folder, source=self.folder)
            return
        for _, tensor in self.tensors(params):
            to_host(tensor)

    def save_adapter(self, params: Params, folder: str | Path) -> None:
        """Writes adapters as a PEFT folder, in their own dtype. Every process must call it; the first one writes."""
        assert self.adapters is not None, "asked for a policy with adapters"
        write_adapter(self.adapters.shape, params, folder, base=self.folder, write=is_first())


def layout_of(config: Config) -> Layout:
    """Where a config trains. ValueError if there are not the devices for it."""
    mesh = config.mesh
    return make_layout(
        mesh.data, mesh.fsdp, mesh.tensor, mesh.context, attention=config.model.attention
    )


def load_policy(config: Config) -> Policy:
    """The policy that a config trains: model.path, and adapters if it asks for them. ValueError says what is wrong."""
    policy = Policy.load(config.model.path, config.model.dtype, layout_of(config))
    lora = lora_of(config.lora)
    if lora is None:
        return policy
    if config.lora.adapter:
        values = read_adapter(config.lora.adapter, replace(policy.shape, lora=lora))
        return replace(policy, adapters=given_adapters(policy.shape, lora, policy.layout, values))
    adapters = new_adapters(policy.shape, lora, policy.layout, seed=config.run.seed)
    return replace(policy, adapters=adapters)


def make_updater(
    config: Config, policy: Policy, *, total_updates: int, learning_rate: float
) -> Updater:
    """The update that a config asks for; reinforcement learning and cold start share it."""
    optimizer = make_optimizer(
        learning_rate=learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        schedule=config.optimizer.schedule,
        total_steps=total_updates,
        weight_decay=config.optimizer.weight_decay,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=config.optimizer.eps,
        clip_norm=config.optimizer.clip_norm,
        rounding=config.optimizer.rounding,
        seed=config.run.seed,
        offload=config.optimizer.offload,
    )
    return Updater(
        policy.graphdef,
        optimizer,
        dtype=config.model.dtype,
        temperature=config.sampling.temperature,
        objective=make_objective(config),
        rows_per_microbatch=config.batch.rows_per_microbatch,
        remat=config.model.remat,
        layout=policy.layout,
        frozen=_frozen(policy),
    )


def _frozen(policy: Policy) -> Frozen | None:
    if policy.adapters is None:
        return None
    return Frozen(policy.adapters.graphdef, policy.params, policy.adapters.params)


def abstract_state(updater: Updater, params: Params) -> TrainState:
    """What a checkpoint is restored into, and `updater.restored` makes a training state of: shapes, dtypes, placements.

    The checkpoint may be of another mesh: each device reads its part of what was saved.
    """
    return updater.saved(updater.abstract(params))
