"""From values per token to one number: the token mean of DAPO (arXiv:2503.14476, eq. 8).

    mean = sum_t mask_t x_t / N

N is the number of masked-in tokens of the whole batch, not of a microbatch, device or trajectory: then neither the way
a batch is cut nor the length of a trajectory changes what a token weighs.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def token_mean(
    per_token: Float[Array, "*shape"], mask: Bool[Array, "*shape"], denominator: Float[Array, ""]
) -> Float[Array, ""]:
    """Sum over the mask divided by `denominator`; means of parts of a batch add up to the mean of the batch.

    A denominator of 0 gives 0. What per_token holds outside the mask does not matter, unless its gradient is NaN.
    """
    total = jnp.sum(jnp.where(mask, per_token, 0.0), dtype=jnp.float32)
    return total / jnp.maximum(denominator, 1.0)
