"""Policy losses, token by token.

The clipped surrogate of PPO (arXiv:1707.06347, eq. 7) as GRPO uses it (arXiv:2402.03300, eq. 3), with the two clip
bounds of DAPO (arXiv:2503.14476, eq. 8):

    ratio_t = exp(log_probs_t - old_log_probs_t)
    loss_t  = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

Differs from the papers: the log-ratio is first limited to +-20, as in verl, so that a ratio cannot overflow.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0


def importance_ratio(
    log_probs: Float[Array, "*shape"], old_log_probs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """exp(log_probs - old_log_probs), the log-ratio limited to +-20; float32."""
    log_ratio = log_probs.astype(jnp.float32) - old_log_probs.astype(jnp.float32)
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_ratio_loss(
    log_probs: Float[Array, "*shape"],
    old_log_probs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """The loss of each token, and where clipping took its gradient away."""
    ratio = importance_ratio(log_probs, jax.lax.stop_gradient(old_log_probs))
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(unclipped, clipped), clipped > unclipped
