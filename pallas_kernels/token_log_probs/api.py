"""token_log_probs and the choice of its implementation.

There is one chooser, this file, and two exceptions: an implementation raises NotImplementedError when it cannot serve
this backend or these shapes (the next one is tried) and ValueError when the caller is wrong (nothing else is tried).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.token_log_probs import chunked, reference

_IMPLEMENTATIONS: dict[str, Callable] = {
    "chunked": chunked.token_log_probs,
    "reference": reference.token_log_probs,
}
"""In the order in which they are tried."""


def token_log_probs(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
    *,
    temperature: float | Float[Array, ""] | Float[Array, " tokens"] = 1.0,
    valid: Bool[Array, " tokens"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """log softmax(hidden @ head.T / temperature)[targets] of each token, in float32, and the softmax's entropy in nats.

    Both have gradients for hidden and head (reverse mode), none for temperature.
    Tokens that are not valid give exactly 0 and no gradient, whatever else they hold. A log-prob is never above 0.
    The target of a valid token must be in [0, vocab): others give NaN.

    `implementation` names one of "chunked", "reference"; None takes the first that can serve.
    """
    tokens = hidden.shape[0]
    if hidden.shape[1] != head.shape[1] or targets.shape != (tokens,):
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape} and targets {targets.shape} do not fit; "
            "they are [tokens embed], [vocab embed] and [tokens]"
        )
    if hidden.dtype != head.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} but head is {head.dtype}; cast one to the other's dtype"
        )
    if isinstance(temperature, int | float | np.number) and not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; use 1.0 for greedy sampling")
    rows = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    rows = jnp.broadcast_to(rows, (tokens,))
    mask = jnp.ones((tokens,), bool) if valid is None else valid
    reasons = []
    for name in _candidates(implementation):
        try:
            return _IMPLEMENTATIONS[name](hidden, head, targets, rows, mask)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"no implementation of token_log_probs can serve: {reasons}")


def _candidates(implementation: str | None) -> list[str]:
    if implementation is None:
        return list(_IMPLEMENTATIONS)
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown; choose one of {list(_IMPLEMENTATIONS)}"
        )
    return [implementation]
