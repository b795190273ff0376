"""Tokens in chunks: what bounds the memory of every implementation that writes logits or their gradients.

Valid tokens are first moved to the front, and only as many chunks are computed as hold one: the time is that of the
valid tokens, however they are spread.

C is a chunk of tokens, D embed, V vocab.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.token_log_probs.problem import (
    Head,
    Problem,
    Rows,
    clean,
    over_vocab,
    product,
    target_logits,
)

_UNSAFE = 2.0**64
"""A row whose sum of powers reaches this is computed anew, relative to its maximum."""

MAX_POWER = 80.0
"""Powers are cut off at e^80: finite in bfloat16, and far above the sum at which a chunk is computed anew."""

PowersOf = Callable[[Problem, Rows, Head, Array], Rows]
"""(problem, rows with picked, head, again) -> shift, total, weighted [C] and powers [C, V] of exp(logits - shift).

powers are rounded to hidden's dtype and, with a soft-cap, multiplied by its derivative. With `again` (a traced bool),
no sum may overflow.
"""

PutAtTargets = Callable[[Array, Array, Array], Array]
"""(powers [C, V], targets [C], values [C]) -> powers with each token's value at its target, if that is not -1."""

GradientOf = Callable[[Problem, Rows, Head], Array]
"""(problem, rows, head) -> d_logits [C, V] in hidden's dtype."""

SlopeOf = Callable[[Array, Rows], Array]
"""(log_probs of a chunk, its rows) -> d loss / d log_prob."""


class Gradients(NamedTuple):
    hidden: Array
    head: Array
    """float32."""
    bias: Array | None
    """float32."""


def forward(rows: Rows, chunk: int, of_chunk: Callable[[Rows], Rows]) -> Rows:
    """of_chunk's values for every token that is valid, 0 for the others."""
    tokens = rows["hidden"].shape[0]
    rows, order, count = valid_first(rows, chunk)
    padded = rows["hidden"].shape[0]
    if padded == chunk:
        return {name: values[:tokens] for name, values in of_chunk(rows).items()}
    names = jax.eval_shape(of_chunk, _cut(rows, jnp.int32(0), chunk))
    start = {name: jnp.zeros((padded,), jnp.float32) for name in names}

    def step(i: Array, out: Rows) -> Rows:
        values = of_chunk(_cut(rows, i, chunk))
        return {name: _paste(out[name], values[name], i, chunk) for name in out}

    out = lax.fori_loop(0, count, step, start)
    return {name: restored(values, order, tokens) for name, values in out.items()}


def backward(
    problem: Problem, rows: Rows, head: Head, chunk: int, gradient_of: GradientOf
) -> Gradients:
    """Gradients for the cotangents in `rows`, from one recomputation of each chunk's logits."""

    def d_logits(rows: Rows, again: Array) -> tuple[Array, Array, Array, Rows]:
        del again
        ones = jnp.ones(rows["targets"].shape, jnp.float32)
        return gradient_of(problem, rows, head), ones, jnp.bool_(True), {}

    return _accumulated(problem, rows, head, chunk, d_logits, ())[0]


def fused(
    problem: Problem,
    rows: Rows,
    head: Head,
    chunk: int,
    powers_of: PowersOf,
    slope_of: SlopeOf,
    put: PutAtTargets,
) -> tuple[Gradients, Rows]:
    """Gradients of a loss that depends on each token's log-prob alone, and picked, shift, total (and weighted).

    A chunk's logits are computed once. With q = exp(logits - shift) and a token's slope = d loss / d log_prob,

        d loss / d logit = weight (q - total [is target]),    weight = -slope scale / total

    so the weight is known only after the whole row, but it is one factor per row: it multiplies hidden on the way to
    the head's gradient and the product on the way to hidden's. What is written of a chunk is q alone.
    """

    def d_logits(rows: Rows, again: Array) -> tuple[Array, Array, Array, Rows]:
        local, bend = target_logits(problem, rows, head)
        picked = over_vocab(problem, local)
        if "rest picked" in rows:
            picked = picked + rows["rest picked"]
        got = powers_of(problem, rows | {"picked": picked}, head, again)
        powers, shift = got["powers"], got["shift"]
        names = ["total", "weighted"] if problem.entropy else ["total"]
        total = over_vocab(problem, jnp.stack([got[name] for name in names]))
        sums = with_rest(rows, shift, dict(zip(names, total, strict=True)))
        out = {"picked": picked, "shift": shift} | sums
        total = out["total"]
        valid = rows.get("valid", jnp.ones(total.shape, bool))
        good = again | jnp.all((total < _UNSAFE) | ~valid)
        slope = slope_of(jnp.minimum(picked - shift - jnp.log(total), 0.0), rows)
        weight = jnp.where(good & valid, -slope * rows["scale"] / total, 0.0)
        at_target = (jnp.exp(jnp.minimum(picked - shift, 0.0)) - total) * bend
        powers = put(powers, rows["targets"], at_target.astype(powers.dtype))
        return powers, weight, good, out

    names = ("picked", "shift", "total", *(("weighted",) if problem.entropy else ()))
    return _accumulated(problem, rows, head, chunk, d_logits, names)


def scattered(powers: Array, targets: Array, values: Array) -> Array:
    """PutAtTargets that writes C elements: for backends that do it in place."""
    columns = jnp.where(targets >= 0, targets, powers.shape[1])
    return powers.at[jnp.arange(powers.shape[0]), columns].set(
        values, indices_are_sorted=True, unique_indices=True, mode="drop"
    )


def selected(powers: Array, targets: Array, values: Array) -> Array:
    """PutAtTargets by comparison, elementwise: for backends that compute it while a product reads its operand."""
    column = lax.broadcasted_iota(jnp.int32, powers.shape, 1)
    return jnp.where(column == targets[:, None], values[:, None], powers)


def with_rest(rows: Rows, shift: Array, sums: Rows) -> Rows:
    """Sums of powers relative to `shift`, and those of the rest (see spread), whose statistics are in `rows`."""
    if "rest highest" not in rows:
        return sums
    # Cut off as the kernels' powers are: finite, and enough for the row to be computed anew.
    change = jnp.minimum(rows["rest highest"] - shift, MAX_POWER)
    fade = jnp.exp(change)
    out = {"total": sums["total"] + fade * rows["rest total"]}
    if "weighted" in sums:
        more = fade * (rows["rest weighted"] + change * rows["rest total"])
        out["weighted"] = sums["weighted"] + more
    return out


def _accumulated(
    problem: Problem, rows: Rows, head: Head, chunk: int, d_logits: Callable, names: tuple[str, ...]
) -> tuple[Gradients, Rows]:
    """Sums the gradients of all chunks.

    d_logits(rows of a chunk, again) -> (factors [C, V], weight [C], good, values per token): the gradient of the logits
    is their product. A chunk that is not good counts for nothing and is asked for again.
    """
    weights, bias = head
    tokens = rows["hidden"].shape[0]
    dtype = problem.gradient_dtype(rows["hidden"])
    rows, order, count = valid_first(rows, chunk)
    padded = rows["hidden"].shape[0]
    d_hidden_axes = "CV,VD->CD" if problem.vocab_major else "CV,DV->CD"
    d_head_axes = "CV,CD->VD" if problem.vocab_major else "CV,CD->DV"

    def step(carry):
        i, again, gradients, out = carry
        part = _cut(rows, i, chunk)
        factors, weight, good, values = d_logits(part, again)
        x = clean(part)
        dx = (product(d_hidden_axes, factors, weights) * weight[:, None]).astype(dtype)
        weighted = (x.astype(jnp.float32) * weight[:, None]).astype(x.dtype)
        d_bias = gradients.bias
        if d_bias is not None:
            d_bias = d_bias + jnp.sum(factors.astype(jnp.float32) * weight[:, None], axis=0)
        gradients = Gradients(
            hidden=_paste(gradients.hidden, dx, i, chunk),
            head=gradients.head + product(d_head_axes, factors, weighted),
            bias=d_bias,
        )
        out = {name: _paste(out[name], values[name], i, chunk) for name in out}
        return jnp.where(good, i + 1, i), ~good, gradients, out

    gradients = Gradients(
        hidden=jnp.zeros((padded, rows["hidden"].shape[1]), dtype),
        head=jnp.zeros(weights.shape, jnp.float32),
        bias=None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    out = {name: jnp.zeros((padded,), jnp.float32) for name in names}
    start = (jnp.int32(0), jnp.bool_(False), gradients, out)
    _, _, gradients, out = lax.while_loop(lambda carry: carry[0] < count, step, start)
    out = {name: restored(values, order, tokens) for name, values in out.items()}
    return gradients._replace(hidden=restored(gradients.hidden, order, tokens)), out


def valid_first(rows: Rows, chunk: int) -> tuple[Rows, Array | None, Array]:
    """Rows padded to whole chunks with the valid ones in front, their order, and how many chunks hold one.

    When all is one chunk, or all are valid, in the order they had.
    """
    tokens = rows["targets"].shape[0]
    padding = -tokens % chunk
    if "valid" not in rows and not padding:
        return rows, None, jnp.int32(tokens // chunk)
    valid = rows.get("valid", jnp.ones((tokens,), bool))
    order = jnp.argsort(~valid, stable=True) if "valid" in rows and tokens > chunk else None

    def moved(values: Array) -> Array:
        values = values if order is None else values[order]
        return jnp.pad(values, [(0, padding)] + [(0, 0)] * (values.ndim - 1))

    count = jnp.sum(valid.astype(jnp.int32))
    moved_rows = {name: moved(values) for name, values in (rows | {"valid": valid}).items()}
    return moved_rows, order, (count + chunk - 1) // chunk


def _cut(rows: Rows, i: Array, chunk: int) -> Rows:
    if rows["targets"].shape[0] == chunk:
        return rows
    cut = partial(lax.dynamic_slice_in_dim, start_index=i * chunk, slice_size=chunk)
    return {name: cut(values) for name, values in rows.items()}


def _paste(whole: Array, part: Array, i: Array, chunk: int) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, part, i * chunk, axis=0)


def restored(values: Array, order: Array | None, tokens: int) -> Array:
    """Undoes valid_first."""
    if order is None:
        return values[:tokens]
    return jnp.zeros_like(values[:tokens]).at[order].set(values[:tokens], unique_indices=True)
