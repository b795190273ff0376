"""Group relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2):

    A_i = (r_i - mean(r)) / std(r)        over the group of trajectories of one prompt

Differs from the paper: the division is optional (Dr.GRPO, arXiv:2503.20783, leaves it out), uses the sample standard
deviation (n - 1) plus 1e-6 as verl does, and a group without variance gets exactly 0. Statistics leave out members
that could not be trained on; a group with fewer than two others has no variance.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

Array = jax.Array | np.ndarray

_STD_EPSILON = 1e-6
# Rewards that differ by less are equal but for rounding: 0.1 + 0.2 and 0.3. It is no larger than the epsilon
# that is added to the standard deviation, below which an advantage would be mostly noise anyway.
_TOLERANCE = 1e-6


def group_advantages(
    reward: Float[Array, "prompt group"],
    *,
    scale_by_std: bool,
    valid: Bool[Array, "prompt group"] | None = None,
) -> Float[jax.Array, "prompt group"]:
    """Centres each reward on its group's mean and, if asked, divides by the group's standard deviation.

    0 for members that are not valid, and for all members of a group whose rewards are all equal.
    """
    reward, valid, count = _prepared(reward, valid)
    mean = _sum(reward) / jnp.maximum(count, 1.0)
    centred = jnp.where(valid, reward - mean, 0.0)
    if scale_by_std:
        variance = _sum(centred * centred) / jnp.maximum(count - 1.0, 1.0)
        centred = centred / (jnp.sqrt(variance) + _STD_EPSILON)
    return jnp.where(zero_variance(reward, valid=valid)[:, None], 0.0, centred)


def zero_variance(
    reward: Float[Array, "prompt group"], *, valid: Bool[Array, "prompt group"] | None = None
) -> Bool[jax.Array, " prompt"]:
    """True for groups whose valid rewards are all equal, up to rounding: nothing to learn from them."""
    reward, valid, count = _prepared(reward, valid)
    highest = jnp.max(jnp.where(valid, reward, -jnp.inf), axis=1)
    lowest = jnp.min(jnp.where(valid, reward, jnp.inf), axis=1)
    size = jnp.maximum(jnp.max(jnp.abs(reward), axis=1), 1.0)
    return (highest - lowest <= _TOLERANCE * size) | (count[:, 0] < 2.0)


def _prepared(reward: Array, valid: Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 rewards with 0 where not valid, the mask, and the number of valid members [prompt 1]."""
    mask = jnp.ones(reward.shape, bool) if valid is None else jnp.asarray(valid)
    return (
        jnp.where(mask, jnp.asarray(reward, jnp.float32), 0.0),
        mask,
        _sum(mask.astype(jnp.float32)),
    )


def _sum(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=1, keepdims=True)
