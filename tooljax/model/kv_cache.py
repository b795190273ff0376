"""The keys and values that a sampler keeps for every slot, and attention over them.

Keys are read in chunks of KEY_CHUNK positions, and a running softmax joins the chunks. Chunks that a query cannot
see leave its result bit for bit as it was (they multiply by exp(0) and add exp(-inf) = 0), so reading as far as the
longest context in the batch asks for does not make one slot's numbers depend on another's length.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tooljax.model.decoder import DecoderConfig
from tooljax.model.precision import matmul_precision
from tooljax.pytree import pytree_dataclass

KEY_CHUNK = 128
"""Positions read at a time. Part of the numerics: another value changes the last bits."""

_MASKED = -1e30


@pytree_dataclass
class KVCache:
    """One array a layer, so that each is updated in place, laid out as its matrix product reads it."""

    keys: tuple[Array, ...]
    """Per layer [slots kv_heads head_dim length]"""
    values: tuple[Array, ...]
    """Per layer [slots kv_heads length head_dim]"""

    @property
    def length(self) -> int:
        """Positions a slot has room for."""
        return self.values[0].shape[2]


def empty_cache(cfg: DecoderConfig, slots: int, min_length: int) -> KVCache:
    """Zeros for `slots` contexts of at least min_length tokens."""
    length = -(-min_length // KEY_CHUNK) * KEY_CHUNK
    rows, layers, dtype = (slots, cfg.kv_heads), range(cfg.layers), jnp.dtype(cfg.dtype)
    return KVCache(
        tuple(jnp.zeros((*rows, cfg.head_dim, length), dtype) for _ in layers),
        tuple(jnp.zeros((*rows, length, cfg.head_dim), dtype) for _ in layers),
    )


def write_token(
    keys: Float[Array, "slots kv_heads head_dim length"],
    values: Float[Array, "slots kv_heads length head_dim"],
    k: Float[Array, "slots 1 kv_heads head_dim"],
    v: Float[Array, "slots 1 kv_heads head_dim"],
    positions: Int[Array, " slots"],
) -> tuple[Array, Array]:
    """Puts one token's key and value into every slot, each at its own position."""
    slots, _, kv_heads, head_dim = k.shape
    rows, at = jnp.arange(slots)[:, None], positions[:, None]
    heads, dims = jnp.arange(kv_heads)[None], jnp.arange(head_dim)[None, None]
    options = {"mode": "promise_in_bounds", "unique_indices": True}
    keys = keys.at[rows[..., None], heads[..., None], dims, at[..., None]].set(k[:, 0], **options)
    return keys, values.at[rows, heads, at].set(v[:, 0], **options)


def write_chunk(
    keys: Float[Array, "slots kv_heads head_dim length"],
    values: Float[Array, "slots kv_heads length head_dim"],
    k: Float[Array, "1 time kv_heads head_dim"],
    v: Float[Array, "1 time kv_heads head_dim"],
    slot: Int[Array, ""],
    start: Int[Array, ""],
) -> tuple[Array, Array]:
    """Puts the keys and values of consecutive tokens into one slot, from position `start` on."""
    put = jax.lax.dynamic_update_slice
    keys = put(keys, k.transpose(0, 2, 3, 1), (slot, 0, 0, start))
    return keys, put(values, v.swapaxes(1, 2), (slot, 0, start, 0))


def attend_cached(
    q: Float[Array, "batch time q_heads head_dim"],
    keys: Float[Array, "slots kv_heads head_dim length"],
    values: Float[Array, "slots kv_heads length head_dim"],
    positions: Int[Array, "batch time"],
    first_slot: Int[Array, ""],
    chunks: Int[Array, ""],
) -> Float[Array, "batch time q_heads head_dim"]:
    """Attention of the queries at `positions` over the cached positions up to and including their own.

    The batch is the slots from first_slot on. Of each, the first `chunks` chunks are read; the caller counts enough
    for every result it will use. Softmax and sums are float32, as in `attention.plain`.
    """
    batch, time, q_heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    # One row a query and query head that share a key head: Q = time * group. The plain [Q H] x [H S] product is what
    # XLA's CPU backend runs without transposing.
    rows = (batch, kv_heads, time * (q_heads // kv_heads))
    queries = q.reshape(batch, time, kv_heads, -1, head_dim).swapaxes(1, 2)
    queries = queries.reshape(*rows, head_dim)
    seen_to = jnp.repeat(positions, q_heads // kv_heads, axis=1)[:, None, :, None]
    written_to = positions.max(axis=1)[:, None, None, None]
    einsum = partial(
        jnp.einsum, precision=matmul_precision(q.dtype), preferred_element_type=jnp.float32
    )

    def read(cached: Array, start: Array, axis: int) -> Array:
        starts = [first_slot, 0, 0, 0]
        sizes = [batch, *cached.shape[1:]]
        starts[axis], sizes[axis] = start, KEY_CHUNK
        return jax.lax.dynamic_slice(cached, starts, sizes)

    def add_chunk(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = state
        first = index * KEY_CHUNK
        at = first + jnp.arange(KEY_CHUNK, dtype=jnp.int32)[None, None]
        scores = einsum("BKQH,BKHS->BKQS", queries, read(keys, first, 3))
        scores = jnp.where(at[:, :, None] <= seen_to, scores * head_dim**-0.5, _MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        shrink = jnp.exp(highest - new_highest)
        weights = jnp.exp(scores - new_highest[..., None])
        # What lies beyond the context is left over from others: 0 times a leftover NaN would still be NaN.
        value = read(values, first, 2)
        value = jnp.where(at[..., None] <= written_to, value, jnp.zeros((), value.dtype))
        added = einsum("BKQS,BKSH->BKQH", weights.astype(value.dtype), value)
        total = total * shrink + weights.sum(axis=-1)
        return new_highest, total, mixed * shrink[..., None] + added

    # Chunk 0 holds position 0, which every query sees: `highest` is a real score from there on.
    start = (jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))
    _, total, mixed = jax.lax.fori_loop(0, chunks, add_chunk, start)
    out = (mixed / total[..., None]).astype(q.dtype)
    return out.reshape(batch, kv_heads, time, -1, head_dim).swapaxes(1, 2).reshape(q.shape)


def copy_prefixes(
    cache: KVCache,
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    starts: Int[Array, " copies"],
    count: Int[Array, ""],
) -> KVCache:
    """Copies chunk `starts[i]` of slot `sources[i]` to slot `targets[i]`, for the first `count` entries."""

    def copy(cached: Array, index: Array, axis: int) -> Array:
        start = [sources[index], 0, 0, 0]
        start[axis] = starts[index]
        sizes = [1, *cached.shape[1:]]
        sizes[axis] = KEY_CHUNK
        chunk = jax.lax.dynamic_slice(cached, start, sizes)
        return jax.lax.dynamic_update_slice(cached, chunk, [targets[index], *start[1:]])

    def copy_all(index: Array, cache: KVCache) -> KVCache:
        return KVCache(
            tuple(copy(keys, index, 3) for keys in cache.keys),
            tuple(copy(values, index, 2) for values in cache.values),
        )

    return jax.lax.fori_loop(0, count, copy_all, cache)
