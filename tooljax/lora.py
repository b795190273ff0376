"""Training adapters in place of weights: what a policy then has beside the weights that it was loaded with.

A training state holds the adapters alone, so gradients, moments and checkpoints are of them. The weights stay as they
were loaded, in the model's dtype; without adapters they are the reference policy.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from tooljax.config.lora import LoraConfig
from tooljax.model.adapters import Lora, initial_adapter, merged
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.model.hf_names import LAYER_NAMES, is_linear
from tooljax.pytree import pytree_dataclass
from tooljax.sharding import Layout, Params, shardings

MODULES = {hf_name.split(".")[1]: name for name, hf_name in LAYER_NAMES.items() if is_linear(name)}
"""Our name of each linear layer by its Hugging Face module: q_proj is wq."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a policy."""

    graphdef: nnx.GraphDef
    """Of a decoder that has them beside its weights."""
    shape: DecoderConfig
    """Of that decoder: its `lora` says which there are."""
    params: Params
    """As they start, in float32."""


@pytree_dataclass
class Adapted:
    """All that a decoder with adapters is made of."""

    adapters: Params
    base: Params


def lora_of(config: LoraConfig) -> Lora | None:
    """The adapters that a config asks for; None if it trains the weights themselves."""
    if not config.rank:
        return None
    targets = tuple(MODULES[name] for name in config.modules)
    return Lora(config.rank, config.alpha, targets, config.rank_stabilized)


def new_adapters(shape: DecoderConfig, lora: Lora, layout: Layout, *, seed: int) -> Adapters:
    """Adapters that change nothing yet: A is random, B is 0. The same on every mesh."""
    graphdef, flat = _abstract(shape, lora)

    def make() -> list[Any]:
        root = jax.random.key(seed)
        return [
            initial_adapter(
                jax.random.fold_in(root, i), path[-1], param.shape, jnp.dtype(jnp.float32)
            )
            for i, (path, param) in enumerate(flat)
        ]

    values = jax.jit(make, out_shardings=_places(flat, layout))()
    return _filled(graphdef, replace(shape, lora=lora), flat, values)


def given_adapters(
    shape: DecoderConfig, lora: Lora, layout: Layout, values: dict[str, np.ndarray]
) -> Adapters:
    """Adapters with these values, by name and as `adapter_shapes` has them, layers stacked."""
    graphdef, flat = _abstract(shape, lora)
    found = [values[path[-1]].astype(np.float32) for path, _ in flat]
    places = _places(flat, layout)
    if places is None:
        return _filled(graphdef, replace(shape, lora=lora), flat, jax.device_put(found))
    placed = [
        jax.make_array_from_callback(x.shape, place, x.__getitem__)
        for x, place in zip(found, places, strict=True)
    ]
    return _filled(graphdef, replace(shape, lora=lora), flat, placed)


def abstract_adapters(shape: DecoderConfig, lora: Lora, layout: Layout) -> Adapters:
    """Shapes, dtypes and placements of adapters, for programs that are only compiled."""
    graphdef, flat = _abstract(shape, lora)
    places = _places(flat, layout) or [None] * len(flat)
    values = [
        jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=place)
        for (_, param), place in zip(flat, places, strict=True)
    ]
    return _filled(graphdef, replace(shape, lora=lora), flat, values)


def merged_params(decoder: Decoder) -> Params:
    """All weights of a decoder, adapters merged into them: a second copy of those that have any."""
    lora = decoder.cfg.lora
    assert lora is not None, "a decoder with adapters"
    _, adapters, base = nnx.split(decoder, nnx.LoRAParam, ...)
    flat = []
    for path, param in nnx.to_flat_state(base):
        if path[-1] in lora.targets:
            a, b = (adapters["layers"][f"{path[-1]}_{part}"][...] for part in "ab")
            whole = _merged(param.get_value(), a, b, scale=lora.scale, name=path[-1])
            param = param.replace(whole)
        flat.append((path, param))
    return nnx.from_flat_state(flat)


@partial(jax.jit, static_argnames=("scale", "name"))
def _merged(weight: Array, a: Array, b: Array, *, scale: float, name: str) -> Array:
    def one(part: tuple[Array, Array, Array, Array]) -> Array:
        return merged(part[0], part[1], part[2], scale, name=name, layer=part[3])

    return jax.lax.map(one, (weight, a, b, jnp.arange(weight.shape[0])))


def is_adapters(params: Any) -> bool:
    """Whether these are adapters alone, and not all weights of a decoder."""
    return not isinstance(params, Adapted) and "embedding" not in params


def trained_part(params: Any) -> Params:
    """What has gradients of all that a decoder is made of."""
    return params.adapters if isinstance(params, Adapted) else params


def with_trained_part(params: Any, trained: Params) -> Any:
    """The same decoder with other values of that part."""
    return Adapted(trained, params.base) if isinstance(params, Adapted) else trained


# --- small parts ----------------------------------------------------------------------------------------------------


def _abstract(shape: DecoderConfig, lora: Lora) -> tuple[nnx.GraphDef, list[tuple[Any, Any]]]:
    """The structure of a decoder with adapters, and those in a fixed order: path and abstract value."""
    cfg = replace(shape, lora=lora)
    decoder = nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0)))
    graphdef, adapters, _ = nnx.split(decoder, nnx.LoRAParam, ...)
    return graphdef, list(nnx.to_flat_state(adapters))


def _places(flat: list[tuple[Any, Any]], layout: Layout) -> Any:
    """Where each is; None on one device."""
    if layout.mesh is None:
        return None
    placed = dict(nnx.to_flat_state(shardings(nnx.from_flat_state(flat), layout.mesh)))
    return [placed[path].get_value() for path, _ in flat]


def _filled(
    graphdef: nnx.GraphDef, shape: DecoderConfig, flat: list[tuple[Any, Any]], values: Any
) -> Adapters:
    state = [
        (path, param.replace(value)) for (path, param), value in zip(flat, values, strict=True)
    ]
    return Adapters(graphdef, shape, nnx.from_flat_state(state))
