"""AdamW, the learning rate beside it, and weights that are too narrow for its steps.

The learning rate is applied at the update's own step count, so the value that is reported is the value that was used,
also after a skipped update.

A step of 1e-6 vanishes in a bfloat16 weight of 0.1, whose neighbours are 5e-4 away. Either float32 master weights
stand beside them, which take the steps and are rounded once an update; or there are none, and a weight that has taken
its step in float32 is rounded up or down at random, up the likelier the nearer it is, so that it is right on average.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from tooljax.model.precision import rounded_by_thresholds
from tooljax.pytree import pytree_dataclass

Params = Any

STACKED = "layers"
"""In the path of weights that have one part for each layer on their leading axis."""


@pytree_dataclass
class OptState:
    """What AdamW keeps from update to update. Trees are shaped as the weights are, in float32."""

    count: Int[Array, ""]
    """Updates that were made, without those that were skipped."""
    mu: Params
    """First moment."""
    nu: Params
    """Second moment."""
    master: Params
    """The weights before they are rounded; None where they are float32 themselves, or rounded at random."""


class _Step(NamedTuple):
    """What all weights of one update share."""

    made: Bool[Array, ""]
    clip: Float[Array, ""]
    """What gradients are multiplied by."""
    bias1: Float[Array, ""]
    bias2: Float[Array, ""]
    rate: Float[Array, ""]


class _Weight(NamedTuple):
    """One weight, and what belongs to it."""

    param: Array
    gradient: Array
    mu: Array
    nu: Array
    master: Array | None


@dataclass(frozen=True)
class Optimizer:
    """params <- params - learning_rate(step) * direction."""

    learning_rate: Callable[[Int[Array, ""]], Float[Array, ""]]
    """By the number of updates made before this one."""
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    rounding: Literal["master", "stochastic"] = "master"
    """Of weights narrower than float32."""
    seed: int = 0
    """Of random rounding."""
    offload: bool = False
    """Moments and master weights are in the host's memory, and come to the devices layer by layer."""

    def init(self, params: Params) -> OptState:
        """The state before the first update."""

        def zeros() -> Params:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

        narrow = any(x.dtype != jnp.float32 for x in jax.tree.leaves(params))
        master = narrow and self.rounding == "master"
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), params) if master else None
        return OptState(jnp.zeros((), jnp.int32), zeros(), zeros(), wide)

    def update(
        self,
        params: Params,
        gradients: Params,
        state: OptState,
        *,
        step: Int[Array, ""],
        norm: Float[Array, ""],
        made: Bool[Array, ""],
    ) -> tuple[Params, OptState]:
        """Weights and state after an update; as they were unless `made`. `norm` is that of all gradients together."""
        count = state.count + made.astype(jnp.int32)
        after = (state.count + 1).astype(jnp.float32)
        now = _Step(
            made,
            clip=jnp.where(norm < self.clip_norm, 1.0, self.clip_norm / norm),
            bias1=1.0 - jnp.float32(self.b1) ** after,
            bias2=1.0 - jnp.float32(self.b2) ** after,
            rate=self.learning_rate(step),
        )
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        names = [_names(path) for path, _ in paths]
        columns = [[leaf for _, leaf in paths]]
        columns += [jax.tree.leaves(x) for x in (gradients, state.mu, state.nu)]
        columns += [[None] * len(names) if state.master is None else jax.tree.leaves(state.master)]
        weights = [_Weight(*row) for row in zip(*columns, strict=True)]
        moved = self._moved(
            names, weights, now, jax.random.fold_in(jax.random.key(self.seed), step)
        )
        new_params, mu, nu, master = (tree.unflatten(each) for each in zip(*moved, strict=True))
        return new_params, OptState(count, mu, nu, None if state.master is None else master)

    def _moved(
        self, names: list[tuple[str, ...]], weights: list[_Weight], now: _Step, key: Array
    ) -> list[tuple]:
        """Each weight after the step, its moments and its master."""
        keys = [jax.random.fold_in(key, zlib.crc32("/".join(path).encode())) for path in names]
        if not self.offload:
            return [
                self._whole(path, weight, now, key)
                for path, weight, key in zip(names, weights, keys, strict=True)
            ]
        stacked = [i for i, path in enumerate(names) if STACKED in path]
        found: dict[int, tuple] = {
            i: _host(self._whole(path, _here(weight), now, keys[i]))
            for i, (path, weight) in enumerate(zip(names, weights, strict=True))
            if i not in stacked
        }

        def layer(index: Array, kept: list[tuple]) -> list[tuple]:
            """All weights of one layer: nothing more is on the devices at once."""
            out = []
            for i, whole in zip(stacked, kept, strict=True):
                param, *rest = (_part(x, index) for x in whole)
                weight = _Weight(param, _part(weights[i].gradient, index), *rest)
                moved = self._one(names[i], _here(weight), now, jax.random.fold_in(keys[i], index))
                out.append(tuple(map(_put_back, whole, _host(moved), [index] * len(whole))))
            return out

        if stacked:
            start = [(w.param, w.mu, w.nu, w.master) for w in (weights[i] for i in stacked)]
            layers = weights[stacked[0]].param.shape[0]
            found |= zip(stacked, jax.lax.fori_loop(0, layers, layer, start), strict=True)
        return [found[i] for i in range(len(names))]

    def _whole(self, path: tuple[str, ...], weight: _Weight, now: _Step, key: Array) -> tuple:
        """A weight; of one that is stacked, each layer is rounded by a key of its own."""
        if STACKED not in path:
            return self._one(path, weight, now, key)
        layers = jnp.arange(weight.param.shape[0])
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, layers)
        return self._one(path, weight, now, keys)

    def _one(self, path: tuple[str, ...], weight: _Weight, now: _Step, key: Array) -> tuple:
        """AdamW (arXiv:1711.05101, algorithm 2), and the rounding of what is narrower than float32."""
        param, gradient, mu, nu, master = weight
        gradient = gradient * now.clip
        new_mu = self.b1 * mu + (1.0 - self.b1) * gradient
        new_nu = self.b2 * nu + (1.0 - self.b2) * gradient * gradient
        direction = (new_mu / now.bias1) / (jnp.sqrt(new_nu / now.bias2) + self.eps)
        wide = param.astype(jnp.float32) if master is None else master
        if decays(path):
            direction = direction + self.weight_decay * wide
        # One value for both: the compiler could compute it twice, contracted in two ways; a checkpoint has one only.
        moved = jax.lax.optimization_barrier(wide - now.rate * direction)
        if param.dtype == jnp.float32 or master is not None:
            narrow = moved.astype(param.dtype)
        else:
            narrow = rounded_at_random(moved, key, param.dtype)

        def kept(new: Array, old: Array) -> Array:
            return jnp.where(now.made, new, old)

        new_master = None if master is None else kept(moved, master)
        return kept(narrow, param), kept(new_mu, mu), kept(new_nu, nu), new_master


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int,
    schedule: Literal["constant", "cosine"],
    total_steps: int,
    weight_decay: float,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
    rounding: Literal["master", "stochastic"] = "master",
    seed: int = 0,
    offload: bool = False,
) -> Optimizer:
    """AdamW after clipping by the global norm."""

    def rate(step: Int[Array, ""]) -> Float[Array, ""]:
        # The first update of a warm-up of n has 1/n of the peak, not 0: a batch of rollouts is too dear to waste.
        done = step.astype(jnp.float32)
        warm = jnp.minimum((done + 1.0) / max(warmup_steps, 1), 1.0)
        if schedule == "constant":
            return learning_rate * warm
        # From the end of warm-up to the last of total_steps.
        span = max(total_steps - 1 - warmup_steps, 1)
        progress = jnp.clip((done - warmup_steps) / span, 0.0, 1.0)
        return learning_rate * warm * (0.1 + 0.9 * 0.5 * (1.0 + jnp.cos(math.pi * progress)))

    return Optimizer(rate, b1, b2, eps, weight_decay, clip_norm, rounding, seed, offload)


def rounded_at_random(
    x: Float[Array, "*shape"], key: Array, dtype: jnp.dtype
) -> Float[Array, "*shape"]:
    """float32 as bfloat16: one of the two neighbours, by a probability that makes the mean exact. A value that bfloat16
    has stays what it is. With an array of keys, each is of one part of the leading axis."""
    assert dtype == jnp.bfloat16, "the 16 bits that it lacks are replaced below"
    if key.ndim:
        draw = jax.vmap(lambda key: jax.random.bits(key, x.shape[1:], jnp.uint16))
        bits: UInt[Array, "*shape"] = draw(key)
    else:
        bits = jax.random.bits(key, x.shape, jnp.uint16)
    return rounded_by_thresholds(x, bits)


def decays(path: tuple[str, ...]) -> bool:
    """Whether a weight of this path decays: norm scales and biases, which are known by their names, do not."""
    return not any(name.endswith("norm") or name in ("bq", "bk", "bv") for name in path)


def _names(path: tuple) -> tuple[str, ...]:
    """The keys of a path, without those of the variable at its end."""
    return tuple(str(entry.key) for entry in path if hasattr(entry, "key"))


# --- the host's memory ----------------------------------------------------------------------------------------------


def _here(weight: _Weight) -> _Weight:
    """With what the host keeps on the devices."""
    mu, nu, master = (_in(jax.memory.Space.Device, x) for x in weight[2:])
    return weight._replace(mu=mu, nu=nu, master=master)


def _host(moved: tuple) -> tuple:
    """The weight on the devices, its moments and its master on the host."""
    return moved[0], *(_in(jax.memory.Space.Host, x) for x in moved[1:])


def _in(space: Any, x: Array | None) -> Array | None:
    return None if x is None else jax.device_put(x, space)


def _part(x: Array | None, index: Array) -> Any:
    return None if x is None else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put_back(whole: Array | None, part: Array | None, index: Array) -> Array | None:
    if whole is None or part is None:
        return None
    return jax.lax.dynamic_update_index_in_dim(whole, part, index, 0)
