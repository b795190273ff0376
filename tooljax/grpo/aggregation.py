"""From values per token to one number. Each way is a sum over tokens with weights that are known before the update:

    token-mean               1 / N            DAPO (arXiv:2503.14476, eq. 8)
    seq-mean-token-sum       1 / S
    seq-mean-token-mean      1 / (S n_i)      GRPO (arXiv:2402.03300, eq. 3)
    seq-mean-token-sum-norm  1 / (S L)        Dr.GRPO (arXiv:2503.20783); L is a constant

N is the number of loss tokens of the whole batch, S that of its trajectories with any, n_i that of the token's own.
None depends on the microbatch or device that a token is in: however a batch is cut, parts add up to the same loss.

verl's releases disagree on the last: up to 0.7 it is 1 / L, without S (`batch_mean=False`).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tooljax.grpo.sequences import sequence_sums


def token_weights(
    kind: str,
    sequence: Int[np.ndarray, " tokens"],
    *,
    norm: float,
    batch_mean: bool = True,
) -> Float[np.ndarray, " tokens"]:
    """What each loss token of the whole batch weighs, float64. `norm` is L."""
    tokens, sequences = sequence.size, max(len(np.unique(sequence)), 1)
    if kind == "token-mean":
        return np.full(tokens, 1.0 / max(tokens, 1))
    if kind == "seq-mean-token-sum":
        return np.full(tokens, 1.0 / sequences)
    if kind == "seq-mean-token-mean":
        return 1.0 / (sequences * sequence_sums(np.ones(tokens), sequence))
    if kind == "seq-mean-token-sum-norm":
        return np.full(tokens, 1.0 / (norm * (sequences if batch_mean else 1)))
    raise ValueError(f"there is no aggregation {kind!r} (grpo.loss_agg_mode)")


def token_mean(
    per_token: Float[Array, "*shape"], mask: Bool[Array, "*shape"], denominator: Float[Array, ""]
) -> Float[Array, ""]:
    """Sum over the mask divided by `denominator`; means of parts of a batch add up to the mean of the batch.

    A denominator of 0 gives 0. What per_token holds outside the mask does not matter, unless its gradient is NaN.
    """
    total = jnp.sum(jnp.where(mask, per_token, 0.0), dtype=jnp.float32)
    return total / jnp.maximum(denominator, 1.0)
