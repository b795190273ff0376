"""The device side of the sampler: compiled functions of fixed shapes over one KV cache.

`prefill` reads tokens of a context into a slot, `share` copies a prompt from slot to slot, and `decode` samples a few
tokens in every active slot. The last token of a context is never prefilled: it is the first one
that `decode` feeds, so only `decode` needs the LM head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tooljax.model.decoder import (
    Decoder,
    DecoderConfig,
    LayerParams,
    block,
    embed,
    project,
    rms_norm,
    rotary,
)
from tooljax.model.kv_cache import (
    KEY_CHUNK,
    KVCache,
    attend_cached,
    copy_prefixes,
    write_chunk,
    write_token,
)
from tooljax.model.sampling import HostOrDevice, SamplingRows, draw
from tooljax.pytree import pytree_dataclass

MAX_STEPS = 16
"""Tokens a slot can get from one dispatch of `decode`."""

MAX_STOP_IDS = 16
"""Stop ids that a slot has room for."""


@pytree_dataclass
class SamplerWeights:
    """A decoder's weights with the layers apart: the sampler runs them one after the other."""

    embedding: Array
    """[vocab embed]"""
    layers: tuple[LayerParams, ...]
    """Per layer, by the names of `decoder.layer_shapes`, without the layer axis."""
    final_norm: Array
    """[embed]"""
    head: Array
    """[vocab embed]; the embedding itself when the two are tied."""


def unstack(decoder: Decoder) -> SamplerWeights:
    """The weights of a decoder as the sampler reads them."""
    stacked = decoder.layers.stacked()
    layers = tuple({n: w[i] for n, w in stacked.items()} for i in range(decoder.cfg.layers))
    head = decoder.head_weight()
    return SamplerWeights(decoder.embedding[...], layers, decoder.final_norm[...], head)


@pytree_dataclass
class Chunks:
    """Pieces of contexts to prefill, in order. Only the first `count` are read."""

    tokens: HostOrDevice
    """Int32 [chunks time]; what lies beyond a context is padding, and is overwritten later."""
    slots: HostOrDevice
    """Int32 [chunks]"""
    starts: HostOrDevice
    """Int32 [chunks]: position of the first token."""
    count: HostOrDevice
    """Int32 []"""


@pytree_dataclass
class Copies:
    """Chunks of the cache to copy between slots, in order. Only the first `count` are."""

    sources: HostOrDevice
    """Int32 [copies]: slots."""
    targets: HostOrDevice
    """Int32 [copies]: slots."""
    starts: HostOrDevice
    """Int32 [copies]: first position of the chunk of KEY_CHUNK positions."""
    count: HostOrDevice
    """Int32 []"""


@pytree_dataclass
class DecodeRows:
    """What `decode` needs to know of every slot."""

    tokens: HostOrDevice
    """Int32 [slots]: the token to feed next."""
    positions: HostOrDevice
    """Int32 [slots]: its position."""
    budgets: HostOrDevice
    """Int32 [slots]: how many tokens may still be sampled; 0 for a slot that is not generating."""
    stop_ids: HostOrDevice
    """Int32 [slots MAX_STOP_IDS], filled up with -1."""
    sampling: SamplingRows


@pytree_dataclass
class Sampled:
    """What `decode` sampled: of each slot, the first `counts` entries."""

    tokens: Array
    """Int32 [MAX_STEPS slots]"""
    log_probs: Array
    """Float32 [MAX_STEPS slots]"""
    counts: Array
    """Int32 [slots]"""


@partial(jax.jit, static_argnames="cfg", donate_argnames="cache")
def prefill(cfg: DecoderConfig, weights: SamplerWeights, cache: KVCache, chunks: Chunks) -> KVCache:
    """Reads the chunks into their slots, each after the one before it."""
    time = chunks.tokens.shape[1]

    def read_chunk(index: Array, cache: KVCache) -> KVCache:
        slot, start = chunks.slots[index], chunks.starts[index]
        tokens = jax.lax.dynamic_slice_in_dim(chunks.tokens, index, 1)
        positions = start + jnp.arange(time, dtype=jnp.int32)[None]
        write = partial(write_chunk, slot=slot, start=start)
        return forward(cfg, weights, cache, tokens, positions, write, slot)[1]

    return jax.lax.fori_loop(0, chunks.count, read_chunk, cache)


@partial(jax.jit, static_argnames="cfg", donate_argnames="cache")
def decode(
    cfg: DecoderConfig,
    weights: SamplerWeights,
    cache: KVCache,
    rows: DecodeRows,
    steps: Int[Array, ""],
) -> tuple[KVCache, Sampled]:
    """Samples up to `steps` tokens in every slot that has a budget; a slot ends early at a stop id.

    Every step computes every slot. One that is not generating writes to the cache's last position, which no context
    reaches, and its samples are not counted.
    """
    slots = rows.tokens.shape[0]
    unused = cache.length - 1

    def step(state):
        index, cache, tokens, positions, budgets, sampled = state
        active = budgets > 0
        advance = active.astype(jnp.int32)
        # An idle slot's query reads what the active ones ask for, and its result goes nowhere.
        reading = jnp.where(active, positions, 0)
        write = partial(write_token, positions=jnp.where(active, positions, unused))
        hidden, cache = forward(
            cfg, weights, cache, tokens[:, None], reading[:, None], write, jnp.int32(0)
        )
        logits = project(hidden[:, 0], weights.head)
        drawn, log_probs = draw(logits, rows.sampling, reading + 1)
        stopped = (drawn[:, None] == rows.stop_ids).any(axis=1)
        sampled = Sampled(
            jax.lax.dynamic_update_slice(sampled.tokens, drawn[None], (index, 0)),
            jax.lax.dynamic_update_slice(sampled.log_probs, log_probs[None], (index, 0)),
            sampled.counts + advance,
        )
        budgets = jnp.where(stopped, 0, budgets - advance)
        tokens = jnp.where(active, drawn, tokens)
        return index + 1, cache, tokens, positions + advance, budgets, sampled

    def unfinished(state):
        index, _, _, _, budgets, _ = state
        return (index < steps) & (budgets > 0).any()

    nothing = Sampled(
        jnp.zeros((MAX_STEPS, slots), jnp.int32),
        jnp.zeros((MAX_STEPS, slots), jnp.float32),
        jnp.zeros((slots,), jnp.int32),
    )
    state = (jnp.int32(0), cache, rows.tokens, rows.positions, rows.budgets, nothing)
    _, cache, _, _, _, sampled = jax.lax.while_loop(unfinished, step, state)
    return cache, sampled


@partial(jax.jit, donate_argnames="cache")
def share(cache: KVCache, copies: Copies) -> KVCache:
    """Copies prefixes between slots."""
    return copy_prefixes(cache, copies.sources, copies.targets, copies.starts, copies.count)


def compilations() -> int:
    """How many programs the functions above have been compiled to in this process."""
    functions: tuple[Any, ...] = (prefill, decode, share)
    return sum(function._cache_size() for function in functions)


def forward(
    cfg: DecoderConfig,
    weights: SamplerWeights,
    cache: KVCache,
    tokens: Int[Array, "batch time"],
    positions: Int[Array, "batch time"],
    write: Callable[[Array, Array, Array, Array], tuple[Array, Array]],
    first_slot: Int[Array, ""],
) -> tuple[Float[Array, "batch time embed"], KVCache]:
    """Final hidden states of the tokens of `batch` slots from first_slot on, and the cache with them in it.

    `write` puts a layer's new keys and values among its cached ones: write(cached keys, cached values, k, v).
    """
    chunks = positions.max() // KEY_CHUNK + 1
    cos, sin = rotary(cfg, positions)
    keys, values = list(cache.keys), list(cache.values)
    x = embed(weights.embedding, tokens)
    for layer, params in enumerate(weights.layers):

        def attend(q: Array, k: Array, v: Array, layer: int = layer) -> Array:
            keys[layer], values[layer] = write(keys[layer], values[layer], k, v)
            return attend_cached(q, keys[layer], values[layer], positions, first_slot, chunks)

        x = block(cfg, params, x, cos, sin, attend)
    hidden = rms_norm(x, weights.final_norm, cfg.norm_eps)
    return hidden, KVCache(tuple(keys), tuple(values))
