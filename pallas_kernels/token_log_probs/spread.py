"""Whole arrays of a mesh, for functions of one shard: what does not divide over the devices, too.

Tokens are padded with some that are not valid. A vocabulary is not: columns that nobody has would have to be masked in
every kernel. The few columns that do not divide, fewer than there are devices, are the *rest*: every device has them
all, beside its part. They are one more part of the vocabulary, in XLA, whose statistics merge like a shard's.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from pallas_kernels.token_log_probs.chunks import Gradients
from pallas_kernels.token_log_probs.problem import Head, Problem, Shards, vocab_axis


class Heads(NamedTuple):
    """What one shard has of the vocabulary."""

    mine: Head
    rest: Head | None = None
    """The columns after those that divide over the shards, if any; the same on all."""


class HeadGradients(NamedTuple):
    """Gradients of one shard's hidden states and of its Heads."""

    mine: Gradients
    rest: Gradients | None = None
    """Its hidden is None: that is in `mine`."""


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One, several or none, as a tuple."""
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def ways(shards: Shards, what: str) -> int:
    """Devices of the mesh over which "tokens", "vocab" or "embed" is spread. ValueError if it has no such axis."""
    assert shards.mesh is not None, "sizes of axes are those of a mesh"
    axes, names = getattr(shards, what), axis_names(getattr(shards, what))
    unknown = [name for name in names if name not in shards.mesh.shape]
    if unknown:
        raise ValueError(
            f"shards.{what}={axes!r} names {unknown[0]!r}, which the mesh of {dict(shards.mesh.shape)} has not"
        )
    return math.prod(shards.mesh.shape[name] for name in names)


def spread(problem: Problem, function: Callable, outputs: str) -> Callable:
    """function(hidden, Heads, rows) of one shard as one of (hidden, head, rows), on whole arrays if there is a mesh.

    `outputs` says what it returns: values per "tokens", "gradients" (HeadGradients, here Gradients), or "both".
    """
    shards = problem.shards
    if shards.mesh is None:
        return lambda hidden, head, rows: _joined(
            problem, outputs, function(hidden, Heads(head), rows)
        )
    tokens = PartitionSpec(shards.tokens)
    bias = PartitionSpec(shards.vocab)
    weights, d_weights = (
        PartitionSpec(*((shards.vocab, embed) if problem.vocab_major else (embed, shards.vocab)))
        for embed in (None, shards.embed)
    )
    everywhere = PartitionSpec()
    specs: Any = HeadGradients(Gradients(tokens, d_weights, bias), everywhere)  # type: ignore[arg-type]
    on_shards = jax.shard_map(
        function,
        mesh=shards.mesh,
        in_specs=(tokens, Heads((weights, bias), everywhere), tokens),  # type: ignore[arg-type]
        out_specs={"gradients": specs, "both": (specs, tokens)}.get(outputs, tokens),
        check_vma=False,
    )

    def on_whole(hidden: Array, head: Head, rows: dict[str, Any]):
        count = hidden.shape[0]
        padding = -count % ways(shards, "tokens")
        if padding:
            rows = {"valid": jnp.ones((count,), bool)} | rows
            hidden, rows = jax.tree.map(lambda x: _padded(x, padding), (hidden, rows))
        out = on_shards(hidden, _parted(problem, head), rows)
        return _joined(problem, outputs, out, count)

    return on_whole


def _padded(values: Array, padding: int) -> Array:
    """With zeros at the end."""
    return jnp.pad(values, [(0, padding)] + [(0, 0)] * (values.ndim - 1))


def _parted(problem: Problem, head: Head) -> Heads:
    """The columns that divide over the vocabulary's shards, and the rest."""
    weights, bias = head
    vocab, axis = problem.vocab(weights), vocab_axis(problem)
    rest = vocab % ways(problem.shards, "vocab")
    if not rest:
        return Heads(head)

    def cut(start: int, stop: int) -> Head:
        part = jax.lax.slice_in_dim(weights, start, stop, axis=axis)
        return part, None if bias is None else bias[start:stop]

    return Heads(cut(0, vocab - rest), cut(vocab - rest, vocab))


def _joined(problem: Problem, outputs: str, found: Any, count: int | None = None):
    """Without the padding of tokens, and with the rest's gradient at its place."""
    if outputs == "tokens":
        return jax.tree.map(lambda x: x[:count], found)
    if outputs == "both":
        gradients, out = found
        return _joined(problem, "gradients", gradients, count), _joined(
            problem, "tokens", out, count
        )
    mine, rest = found
    hidden = mine.hidden[:count]
    if rest is None:
        return mine._replace(hidden=hidden)
    head = jnp.concatenate([mine.head, rest.head], axis=vocab_axis(problem))
    bias = None if mine.bias is None else jnp.concatenate([mine.bias, rest.bias])
    return Gradients(hidden, head, bias)
