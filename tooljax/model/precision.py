"""How exact matrix products are, and how float32 becomes bfloat16."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32 on every backend: TPUs and GPUs would otherwise round float32 operands."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def rounded_by_thresholds(
    x: Float[Array, "*shape"], thresholds: UInt[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """float32 as the bfloat16 on either side of it: the one away from 0 if the 16 bits that bfloat16 lacks and the
    threshold, uint16, add up to a carry. Over all thresholds the mean is exact. A value that bfloat16 has stays what it
    is, and so do inf and NaN."""
    # The upper half of a float32 is the bfloat16 below it, towards 0; a carry out of the lower half makes it the next.
    whole = jax.lax.bitcast_convert_type(x, jnp.uint32) + thresholds.astype(jnp.uint32)
    upper = jax.lax.shift_right_logical(whole, jnp.uint32(16)).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
