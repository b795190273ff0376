"""What an update changes, where it is, and what of it a checkpoint holds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tooljax.optimizer import Optimizer, OptState
from tooljax.pytree import pytree_dataclass
from tooljax.sharding import HOST_MEMORY, Layout, alike, shardings

Params = Any
"""The weights of a decoder, as nnx.split gives them."""


@pytree_dataclass
class TrainState:
    """What an update changes."""

    params: Params
    """In the model's dtype; with adapters these alone, in float32. None in a checkpoint that has master weights."""
    opt_state: OptState
    step: Any
    """int32 []. Updates made, counting those that were skipped."""


def first_state(optimizer: Optimizer, params: Params) -> TrainState:
    """The state before the first update, with weights of its own."""
    own = jax.tree.map(jnp.copy, params)
    return TrainState(own, optimizer.init(own), jnp.zeros((), jnp.int32))


def made_in_place(optimizer: Optimizer, layout: Layout, params: Params) -> TrainState:
    """The same, each array where `placement` says."""
    first = jax.eval_shape(partial(first_state, optimizer), params)
    places = placement(first, layout, optimizer)
    if places is None:
        return first_state(optimizer, params)
    if not optimizer.offload:
        return jax.jit(first_state, static_argnums=0, out_shardings=places)(optimizer, params)

    # One tree after the other: there may be no room on the devices for all of them.
    def made(part: Callable[[TrainState], Any]) -> Any:
        make = jax.jit(lambda p: part(first_state(optimizer, p)), out_shardings=part(places))
        return make(params)

    opt_state = OptState(
        made(lambda state: state.opt_state.count),
        made(lambda state: state.opt_state.mu),
        made(lambda state: state.opt_state.nu),
        made(lambda state: state.opt_state.master),
    )
    return TrainState(made(lambda state: state.params), opt_state, made(lambda state: state.step))


def placement(state: TrainState, layout: Layout, optimizer: Optimizer) -> TrainState | None:
    """Where each array of a state is, which may be abstract; None if all are in the memory of one device."""
    mesh, leaves = layout.mesh, jax.tree.leaves(state)
    if mesh is not None:
        params = shardings(state.params, mesh)
        moments = alike(state.opt_state, state.params, params, mesh)
        places = [*jax.tree.leaves(params), *jax.tree.leaves(moments), layout.whole]
    elif optimizer.offload:
        # JAX knows the memory of an array in a program only by such a placement.
        whole = NamedSharding(Mesh([layout.device], ("one",)), PartitionSpec())
        places = [whole] * len(leaves)
    else:
        return None
    if optimizer.offload:
        weights = len(jax.tree.leaves(state.params))
        places = [
            place.with_memory_kind(HOST_MEMORY) if i >= weights and leaf.ndim else place
            for i, (place, leaf) in enumerate(zip(places, leaves, strict=True))
        ]
    return jax.tree.unflatten(jax.tree.structure(state), places)
