"""How exact matrix products are."""

import jax
import jax.numpy as jnp


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32 on every backend: TPUs and GPUs would otherwise round float32 operands."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
