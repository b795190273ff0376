"""Estimates of KL(policy || reference) from tokens that the policy sampled (Schulman, "Approximating KL divergence"):

    d   = ref_log_probs - log_probs
    k1  = -d                 unbiased, can be negative
    k2  = d^2 / 2            biased, its gradient is that of the KL
    k3  = exp(d) - 1 - d     unbiased, never negative; GRPO's (arXiv:2402.03300, eq. 4)
    abs = |d|

A "+" behind a name is the straight-through form: that value, with the gradient of k2. In a loss it is the one to take:
the expected gradient of k1 is 0, and that of k3 is not that of the KL.

As in verl, k3 limits d to +-20 and its own value to 10: one absurd token cannot take over the loss.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def k1(
    log_probs: Float[Array, "*shape"], ref_log_probs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """log_probs - ref_log_probs of each token."""
    return log_probs.astype(jnp.float32) - ref_log_probs.astype(jnp.float32)


def k2(
    log_probs: Float[Array, "*shape"], ref_log_probs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Half the squared log-ratio of each token."""
    difference = k1(log_probs, ref_log_probs)
    return 0.5 * difference * difference


def k3(
    log_probs: Float[Array, "*shape"], ref_log_probs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """exp(d) - 1 - d of each token, at most 10. expm1 keeps it exact where the policies nearly agree."""
    d = jnp.clip(-k1(log_probs, ref_log_probs), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return jnp.minimum(jnp.expm1(d) - d, _MAX_K3)


def absolute(
    log_probs: Float[Array, "*shape"], ref_log_probs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Size of the log-ratio of each token."""
    return jnp.abs(k1(log_probs, ref_log_probs))


_ESTIMATES: dict[str, Callable[[Array, Array], Array]] = {
    "k1": k1,
    "kl": k1,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
    "abs": absolute,
}
"""By their names here and in verl."""


def kl_estimate(
    kind: str, log_probs: Float[Array, "*shape"], ref_log_probs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The estimate of that name, with or without "+", of each token."""
    name = kind.removesuffix("+")
    if name not in _ESTIMATES:
        raise ValueError(
            f"there is no KL estimate {kind!r}; choose one of {[*_ESTIMATES]}, with or without '+' behind it"
        )
    value = _ESTIMATES[name](log_probs, ref_log_probs)
    if name == kind:
        return value
    slope = k2(log_probs, ref_log_probs)
    return slope + jax.lax.stop_gradient(value - slope)
