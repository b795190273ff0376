"""Low-rank adapters beside the weights of a decoder's layers (LoRA: Hu et al. 2021, arXiv:2106.09685, eq. 3).

A weight W [in, out] that is a target gets A [in, rank] and B [rank, out], and its product becomes x W + scale (x A) B:
W is not written to, so it needs no gradient, and neither W + scale A B nor its gradient ever exists.

Differs from the paper: A starts uniform between plus and minus 1/sqrt(in), as in its authors' code and in PEFT, so that
learning rates mean the same; B starts at 0, so that the first update begins at the very weights that were loaded. There
is no dropout, which would make the trainer's log-probs others than the engine's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

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


def initial_adapter(key: Array, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An A or B [layer, ...] before the first update."""
    if name.endswith("_b"):
        return jnp.zeros(shape, dtype)
    bound = math.prod(shape[1:-1]) ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def merged(weight: Array, a: Array, b: Array, scale: float) -> Array:
    """W + scale A B of one layer, added up in float32 and rounded to W's dtype: what an engine is given."""
    product = jnp.tensordot(
        a.astype(jnp.float32), b.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST
    )
    return (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)
