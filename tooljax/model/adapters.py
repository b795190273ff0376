"""Low-rank adapters beside the weights of a decoder's layers (LoRA: Hu et al. 2021, arXiv:2106.09685, eq. 3).

A weight W [in, out] that is a target gets A [in, rank] and B [rank, out], and its product becomes x W + scale (x A) B:
W is not written to, so it needs no gradient, and neither W + scale A B nor its gradient ever exists.

Beside a bfloat16 W the two products are one, [x, scale x A] [W; B], whose sum is rounded once. Rounded first, x W would
swallow what is smaller than half its last bit, which is most of what adapters say while they are young.

Differs from the paper: A starts uniform between plus and minus 1/sqrt(in), as in its authors' code and in PEFT, so that
learning rates mean the same; B starts at 0, so that the first update begins at the very weights that were loaded. There
is no dropout, which would make the trainer's log-probs others than the engine's.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tooljax.model.precision import rounded_by_thresholds

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Shape and logical axes of weights by their names."""


@dataclass(frozen=True)
class Lora:
    """Which weights of each layer have adapters, and of what size."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names in `decoder.layer_shapes`, in its order."""
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank; alpha / sqrt(rank) if it is to be stable over ranks (arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def input_axes(name: str) -> int:
    """How many axes of a layer's product are its input; the others are its output."""
    return 2 if name == "wo" else 1  # attention's output is [q_heads head_dim]


def adapter_shapes(
    lora: Lora | None, weights: Shapes
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and logical axes of A and B of each target of one layer, as wq_a and wq_b are to wq."""
    if lora is None:
        return {}
    shapes = {}
    for name in lora.targets:
        shape, axes = weights[name]
        n = input_axes(name)
        shapes[f"{name}_a"] = ((*shape[:n], lora.rank), (*axes[:n], "lora_rank"))
        shapes[f"{name}_b"] = ((lora.rank, *shape[n:]), ("lora_rank", *axes[n:]))
    return shapes


def is_adapter(name: str) -> bool:
    """Whether a weight of a layer is an A or a B."""
    return name.endswith(("_a", "_b"))


def adapted_product(
    x: Array, weight: Array, a: Array, b: Array, scale: float, product: Callable[..., Array]
) -> Array:
    """x W + scale (x A) B in one product [T, out...] of x [T, in...]; `product` is an einsum."""
    rows = x.reshape(x.shape[0], -1)
    inputs, rank = rows.shape[1], b.shape[0]
    low = product("TI,IR->TR", rows, a.reshape(inputs, rank)) * scale
    both = jnp.concatenate([rows, low], axis=1)
    stacked = jnp.concatenate([weight.reshape(inputs, -1), b.reshape(rank, -1)])
    return product("TI,IO->TO", both, stacked).reshape(x.shape[0], *b.shape[1:])


def initial_adapter(key: Array, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An A or B [layer, ...] before the first update."""
    if name.endswith("_b"):
        return jnp.zeros(shape, dtype)
    bound = math.prod(shape[1:-1]) ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def merged(weight: Array, a: Array, b: Array, scale: float, *, name: str, layer: Array) -> Array:
    """W + scale A B of one layer, added up in float32 and rounded to W's dtype: what an engine is given.

    A bfloat16 W is rounded down or up by where the sum lies between the two against a threshold of its own, which is
    the same in every call: the nearest would be W itself for as long as a change is smaller than half its last bit,
    and most of a low-rank change would be lost. So single weights are off by up to a bit, their products are not.
    """
    product = jnp.tensordot(
        a.astype(jnp.float32), b.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST
    )
    wide = weight.astype(jnp.float32) + scale * product
    if weight.dtype != jnp.bfloat16:
        return wide.astype(weight.dtype)
    key = jax.random.fold_in(jax.random.key(zlib.crc32(name.encode())), layer)
    return rounded_by_thresholds(wide, jax.random.bits(key, wide.shape, jnp.uint16))
