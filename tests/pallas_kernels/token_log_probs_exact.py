"""What token_log_probs is compared with: inputs, and NumPy's values and gradients in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.token_log_probs import TokenLogProbs
from pallas_kernels.token_log_probs.shapes import Shape

GRADIENT_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative error of a gradient's norm."""

Given = dict[str, Any]


def inputs(shape: Shape, seed: int = 0, *, bias: bool = False, spread: float = 1.0) -> Given:
    """Logits of order `spread`, every fifth token not valid; values exact in the shape's dtype."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    head = rng.normal(size=(shape.vocab, shape.embed)) * shape.embed**-0.5 * spread
    arrays = {
        "hidden": rng.normal(size=(shape.tokens, shape.embed)).astype(dtype),
        "head": head.astype(dtype),
        "targets": rng.integers(0, shape.vocab, shape.tokens).astype(np.int32),
        "valid": np.arange(shape.tokens) % 5 != 4,
    }
    if bias:
        arrays["bias"] = rng.normal(size=shape.vocab).astype(np.float32)
    return {name: jnp.asarray(values) for name, values in arrays.items()}


class Exact:
    """Values and gradients in float64, written the slow way."""

    def __init__(
        self, hidden, head, targets, valid=None, bias=None, temperature: Any = 1.0, soft_cap=None
    ):
        self.hidden, self.head = (np.asarray(x, np.float64) for x in (hidden, head))
        tokens = len(self.hidden)
        self.targets = np.asarray(targets)
        self.valid = np.ones(tokens, bool) if valid is None else np.asarray(valid)
        self.scale = 1 / np.broadcast_to(np.asarray(temperature, np.float64), (tokens,))
        raw = self.hidden @ self.head.T
        if bias is not None:
            raw = raw + np.asarray(bias, np.float64)
        self.bend = 1.0
        if soft_cap is not None:
            self.bend = 1 - np.tanh(raw / soft_cap) ** 2
            raw = soft_cap * np.tanh(raw / soft_cap)
        logits = raw * self.scale[:, None]
        highest = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - highest).sum(axis=1, keepdims=True)
        self.log_softmax = logits - highest - np.log(total)
        self.softmax = np.exp(self.log_softmax)
        entropy = -(self.softmax * self.log_softmax).sum(axis=1)
        picked = self.log_softmax[np.arange(tokens), self.targets]
        normaliser = (highest + np.log(total))[:, 0]
        values: list[Any] = [np.where(self.valid, x, 0.0) for x in (picked, normaliser, entropy)]
        self.values = TokenLogProbs(*values)

    def gradients(self, d_log_prob, d_log_normaliser: Any = 0.0, d_entropy: Any = 0.0):
        """Of hidden, head and bias."""
        tokens = len(self.hidden)
        d, n, e = (
            np.broadcast_to(np.asarray(g, np.float64), (tokens,))[:, None]
            for g in (d_log_prob, d_log_normaliser, d_entropy)
        )
        d_logits = (n - d) * self.softmax
        d_logits[np.arange(tokens), self.targets] += d[:, 0]
        d_logits -= e * self.softmax * (self.log_softmax + self.values.entropy[:, None])
        d_raw = np.where(self.valid[:, None], d_logits * self.scale[:, None] * self.bend, 0.0)
        return d_raw @ self.head, d_raw.T @ self.hidden, d_raw.sum(axis=0)


def relative_error(found, expected) -> float:
    """Of the norm."""
    difference = np.asarray(found, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def loss_of(log_probs, given):
    """A loss that is not linear in the log-probs."""
    return given["weight"] * jnp.exp(0.1 * log_probs) + log_probs * given["more"]


def masks(tokens: int) -> dict[str, np.ndarray]:
    """Which tokens are valid, by name: what makes an implementation skip, move or keep tokens."""
    place = np.arange(tokens)
    return {
        "all": place >= 0,
        "the last alone": place == tokens - 1,
        "the second half": place >= tokens // 2,
        "one in fifty": place % 50 == 7,
    }


def losses_given(tokens: int) -> dict[str, Array]:
    """What loss_of takes."""
    rng = np.random.default_rng(1)
    values = {n: rng.normal(size=tokens).astype(np.float32) for n in ("weight", "more")}
    return jax.tree.map(jnp.asarray, values)


def exact_loss(slow: Exact, values) -> tuple[np.ndarray, np.ndarray]:
    """loss_of of valid tokens, and its derivative."""
    weight, more = (np.asarray(values[n], np.float64) for n in ("weight", "more"))
    powers = weight * np.exp(0.1 * slow.values.log_prob)
    losses = powers + slow.values.log_prob * more
    return losses[slow.valid], 0.1 * powers + more
