"""token_log_probs for any backend, in XLA: logits exist for one chunk of tokens at a time.

Valid tokens are first moved to the front, and only as many chunks are computed as hold one: the time is that of the
valid tokens, however they are spread. The backward pass recomputes each chunk's logits from the saved row maximum and
normaliser. Logits, softmax and all sums are float32; with bfloat16 weights the operands of the two backward products
are rounded to bfloat16, their sums are not.

C is a chunk of tokens, D embed, V vocab.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Largest chunk of logits, in elements: 256 MiB of float32. Everything that a tiny model needs is one chunk.
_CHUNK_ELEMENTS = 2**26
_ALIGN = 128

Rows = dict[str, Array]
"""Values per token, all with the same leading axis."""


def token_log_probs(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
    temperature: Float[Array, " tokens"],
    valid: Bool[Array, " tokens"],
    *,
    chunk_tokens: int | None = None,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """See api.token_log_probs. `chunk_tokens` overrides the size of a chunk."""
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(head.shape[0])
    chunk = min(chunk_tokens, hidden.shape[0])
    if chunk == 0:
        empty = jnp.zeros((0,), jnp.float32)
        return empty, empty
    return _op(chunk, hidden, head, targets, temperature, valid)


def default_chunk_tokens(vocab: int) -> int:
    """Tokens whose logits fill the largest chunk allowed, a multiple of 128."""
    return max(_CHUNK_ELEMENTS // vocab // _ALIGN, 1) * _ALIGN


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _op(chunk, hidden, head, targets, temperature, valid):
    return _forward(chunk, hidden, head, targets, temperature, valid)[0]


def _forward(chunk, hidden, head, targets, temperature, valid):
    rows = {"hidden": hidden, "targets": targets, "temperature": temperature, "valid": valid}
    rows, order, count = _valid_first(rows, chunk)
    names = ("log_probs", "entropy", "highest", "total")
    out = {name: jnp.zeros(rows["valid"].shape, jnp.float32) for name in names}

    def step(i: Array, out: Rows) -> Rows:
        values = _chunk_forward(_cut(rows, i, chunk), head)
        return {name: _paste(out[name], values[name], i, chunk) for name in names}

    out = _loop(chunk, rows, count, step, out)
    result = tuple(_restored(out[name], order, hidden.shape[0]) for name in names[:2])
    return result, (hidden, head, targets, temperature, valid, out)


def _chunk_forward(rows: Rows, head: Array) -> Rows:
    shifted, highest = _shifted_logits(rows, head, None)
    exps = jnp.exp(shifted)
    total = jnp.sum(exps, axis=1)
    picked = jnp.sum(jnp.where(_is_target(rows, head), shifted, 0.0), axis=1)
    # A log-prob is at most 0; rounding of the two terms could lift it above.
    log_probs = jnp.minimum(picked - jnp.log(total), 0.0)
    inside = (rows["targets"] >= 0) & (rows["targets"] < head.shape[0])
    entropy = jnp.log(total) - jnp.sum(exps * shifted, axis=1) / total
    return {
        "log_probs": jnp.where(rows["valid"], jnp.where(inside, log_probs, jnp.nan), 0.0),
        "entropy": jnp.where(rows["valid"], entropy, 0.0),
        "highest": highest,
        "total": total,
    }


def _backward(chunk, saved, gradients):
    hidden, head, targets, temperature, valid, out = saved
    rows = {"hidden": hidden, "targets": targets, "temperature": temperature, "valid": valid}
    rows["d_log_probs"], rows["d_entropy"] = gradients
    rows, order, count = _valid_first(rows, chunk)
    rows |= {name: out[name] for name in ("entropy", "highest", "total")}  # already in that order

    def step(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = _chunk_backward(_cut(rows, i, chunk), head)
        return _paste(grads[0], d_hidden, i, chunk), grads[1] + d_head

    start = (jnp.zeros_like(rows["hidden"]), jnp.zeros(head.shape, jnp.float32))
    d_hidden, d_head = _loop(chunk, rows, count, step, start)
    d_hidden = _restored(d_hidden, order, hidden.shape[0])
    return d_hidden, d_head.astype(head.dtype), None, None, None


def _chunk_backward(rows: Rows, head: Array) -> tuple[Array, Array]:
    """Gradients of hidden (in its dtype) and of the head (float32)."""
    shifted, _ = _shifted_logits(rows, head, rows["highest"])
    log_softmax = shifted - jnp.log(rows["total"])[:, None]
    softmax = jnp.exp(log_softmax)
    # d log p(target) / d logit = [is target] - softmax;  d entropy / d logit = -softmax (log softmax + entropy)
    weight = rows["d_log_probs"][:, None]
    d_logits = jnp.where(_is_target(rows, head), weight, 0.0) - weight * softmax
    spread = log_softmax + rows["entropy"][:, None]
    d_logits = d_logits - rows["d_entropy"][:, None] * softmax * spread
    d_logits = jnp.where(rows["valid"][:, None], d_logits / rows["temperature"][:, None], 0.0)
    d_logits = d_logits.astype(head.dtype)
    d_hidden = _product("CV,VD->CD", d_logits, head).astype(rows["hidden"].dtype)
    return d_hidden, _product("CV,CD->VD", d_logits, _clean(rows))


def _shifted_logits(rows: Rows, head: Array, highest: Array | None) -> tuple[Array, Array]:
    """Tempered logits minus their row maximum, and the maximum: large logits lose no digits that matter."""
    logits = _product("CD,VD->CV", _clean(rows), head) / rows["temperature"][:, None]
    highest = jnp.max(logits, axis=1) if highest is None else highest
    return logits - highest[:, None], highest


def _clean(rows: Rows) -> Array:
    """Hidden states with zeros where not valid: whatever padding holds, NaN too, cannot reach a product."""
    hidden = rows["hidden"]
    return jnp.where(rows["valid"][:, None], hidden, jnp.zeros((), hidden.dtype))


def _is_target(rows: Rows, head: Array) -> Array:
    shape = (rows["targets"].shape[0], head.shape[0])
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1) == rows["targets"][:, None]


def _product(axes: str, a: Array, b: Array) -> Array:
    """Accumulated in float32; float32 operands are not rounded, as TPUs and GPUs would by default."""
    exact = a.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)


def _valid_first(rows: Rows, chunk: int) -> tuple[Rows, Array | None, Array | None]:
    """Rows padded to whole chunks with the valid ones in front, their order, and how many chunks hold one.

    When all is one chunk, the rows as they are.
    """
    tokens = rows["valid"].shape[0]
    if tokens == chunk:
        return rows, None, None
    order = jnp.argsort(~rows["valid"], stable=True)
    padding = -tokens % chunk

    def moved(values: Array) -> Array:
        return jnp.pad(values[order], [(0, padding)] + [(0, 0)] * (values.ndim - 1))

    count = jnp.sum(rows["valid"].astype(jnp.int32))
    # A padded row is not valid, but must not divide by 0 either.
    moved_rows = {name: moved(values) for name, values in rows.items()}
    moved_rows["temperature"] = jnp.where(moved_rows["valid"], moved_rows["temperature"], 1.0)
    return moved_rows, order, (count + chunk - 1) // chunk


def _loop(chunk: int, rows: Rows, count: Array | None, step, start):
    """Runs step(i, carry) for each of the `count` chunks."""
    if count is None:
        return step(jnp.zeros((), jnp.int32), start)
    return jax.lax.fori_loop(0, count, step, start)


def _cut(rows: Rows, i: Array, chunk: int) -> Rows:
    cut = partial(jax.lax.dynamic_slice_in_dim, start_index=i * chunk, slice_size=chunk)
    return {name: cut(values) for name, values in rows.items()}


def _paste(whole: Array, part: Array, i: Array, chunk: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, i * chunk, axis=0)


def _restored(values: Array, order: Array | None, tokens: int) -> Array:
    """Undoes _valid_first."""
    if order is None:
        return values
    return jnp.zeros_like(values[:tokens]).at[order].set(values[:tokens])


_op.defvjp(_forward, _backward)
