"""Draws tokens from logits: temperature, then top-k, then top-p, and the log-prob under what is left.

Every row is drawn from its own seed and absolute position and from nothing else, so a trajectory is sampled alike
whoever else is in the batch. Greedy rows (temperature 0) take the likeliest token and report its log-prob under the
untempered distribution; top-k and top-p do not apply to them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tooljax.pytree import pytree_dataclass

HostOrDevice = Any
"""An argument of a compiled function: a NumPy array outside, traced inside."""


@pytree_dataclass
class SamplingRows:
    """How each row of a batch is drawn."""

    temperature: HostOrDevice
    """Float32 [batch]; 0 is greedy."""
    top_k: HostOrDevice
    """Int32 [batch]; 0 keeps every token."""
    top_p: HostOrDevice
    """Float32 [batch]; 1 keeps every token."""
    seeds: HostOrDevice
    """Uint32 [batch 2]: high and low half of each seed."""


def split_seed(seed: int) -> np.ndarray:
    """The two halves of a seed below 2**63, as uint32 [2]: the key that jax.random.key(seed) would hold in 64 bits."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must be at least 0 and below 2**63")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def draw(
    logits: Float[Array, "batch vocab"], rows: SamplingRows, positions: Int[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """The token at `positions` of each row, and its log-prob under the distribution it was drawn from."""
    greedy = rows.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
    filtered = ~greedy & ((rows.top_k > 0) | (rows.top_p < 1))
    # Without a row that needs it, the vocabulary is not sorted. Rows that do not need it pass through unchanged.
    scaled = jax.lax.cond(
        filtered.any(),
        lambda: jnp.where(
            filtered[:, None] & ~kept_tokens(scaled, rows.top_k, rows.top_p), -jnp.inf, scaled
        ),
        lambda: scaled,
    )
    noise = _gumbel(rows.seeds, positions, logits.shape[1])
    noisy = jnp.where(greedy[:, None], scaled, scaled + noise)
    tokens = jnp.argmax(noisy, axis=1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(scaled, axis=1)


def kept_tokens(
    logits: Float[Array, "batch vocab"], top_k: Int[Array, " batch"], top_p: Float[Array, " batch"]
) -> Bool[Array, "batch vocab"]:
    """True for the top_k likeliest tokens, and of those for the fewest that hold top_p of their probability.

    Among equal logits the lower token id counts as likelier, so exactly top_k tokens are kept.
    """
    vocab = logits.shape[1]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    falling, order = jax.lax.sort((-logits, ids), num_keys=2)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None]
    in_top_k = rank < jnp.where(top_k > 0, top_k, vocab)[:, None]
    probs = jax.nn.softmax(jnp.where(in_top_k, -falling, -jnp.inf), axis=1)
    before = jnp.cumsum(probs, axis=1) - probs
    # The likeliest token is kept whatever top_p is; float error must not keep tokens of probability 0 at top_p=1.
    keep = in_top_k & ((before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0))
    last = keep.sum(axis=1, dtype=jnp.int32)[:, None] - 1
    last_value = jnp.take_along_axis(falling, last, axis=1)
    last_id = jnp.take_along_axis(order, last, axis=1)
    return (-logits < last_value) | ((-logits == last_value) & (ids <= last_id))


def _gumbel(
    seeds: Array, positions: Int[Array, " batch"], vocab: int
) -> Float[Array, "batch vocab"]:
    """Standard Gumbel noise: argmax(logits + noise) is distributed as softmax(logits)."""

    def row(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    return jax.vmap(row)(seeds, positions)
