"""The definition of token_log_probs, in plain float32 JAX: materialises [tokens vocab]."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_log_probs(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
    temperature: Float[Array, " tokens"],
    valid: Bool[Array, " tokens"],
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """See api.token_log_probs."""
    hidden = jnp.where(valid[:, None], hidden, jnp.zeros((), hidden.dtype)).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("TD,VD->TV", hidden, head.astype(jnp.float32), precision=highest)
    log_softmax = jax.nn.log_softmax(logits / jax.lax.stop_gradient(temperature)[:, None], axis=-1)
    # Negative indices would count from the end: beyond it, they give NaN like all others outside.
    index = jnp.where(targets < 0, head.shape[0], targets)[:, None]
    picked = jnp.take_along_axis(log_softmax, index, axis=1, mode="fill")[:, 0]
    entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
    return jnp.where(valid, picked, 0.0), jnp.where(valid, entropy, 0.0)
