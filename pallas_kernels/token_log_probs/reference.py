"""The definition of token_log_probs, in plain float32 JAX: materialises [tokens vocab]."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.token_log_probs.problem import Head, Problem, Rows, clean, tempered


def check(problem: Problem, hidden: Array, head: Array, bias: Array | None) -> None:
    """NotImplementedError for shards of the vocabulary, or a mesh."""
    del hidden, head, bias
    if problem.shards.vocab is not None or problem.shards.mesh is not None:
        raise NotImplementedError("the reference knows one device only")


def per_token(problem: Problem, hidden: Array, head: Head, rows: Rows) -> Rows:
    """log_prob, log_normaliser and entropy; JAX differentiates it."""
    weights, bias = head
    weights = weights if problem.vocab_major else weights.T
    highest = jax.lax.Precision.HIGHEST
    x = clean(rows | {"hidden": hidden}).astype(jnp.float32)
    logits = jnp.einsum("TD,VD->TV", x, weights.astype(jnp.float32), precision=highest)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None]
    logits, _ = tempered(problem, logits, rows["scale"])
    log_softmax = jax.nn.log_softmax(logits, axis=-1)
    # Negative indices would count from the end: beyond it, they give NaN like all others outside.
    index = jnp.where(rows["targets"] < 0, weights.shape[0], rows["targets"])[:, None]
    out = {
        "log_prob": jnp.take_along_axis(log_softmax, index, axis=1, mode="fill")[:, 0],
        "log_normaliser": jax.nn.logsumexp(logits, axis=-1),
    }
    if problem.entropy:
        out["entropy"] = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
    if "valid" not in rows:
        return out
    return {name: jnp.where(rows["valid"], values, 0.0) for name, values in out.items()}
