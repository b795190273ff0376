"""Log-probs of sampled tokens from hidden states, in more ways than training needs: for looking into a mismatch.

Logits exist for a few tokens at a time. N tokens, D embed, V vocab, C a chunk of tokens.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tooljax.distributed import to_host
from tooljax.model.decoder import project

TEMPERATURES = 16
"""That `at_temperatures` takes at once."""

CHUNK = 64


@dataclass(frozen=True)
class HeadValues:
    """What a distribution says about each token that was drawn."""

    log_probs: np.ndarray
    """[N]"""
    rounded: np.ndarray
    """[N]: of logits rounded to bfloat16."""
    rank: np.ndarray
    """[N]: how many tokens are likelier."""
    likelier: np.ndarray
    """[N]: the probability that those have together."""
    entropy: np.ndarray
    """[N], nats."""
    variance: np.ndarray
    """[N]: of the log-prob of a token drawn from it."""
    top_k: np.ndarray
    """[N K]: log-probs if only so many tokens were kept; -inf where this one would not be."""
    top_p: np.ndarray
    """[N K]: the same for the fewest tokens that hold so much probability."""


def head_values(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[np.ndarray, " tokens"],
    temperature: float,
    top_k: list[float],
    top_p: list[float],
) -> HeadValues:
    """All of it."""
    ks, ps = np.asarray(top_k, np.int32), np.asarray(top_p, np.float32)
    arguments = _chunks(hidden, targets)
    values = _head_values(arguments, head, np.float32(temperature), ks, ps)
    return HeadValues(**{name: _flat(value, len(targets)) for name, value in values.items()})


def at_temperatures(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[np.ndarray, " tokens"],
    temperatures: Float[np.ndarray, " temperatures"],
) -> Float[np.ndarray, "tokens temperatures"]:
    """Log-probs at each of TEMPERATURES temperatures."""
    values = _at_temperatures(_chunks(hidden, targets), head, temperatures.astype(np.float32))
    return _flat(values, len(targets))


def _chunks(hidden: Array, targets: np.ndarray) -> tuple[Array, np.ndarray]:
    """Both in chunks, the last one filled up."""
    padding = -len(targets) % CHUNK
    padded = jnp.pad(hidden, [(0, padding), (0, 0)])
    ids = np.pad(targets, (0, padding)).astype(np.int32)
    return padded.reshape(-1, CHUNK, hidden.shape[1]), ids.reshape(-1, CHUNK)


def _flat(values: Array, tokens: int) -> np.ndarray:
    host = to_host(values)
    return host.reshape(host.shape[0] * CHUNK, *host.shape[2:])[:tokens]


@jax.jit
def _head_values(arguments, head, temperature, ks, ps):
    return jax.lax.map(partial(_chunk_values, head, temperature, ks, ps), arguments)


def _chunk_values(head: Array, temperature: Array, ks: Array, ps: Array, chunk) -> dict[str, Array]:
    hidden, targets = chunk
    logits = project(hidden, head)
    log_probs = jax.nn.log_softmax(logits / temperature, axis=1)
    chosen = _pick(log_probs, targets)
    # Not by converting there and back, which XLA leaves out.
    rounded = jax.lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=7)
    probs = jnp.exp(log_probs)
    # 0 log 0 = 0
    finite = jnp.where(probs > 0, log_probs, 0.0)
    entropy = -jnp.sum(probs * finite, axis=1)
    above = log_probs > chosen[:, None]
    rank = above.astype(jnp.int32).sum(axis=1)
    kept = jnp.cumsum(-jnp.sort(-probs, axis=1), axis=1)  # [C V]: by so many tokens
    at_k = jnp.take(kept, jnp.clip(ks, 1, kept.shape[1]) - 1, axis=1)
    needed = jax.vmap(lambda row: jnp.searchsorted(row, ps))(kept).astype(jnp.int32)
    at_p = jnp.take_along_axis(kept, jnp.minimum(needed, kept.shape[1] - 1), axis=1)
    return {
        "log_probs": chosen,
        "rounded": _pick(jax.nn.log_softmax(rounded / temperature, axis=1), targets),
        "rank": rank,
        "likelier": jnp.sum(jnp.where(above, probs, 0.0), axis=1),
        "entropy": entropy,
        "variance": jnp.sum(probs * finite * finite, axis=1) - entropy * entropy,
        "top_k": jnp.where(rank[:, None] < ks[None], chosen[:, None] - jnp.log(at_k), -jnp.inf),
        "top_p": jnp.where(rank[:, None] <= needed, chosen[:, None] - jnp.log(at_p), -jnp.inf),
    }


@jax.jit
def _at_temperatures(arguments, head, temperatures):
    def chunk(arguments):
        hidden, targets = arguments
        logits = project(hidden, head)

        def at(temperature: Array) -> Array:
            return _pick(jax.nn.log_softmax(logits / temperature, axis=1), targets)

        return jax.lax.map(at, temperatures).T

    return jax.lax.map(chunk, arguments)


def _pick(values: Float[Array, "tokens vocab"], targets: Int[Array, " tokens"]) -> Array:
    return jnp.take_along_axis(values, targets[:, None], axis=1)[:, 0]
