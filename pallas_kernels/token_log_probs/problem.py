"""What one call of token_log_probs is, for the operations and for every implementation of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

Rows = dict[str, Array]
"""Values per token, all with the same leading axis.

hidden, targets (of this shard's vocabulary; -1: none of it), scale (1 / temperature) and, unless all are, valid.
"""

Head = tuple[Array, Array | None]
"""The head of this shard, and its bias [vocab]."""


class Shards(NamedTuple):
    """Mesh axes over which tokens and vocabulary are spread: one each, or several.

    Without `mesh` the call is made inside a shard_map, and so is its gradient; with it, on whole arrays.
    """

    tokens: str | tuple[str, ...] | None = None
    vocab: str | tuple[str, ...] | None = None
    mesh: Mesh | None = None
    embed: str | tuple[str, ...] | None = None
    """Those of the tokens' axes over which the head's gradient comes back split along embed: it is summed by a
    reduce-scatter where an all-reduce would give all of it to all. Only with `mesh`."""


WHOLE = Shards()
"""Everything on one device."""


class Problem(NamedTuple):
    """What does not change with the data. Hashable."""

    vocab_major: bool = True
    """The head is [vocab, embed], not [embed, vocab]."""
    soft_cap: float | None = None
    entropy: bool = True
    shards: Shards = WHOLE
    chunk_tokens: int | None = None
    """Overrides the implementation's own choice."""

    def vocab(self, head: Array) -> int:
        """Columns of logits that this head gives."""
        return head.shape[vocab_axis(self)]

    def gradient_dtype(self, hidden: Array) -> jnp.dtype:
        """Of hidden's gradient as an implementation returns it: float32 if shards are still to be added."""
        return jnp.dtype(jnp.float32) if self.shards.vocab else hidden.dtype


def product(axes: str, a: Array, b: Array) -> Array:
    """Accumulated in float32; float32 operands are not rounded, as TPUs and GPUs would by default."""
    exact = a.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)


def clean(rows: Rows) -> Array:
    """Hidden states with zeros where not valid: whatever padding holds, NaN too, cannot reach a product."""
    hidden = rows["hidden"]
    if "valid" not in rows:
        return hidden
    return jnp.where(rows["valid"][:, None], hidden, jnp.zeros((), hidden.dtype))


def tempered(problem: Problem, raw: Array, scale: Float[Array, " rows"]) -> tuple[Array, Array]:
    """Logits [rows, ...] after soft-cap and temperature, and their derivative by the raw ones without the temperature.

    The derivative is a number when there is no soft-cap.
    """
    across = scale.reshape(scale.shape + (1,) * (raw.ndim - 1))
    if problem.soft_cap is None:
        return raw * across, jnp.ones((), jnp.float32)
    bent = jnp.tanh(raw / problem.soft_cap)
    return problem.soft_cap * bent * across, 1.0 - bent * bent


def target_logits(problem: Problem, rows: Rows, head: Head) -> tuple[Array, Array]:
    """Each token's tempered logit of its target, 0 where this shard has none, and the soft-cap's derivative there."""
    weights, bias = head
    inside = jnp.clip(rows["targets"], 0, problem.vocab(weights) - 1)
    picked = weights[inside] if problem.vocab_major else weights[:, inside].T
    raw = jnp.sum(clean(rows).astype(jnp.float32) * picked.astype(jnp.float32), axis=1)
    if bias is not None:
        raw = raw + bias[inside].astype(jnp.float32)
    logit, bend = tempered(problem, raw, rows["scale"])
    return jnp.where(rows["targets"] >= 0, logit, 0.0), bend


def vocab_axis(problem: Problem) -> int:
    """Of the head."""
    return 0 if problem.vocab_major else 1


def highest_over_vocab(problem: Problem, values: Array, rows: Rows) -> Array:
    """The maximum over the vocabulary's shards, and the rest if there is one."""
    axis = problem.shards.vocab
    values = values if axis is None else jax.lax.pmax(values, axis)
    return jnp.maximum(values, rows["rest highest"]) if "rest highest" in rows else values


def over_vocab(problem: Problem, values: Array) -> Array:
    """The sum over the vocabulary's shards."""
    axis = problem.shards.vocab
    return values if axis is None else jax.lax.psum(values, axis)
