"""AdamW as an optax transformation, and the learning rate beside it.

The learning rate is not inside the transformation: the update applies it at its own step count, so the value that is
reported is the value that was used, also after a skipped update.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Optimizer:
    """params <- params - learning_rate(step) * direction."""

    transformation: optax.GradientTransformation
    """Gradient -> clipped -> Adam's direction -> plus weight decay."""
    learning_rate: Callable[[Int[Array, ""]], Float[Array, ""]]
    """By the number of updates made before this one."""

    def init(self, params: Any) -> Any:
        """The moments before the first update."""
        with _optax_arithmetic():
            return self.transformation.init(params)

    def direction(self, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """The direction to step against, and the new moments."""
        with _optax_arithmetic():
            return self.transformation.update(gradients, opt_state, params)


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
) -> Optimizer:
    """AdamW (arXiv:1711.05101) after clipping by the global norm."""
    transformation = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
    )

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

    return Optimizer(transformation, rate)


def _optax_arithmetic():
    """optax mixes integers and floats, which our own strict setting would reject."""
    return jax.numpy_dtype_promotion("standard")


def decay_mask(params: Any) -> Any:
    """True for the weights that decay: all but norm scales and biases, which are known by their names."""

    def decays(path: tuple, _: Any) -> bool:
        names = [str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path]
        return not any(name.endswith("norm") or name in ("bq", "bk", "bv") for name in names)

    return jax.tree_util.tree_map_with_path(decays, params)
