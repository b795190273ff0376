"""token_log_probs for any backend, in XLA: logits exist for one chunk of tokens at a time.

The backward pass recomputes each chunk's logits from the saved row maximum and normaliser. Logits, softmax and all
sums are float32; with bfloat16 weights the operands of the two backward products are rounded to bfloat16, their sums
are not.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.token_log_probs import chunks
from pallas_kernels.token_log_probs.chunks import Gradients, SlopeOf
from pallas_kernels.token_log_probs.problem import (
    Head,
    Problem,
    Rows,
    clean,
    highest_over_vocab,
    product,
    tempered,
)

# Largest chunk of logits, in elements: 256 MiB of float32. Everything that a tiny model needs is one chunk.
_CHUNK_ELEMENTS = 2**26
_ALIGN = 128


def check(problem: Problem, hidden: Array, head: Array, bias: Array | None) -> None:
    """Serves everything."""
    del problem, hidden, head, bias


def default_chunk_tokens(vocab: int) -> int:
    """Tokens whose logits fill the largest chunk allowed, a multiple of 128."""
    return max(_CHUNK_ELEMENTS // vocab // _ALIGN, 1) * _ALIGN


def statistics(problem: Problem, rows: Rows, head: Head) -> Rows:
    """See op."""
    return chunks.forward(
        rows, _chunk(problem, rows, head), partial(_statistics, problem, head=head)
    )


def gradients(problem: Problem, rows: Rows, head: Head) -> Gradients:
    """See op."""
    return chunks.backward(problem, rows, head, _chunk(problem, rows, head), _d_logits)


def fused(problem: Problem, rows: Rows, head: Head, slope_of: SlopeOf) -> tuple[Gradients, Rows]:
    """See chunks.fused."""
    chunk = _chunk(problem, rows, head)
    return chunks.fused(problem, rows, head, chunk, _powers, slope_of, chunks.scattered)


def _chunk(problem: Problem, rows: Rows, head: Head) -> int:
    wanted = problem.chunk_tokens or default_chunk_tokens(problem.vocab(head[0]))
    return min(wanted, rows["targets"].shape[0])


def _statistics(problem: Problem, rows: Rows, *, head: Head) -> Rows:
    logits, _ = tempered_logits(problem, rows, head)
    highest = jnp.max(logits, axis=1)
    below = logits - highest[:, None]
    powers = jnp.exp(below)
    is_target = _is_target(rows, logits)
    out = {
        "highest": highest,
        "total": jnp.sum(powers, axis=1),
        "picked": jnp.sum(jnp.where(is_target, logits, 0.0), axis=1),
    }
    if problem.entropy:
        out["weighted"] = jnp.sum(powers * below, axis=1)
    return out


def _d_logits(problem: Problem, rows: Rows, head: Head) -> Array:
    logits, bend = tempered_logits(problem, rows, head)
    # In two steps: large logits lose no digits that matter.
    log_softmax = logits - rows["highest"][:, None] - rows["log_total"][:, None]
    factor = rows["level"][:, None]
    if "slope" in rows:
        factor = factor + rows["slope"][:, None] * log_softmax
    d_logits = jnp.exp(log_softmax) * factor
    d_logits = d_logits + jnp.where(_is_target(rows, logits), rows["pick"][:, None], 0.0)
    d_logits = d_logits * bend * rows["scale"][:, None]
    if "valid" in rows:
        d_logits = jnp.where(rows["valid"][:, None], d_logits, 0.0)
    return d_logits.astype(rows["hidden"].dtype)


def _powers(problem: Problem, rows: Rows, head: Head, again: Array) -> Rows:
    """Relative to the row's maximum: always safe."""
    del again
    logits, bend = tempered_logits(problem, rows, head)
    shift = highest_over_vocab(problem, jnp.max(logits, axis=1), rows)
    below = logits - shift[:, None]
    powers = jnp.exp(below)
    out = {"shift": shift, "total": jnp.sum(powers, axis=1)}
    if problem.entropy:
        out["weighted"] = jnp.sum(powers * below, axis=1)
    return out | {"powers": (powers * bend).astype(rows["hidden"].dtype)}


def tempered_logits(problem: Problem, rows: Rows, head: Head) -> tuple[Array, Array]:
    """Logits [chunk, vocab] in float32, and the soft-cap's derivative."""
    weights, bias = head
    axes = "CD,VD->CV" if problem.vocab_major else "CD,DV->CV"
    raw = product(axes, clean(rows), weights)
    if bias is not None:
        raw = raw + bias.astype(jnp.float32)[None]
    return tempered(problem, raw, rows["scale"])


def _is_target(rows: Rows, logits: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == rows["targets"][:, None]
