"""token_log_probs on NVIDIA Hopper: the kernel of hopper.py, and XLA's matrix products for the gradients.

Forward: one pass of the kernel, logits in registers only. Backward: for a chunk of tokens at a time, the kernel writes
what its logits' gradient is made of, in bfloat16, and two products of the library make gradients of it. The chunk is
bounded, so [tokens, vocab] never exists.

D embed, V vocab, T tokens, C tokens of a chunk.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.token_log_probs import hopper

LOG2_E = math.log2(math.e)
_STATISTICS_BYTES = 2**25
"""Of partial statistics that leave the kernel, before they are merged."""


def statistics(
    hidden: Float[Array, "tokens embed"],
    head: Array,
    targets: Int[Array, " tokens"],
    scale: Float[Array, " tokens"],
    *,
    vocab_major: bool = True,
    entropy: bool = True,
    tiles: hopper.Tiles = hopper.DEFAULT_TILES,
    multiprocessors: int = 132,
    interpret: Any = None,
) -> dict[str, Array]:
    """highest, total, weighted and picked (the target's scaled logit, minus highest), each [tokens], in base e."""
    tokens = hidden.shape[0]
    padded, scales = padded_rows(hidden, scale, tiles.rows)
    max_runs = max(_STATISTICS_BYTES // (12 * padded.shape[0]), 8)
    parts = hopper.softmax_statistics(
        padded,
        head,
        scales,
        vocab_major=vocab_major,
        entropy=entropy,
        tiles=tiles,
        max_runs=max_runs,
        multiprocessors=multiprocessors,
        interpret=interpret,
    )
    parts = {name: values[:, :tokens] for name, values in parts.items()}
    rest = rest_logits(hidden, head, scale, vocab_major, tiles.tile_n)
    if rest is not None:
        parts = _with_rest(parts, rest)
    highest = jnp.max(parts["highest"], axis=0)
    change = parts["highest"] - highest[None]
    fade = jnp.exp2(change)
    out = {"highest": highest / LOG2_E, "total": jnp.sum(parts["total"] * fade, axis=0)}
    if entropy:
        weighted = jnp.sum(fade * (parts["weighted"] + change * parts["total"]), axis=0)
        out["weighted"] = weighted / LOG2_E
    picked = target_logits(hidden, head, targets, vocab_major) * scale
    return out | {"picked": jnp.minimum(picked - out["highest"], 0.0)}


def powers_of_chunk(
    hidden: Float[Array, "chunk embed"],
    head: Array,
    scale: Float[Array, " chunk"],
    shift: Float[Array, " chunk"],
    level: Float[Array, " chunk"] | None = None,
    slope: Float[Array, " chunk"] | None = None,
    *,
    vocab_major: bool = True,
    entropy: bool = True,
    tiles: hopper.Tiles = hopper.DEFAULT_TILES,
    multiprocessors: int = 132,
    interpret: Any = None,
) -> dict[str, Array]:
    """exp(logits * scale - shift) [chunk, vocab], and its sums total and weighted; or its product with level + slope *
    (logits * scale - shift)."""
    chunk = hidden.shape[0]
    rows = {"scale": scale, "shift": shift, "level": level, "slope": slope}
    rows = {name: values for name, values in rows.items() if values is not None}
    padding = -chunk % tiles.rows
    padded: dict[str, Any] = {name: jnp.pad(values, (0, padding)) for name, values in rows.items()}
    padded["shift"] = padded["shift"] * LOG2_E
    if "slope" in padded:
        padded["slope"] = padded["slope"] / LOG2_E
    parts = hopper.softmax_statistics(
        jnp.pad(hidden, ((0, padding), (0, 0))),
        head,
        **padded,
        vocab_major=vocab_major,
        entropy=entropy,
        tiles=tiles,
        multiprocessors=multiprocessors,
        interpret=interpret,
    )
    powers = parts.pop("powers")[:chunk]
    out = {name: jnp.sum(values, axis=0)[:chunk] for name, values in parts.items()}
    if "weighted" in out:
        out["weighted"] = out["weighted"] / LOG2_E
    rest = rest_logits(hidden, head, scale, vocab_major, tiles.tile_n)
    if rest is not None:
        below = rest - shift[:, None]
        raised = jnp.exp(below)
        if level is not None and slope is not None:
            raised = raised * (level[:, None] + slope[:, None] * below)
        else:
            out["total"] = out["total"] + jnp.sum(raised, axis=1)
            if entropy:
                out["weighted"] = out["weighted"] + jnp.sum(raised * below, axis=1)
        start = powers.shape[1] - rest.shape[1]
        powers = lax.dynamic_update_slice_in_dim(powers, raised.astype(powers.dtype), start, 1)
    return out | {"powers": powers}


def padded_rows(hidden: Array, scale: Array, multiple: int) -> tuple[Array, Array]:
    """Both with rows of zeros up to a multiple."""
    padding = -hidden.shape[0] % multiple
    if not padding:
        return hidden, scale
    return jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(scale, (0, padding))


def rest_logits(hidden, head, scale, vocab_major: bool, tile_n: int) -> Array | None:
    """Scaled logits of the columns after the last whole tile."""
    vocab = head.shape[0] if vocab_major else head.shape[1]
    rest = vocab % tile_n
    if not rest:
        return None
    if vocab_major:
        logits = product("TD,VD->TV", hidden, head[vocab - rest :])
    else:
        logits = product("TD,DV->TV", hidden, head[:, vocab - rest :])
    return logits * scale[:, None]


def target_logits(hidden, head, targets, vocab_major: bool) -> Float[Array, " tokens"]:
    """Each token's logit of its target; that of some other entry where the target is outside."""
    vocab = head.shape[0] if vocab_major else head.shape[1]
    inside = jnp.clip(targets, 0, vocab - 1)
    rows = head[inside] if vocab_major else head[:, inside].T
    return jnp.sum(hidden.astype(jnp.float32) * rows.astype(jnp.float32), axis=1)


def product(axes: str, a: Array, b: Array) -> Array:
    """Accumulated in float32."""
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)


def _with_rest(parts: dict[str, Array], logits: Array) -> dict[str, Array]:
    """One more run: the columns that no tile covers."""
    u = logits * LOG2_E
    highest = jnp.max(u, axis=1)
    below = u - highest[:, None]
    powers = jnp.exp2(below)
    more = {
        "highest": highest,
        "total": jnp.sum(powers, axis=1),
        "weighted": jnp.sum(powers * below, axis=1),
    }
    return {name: jnp.concatenate([parts[name], more[name][None]]) for name in parts}


def fused_chunks(
    hidden: Float[Array, "tokens embed"],
    head: Array,
    targets: Int[Array, " tokens"],
    scale: Float[Array, " tokens"],
    slope_of_loss,
    *,
    chunk: int,
    vocab_major: bool = True,
    entropy: bool = True,
    tiles: hopper.Tiles = hopper.DEFAULT_TILES,
    powers_of=powers_of_chunk,
) -> tuple[Array, Array, Array, Array]:
    """log_probs, entropy, d_hidden and d_head (float32) of sum(loss of each token), all in one pass.

    slope_of_loss(log_probs, first row) gives d loss / d log_prob of a chunk's tokens.
    """
    tokens = hidden.shape[0]
    if tokens % chunk:
        raise NotImplementedError(f"{tokens} tokens are not a multiple of {chunk}")

    def step(i, carry):
        log_probs, entropies, d_hidden, d_head = carry
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=i * chunk, slice_size=chunk)
        x, target, factor = cut(hidden), cut(targets), cut(scale)
        picked = target_logits(x, head, target, vocab_major) * factor
        got = powers_of(
            x, head, factor, picked, vocab_major=vocab_major, entropy=entropy, tiles=tiles
        )
        total, powers = got["total"], got["powers"]
        log_prob = -jnp.log(total)
        slope = slope_of_loss(log_prob, i * chunk)
        # d loss / d logit = slope * scale * ([is target] - power / total) = weight * (power - total * [is target])
        weight = -slope * factor / total
        powers = powers.at[jnp.arange(chunk), target].set(
            (1.0 - total).astype(powers.dtype), indices_are_sorted=True, unique_indices=True
        )
        if vocab_major:
            dx = product("CV,VD->CD", powers, head)
        else:
            dx = product("CV,DV->CD", powers, head)
        weighted_x = (x.astype(jnp.float32) * weight[:, None]).astype(x.dtype)
        dw = product("CV,CD->VD" if vocab_major else "CV,CD->DV", powers, weighted_x)
        paste = functools.partial(lax.dynamic_update_slice_in_dim, start_index=i * chunk, axis=0)
        if entropy:
            entropies = paste(entropies, jnp.log(total) - got["weighted"] / total)
        return (
            paste(log_probs, log_prob),
            entropies,
            paste(d_hidden, (dx * weight[:, None]).astype(x.dtype)),
            d_head + dw,
        )

    zeros = jnp.zeros((tokens,), jnp.float32)
    start = (zeros, zeros, jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
    return lax.fori_loop(0, tokens // chunk, step, start)
