"""Attention to own segments and to trunks in two passes, for kernels that take ragged sequences and no mask.

In the first pass every segment attends to itself, in the second all branches of a trunk, which stand together, attend
to it. Two softmaxes over parts of the keys are one over all: with l1 and l2 the logs of their denominators and l the
log of the sum of both, the output is exp(l1 - l) o1 + exp(l2 - l) o2. Backward, each pass is given l and that output
for its own, and its gradients are parts of the whole: dS = P (dP - sum(dO o)) with P = exp(S - l)
(arXiv:2307.08691, section 3.1; the same sum as over devices in arXiv:2310.01889). No pair is computed that nobody sees.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tooljax.model.remat import attended


class Spans(NamedTuple):
    """Which queries of each row attend to which of its keys: entry m of a row is one such pair; -1 is none.

    Starts have one entry more, which is -1, as cuDNN's packed form has them.
    """

    q_lengths: Int[Array, "batch spans"]
    k_lengths: Int[Array, "batch spans"]
    q_starts: Int[Array, "batch spans_and_one"]
    k_starts: Int[Array, "batch spans_and_one"]


class Kernel(NamedTuple):
    """Attention over spans. Heads of keys are as many as of queries. What lies outside all spans may be anything."""

    forward: Callable[..., tuple[Array, Array]]
    """(q, k, v, spans, causal) to the output [batch time heads head_dim] and the logs of the softmaxes' denominators:
    [batch * spans, heads, time] in float32, of the spans that are there, one after the other; time counts in each."""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(q, k, v, spans, causal, output, logs, gradient of the output) to those of q, k and v."""


def own_spans(segment_ids: Int[Array, "batch time"], most: int) -> Spans:
    """Every segment to itself, of rows of at most `most` segments.

    Segments 1 1 2 2 2 0 give lengths 2 3 -1 ... and starts 0 2 -1 -1 ...: JAX moves what is not -1 of all rows together
    before cuDNN reads it, so that a row with one start more than lengths would shift every row after it.
    """
    ids = jnp.arange(1, most + 1, dtype=jnp.int32)
    lengths = jnp.sum(segment_ids[:, :, None] == ids[None, None], axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths
    known = lengths > 0
    lengths, starts = (jnp.where(known, x, -1) for x in (lengths, starts))
    starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    return Spans(lengths, lengths, starts, starts)


def trunk_spans(
    segment_ids: Int[Array, "batch time"], trunk_ids: Int[Array, "batch time"], most: int
) -> Spans:
    """All branches of a trunk to it, of rows of at most `most` segments. A trunk has two branches at least."""
    own = own_spans(segment_ids, most)
    branch = jnp.where(trunk_ids != segment_ids, trunk_ids, 0)
    ids = jnp.arange(1, most + 1, dtype=jnp.int32)
    q_lengths = jnp.sum(branch[:, :, None] == ids[None, None], axis=1, dtype=jnp.int32)
    known = q_lengths > 0
    # Trunks first: there are at most most // 3.
    order = jnp.argsort(~known, axis=1, stable=True)[:, : most // 3]

    def taken(x: Array) -> Array:
        return jnp.take_along_axis(jnp.where(known, x, -1), order, axis=1)

    k_starts = own.k_starts[:, :-1]
    lengths = taken(q_lengths), taken(own.k_lengths)
    starts = taken(k_starts + own.k_lengths), taken(k_starts)
    padded = (jnp.pad(x, ((0, 0), (0, 1)), constant_values=-1) for x in starts)
    return Spans(*lengths, *padded)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def merged(
    kernel: Kernel,
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time heads head_dim"],
    v: Float[Array, "batch time heads head_dim"],
    own: Spans,
    trunk: Spans,
) -> Float[Array, "batch time heads head_dim"]:
    """Attention to `own` keys, causally, and to all those of `trunk`. Zeros outside all spans."""
    return _forward(kernel, q, k, v, own, trunk)[0]


def _forward(kernel: Kernel, q, k, v, own: Spans, trunk: Spans):
    parts = []
    for spans, causal in ((own, True), (trunk, False)):
        out, logs = kernel.forward(q, k, v, spans, causal)
        at, inside = _places(spans.q_lengths, spans.q_starts, q.shape[1])
        parts.append(
            (
                jnp.where(inside[..., None, None], out.astype(jnp.float32), 0.0),
                jnp.where(inside[..., None], logs[at[0], :, at[1]], -jnp.inf),
            )
        )
    (o1, l1), (o2, l2) = parts
    total = jnp.logaddexp(l1, l2)
    # Outside all spans both are -inf.
    total = attended(jnp.where(jnp.isfinite(total), total, 0.0))
    out = o1 * jnp.exp(l1 - total)[..., None] + o2 * jnp.exp(l2 - total)[..., None]
    out = attended(out.astype(q.dtype))
    return out, (q, k, v, own, trunk, out, total)


def _backward(kernel: Kernel, saved: tuple, d_out: Array):
    q, k, v, own, trunk, out, total = saved
    sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    for spans, causal in ((own, True), (trunk, False)):
        at, q_inside = _places(spans.q_lengths, spans.q_starts, q.shape[1])
        k_inside = _places(spans.k_lengths, spans.k_starts, k.shape[1])[1]
        count = spans.q_lengths.size
        logs = jnp.zeros((count, q.shape[2], q.shape[1]), jnp.float32)
        # What is in no span is dropped: it would be of a span that there is not.
        rank = jnp.where(q_inside, at[0], count)
        logs = logs.at[rank, :, at[1]].set(total, mode="drop")
        found = kernel.backward(q, k, v, spans, causal, out, logs, d_out)
        for i, inside in enumerate((q_inside, k_inside, k_inside)):
            part = jnp.where(inside[..., None, None], found[i].astype(jnp.float32), 0.0)
            sums[i] = sums[i] + part
    dq, dk, dv = (x.astype(like.dtype) for x, like in zip(sums, (q, k, v), strict=True))
    return dq, dk, dv, None, None


merged.defvjp(_forward, _backward)


def _places(
    lengths: Int[Array, "batch spans"], starts: Int[Array, "batch spans_and_one"], time: int
) -> tuple[tuple[Int[Array, "batch time"], Int[Array, "batch time"]], Bool[Array, "batch time"]]:
    """Of each token, the number of its span among those of all rows and its index there; and whether it is in any."""
    known = lengths >= 0
    ranks = (jnp.cumsum(known.reshape(-1), dtype=jnp.int32) - 1).reshape(known.shape)
    first = starts[:, None, :-1]
    t = jnp.arange(time, dtype=jnp.int32)[None, :, None]
    inside = (t >= first) & (t < first + lengths[:, None]) & known[:, None]
    one = inside.astype(jnp.int32)

    def own(x: Any) -> Array:
        return jnp.sum(one * x, axis=2, dtype=jnp.int32)

    return (own(ranks[:, None]), own(t - first)), jnp.any(inside, axis=2)
