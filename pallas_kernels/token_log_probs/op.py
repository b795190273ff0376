"""The two operations, over any implementation: their gradients, shards, masks and outputs.

An implementation is a module with

    statistics(problem, rows, head) -> highest, total, weighted, picked       of each token, of this shard's vocabulary
    gradients(problem, rows, head) -> Gradients                               for the cotangents in rows, see below
    fused(problem, rows, head, slope_of) -> Gradients, statistics             see chunks.fused
    check(problem, hidden, head, bias)                                        NotImplementedError if it cannot serve

where, with u = the tempered logits, highest = max u, total = sum exp(u - highest), weighted = sum exp(u - highest) (u -
highest), and picked = u of the target, 0 where this shard does not have it. Then

    log_prob = picked - highest - log total,    entropy = log total - weighted / total

and for any cotangents the gradient of u is softmax (level + slope log softmax) + pick [is target].
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from pallas_kernels.token_log_probs.chunks import Gradients
from pallas_kernels.token_log_probs.problem import Head, Problem, Rows


class Call(NamedTuple):
    """What an operation is compiled for."""

    implementation: ModuleType
    problem: Problem


# --- values per token, with a gradient for each ---------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def per_token(call: Call, hidden: Array, head: Head, master: Array | None, rows: Rows) -> Rows:
    """log_prob, log_normaliser and (if asked for) entropy.

    `master` is not read. If given, it takes the place of the head in the gradient.
    """
    return _forward(call, hidden, head, master, rows)[0]


def _forward(call: Call, hidden: Array, head: Head, master: Array | None, rows: Rows):
    out = _spread(call, _forward_shard, "tokens")(hidden, head, rows)
    kept = {name: out.pop(name) for name in ("highest", "log_total")}
    result = dict(out)
    if call.problem.entropy:
        kept["entropy"] = out["entropy"]
    return result, (hidden, head, _like(master), rows, kept)


def _forward_shard(call: Call, hidden: Array, head: Head, rows: Rows) -> Rows:
    problem = call.problem
    rows, known = _of_this_shard(problem, rows | {"hidden": hidden}, head)
    stats = combined(problem, call.implementation.statistics(problem, rows, head))
    return _outputs(problem, stats, rows, known) | {
        "highest": stats["highest"],
        "log_total": jnp.log(stats["total"]),
    }


def _backward(call: Call, saved, cotangents: Rows):
    hidden, head, master, rows, kept = saved
    given = rows | kept | {f"d_{name}": value for name, value in cotangents.items()}
    gradients = _spread(call, _backward_shard, "gradients")(hidden, head, given)
    return gradients.hidden, *_in_dtypes(head, master, gradients), None


def _backward_shard(call: Call, hidden: Array, head: Head, rows: Rows) -> Gradients:
    problem = call.problem
    rows, _ = _of_this_shard(problem, rows | {"hidden": hidden}, head)
    d_log_prob = _masked(rows, rows.pop("d_log_prob"))
    level = _masked(rows, rows.pop("d_log_normaliser")) - d_log_prob
    if problem.entropy:
        d_entropy = _masked(rows, rows.pop("d_entropy"))
        level = level - d_entropy * rows.pop("entropy")
        rows["slope"] = -d_entropy
    rows |= {"level": level, "pick": d_log_prob}
    return _summed(problem, call.implementation.gradients(problem, rows, head), hidden)


per_token.defvjp(_forward, _backward)


# --- a loss whose gradient is made with its value -------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss_sum(
    call: Call, loss_of, hidden: Array, head: Head, master: Array | None, rows: Rows, given: Any
):
    """Sum over valid tokens of loss_of(log_probs, given), and the values per token (no gradient)."""
    out: Any = per_token(call, hidden, head, master, rows)
    return _total_loss(call, loss_of, out["log_prob"], rows, given), out


def _total_loss(call: Call, loss_of, log_prob: Array, rows: Rows, given: Any) -> Array:
    loss = jnp.sum(_masked(rows, loss_of(log_prob, given)))
    shards = call.problem.shards
    return lax.psum(loss, shards.tokens) if shards.tokens and shards.mesh is None else loss


def _fused_forward(
    call: Call, loss_of, hidden: Array, head: Head, master: Array | None, rows: Rows, given: Any
):
    shard = partial(_fused_shard, loss_of=loss_of)
    gradients, out = _spread(call, shard, "both")(hidden, head, rows | {"given": given})
    loss = _total_loss(call, loss_of, out["log_prob"], rows, given)
    return (loss, out), (gradients, head, _like(master))


def _fused_shard(call: Call, hidden: Array, head: Head, rows: dict[str, Any], *, loss_of):
    problem = call.problem
    given, tree = jax.tree.flatten(rows.pop("given"))
    rows, known = _of_this_shard(problem, rows | {"hidden": hidden}, head)
    rows |= {f"given {i}": values for i, values in enumerate(given)}

    def slope_of(log_probs: Array, rows: Rows) -> Array:
        mine = jax.tree.unflatten(tree, [rows[f"given {i}"] for i in range(len(given))])
        return jax.grad(lambda values: jnp.sum(loss_of(values, mine)))(log_probs)

    gradients, stats = call.implementation.fused(problem, rows, head, slope_of)
    stats["highest"] = stats.pop("shift")
    return _summed(problem, gradients, hidden), _outputs(problem, stats, rows, known)


def _fused_backward(call: Call, loss_of, saved, cotangents):
    del call, loss_of
    gradients, head, master = saved
    scale = cotangents[0]
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), gradients)
    return scaled.hidden, *_in_dtypes(head, master, scaled), None, None


loss_sum.defvjp(_fused_forward, _fused_backward)


# --- parts ----------------------------------------------------------------------------------------------------------


def _outputs(problem: Problem, stats: Rows, rows: Rows, known: Array) -> Rows:
    log_total = jnp.log(stats["total"])
    # A log-prob is at most 0; rounding of the terms could lift it above.
    log_prob = jnp.minimum(stats["picked"] - stats["highest"] - log_total, 0.0)
    out = {
        "log_prob": jnp.where(known, log_prob, jnp.nan),
        "log_normaliser": stats["highest"] + log_total,
    }
    if problem.entropy:
        out["entropy"] = log_total - stats["weighted"] / stats["total"]
    return {name: _masked(rows, values) for name, values in out.items()}


def combined(problem: Problem, stats: Rows) -> Rows:
    """Statistics of the whole vocabulary from those of its shards: one small collective."""
    axis = problem.shards.vocab
    if axis is None:
        return stats
    names = list(stats)
    parts = lax.all_gather(jnp.stack([stats[name] for name in names]), axis)
    return merged({name: parts[:, i] for i, name in enumerate(names)})


def merged(parts: Rows) -> Rows:
    """One vocabulary's statistics from those of its parts, [parts, tokens] each."""
    highest = jnp.max(parts["highest"], axis=0)
    change = parts["highest"] - highest[None]
    fade = jnp.exp(change)
    out = {"highest": highest, "total": jnp.sum(parts["total"] * fade, axis=0)}
    if "weighted" in parts:
        out["weighted"] = jnp.sum(fade * (parts["weighted"] + change * parts["total"]), axis=0)
    if "picked" in parts:
        out["picked"] = jnp.sum(parts["picked"], axis=0)
    return out


def _of_this_shard(problem: Problem, rows: Rows, head: Head) -> tuple[Rows, Array]:
    """Rows with targets counted from this shard's first column, -1 outside it; and which are in the vocabulary."""
    vocab, targets, shards = problem.vocab(head[0]), rows["targets"], 1
    if problem.shards.vocab is not None:
        shards = lax.axis_size(problem.shards.vocab)
        targets = targets - lax.axis_index(problem.shards.vocab) * vocab
    known = (rows["targets"] >= 0) & (rows["targets"] < vocab * shards)
    inside = (targets >= 0) & (targets < vocab)
    return rows | {"targets": jnp.where(inside, targets, -1)}, known


def _summed(problem: Problem, gradients: Gradients, hidden: Array) -> Gradients:
    """Gradients summed over the shards that share what they are of: each once."""
    d_hidden: Array = gradients.hidden
    d_head: tuple[Any, Any] = (gradients.head, gradients.bias)
    if problem.shards.vocab is not None:
        d_hidden = lax.psum(d_hidden, problem.shards.vocab)
    if problem.shards.tokens is not None:
        d_head = lax.psum(d_head, problem.shards.tokens)
    return Gradients(d_hidden.astype(hidden.dtype), *d_head)


def _in_dtypes(head: Head, master: Array | None, gradients: Gradients) -> tuple[Any, Array | None]:
    """Cotangents of head and of master."""
    weights, bias = head
    d_bias = None if bias is None or gradients.bias is None else gradients.bias.astype(bias.dtype)
    if master is None:
        return (gradients.head.astype(weights.dtype), d_bias), None
    return (None, d_bias), gradients.head.astype(master.dtype)


def _like(master: Array | None) -> Array | None:
    """An empty array of its dtype: all that the backward pass needs to know of it."""
    return None if master is None else jnp.zeros((0,), master.dtype)


def _masked(rows: Rows, values: Array) -> Array:
    return jnp.where(rows["valid"], values, 0.0) if "valid" in rows else values


def _spread(call: Call, function: Callable, outputs: str) -> Callable:
    """The function on each shard of whole arrays, if the problem names a mesh."""
    shards = call.problem.shards
    function = partial(function, call)
    if shards.mesh is None:
        return function
    tokens = PartitionSpec(shards.tokens)
    vocab_major = call.problem.vocab_major
    weights = PartitionSpec(shards.vocab) if vocab_major else PartitionSpec(None, shards.vocab)
    bias = PartitionSpec(shards.vocab)
    parts: list[Any] = [tokens, weights, bias]
    specs: Any = Gradients(*parts)
    specs = {"gradients": specs, "both": (specs, tokens)}.get(outputs, tokens)
    return jax.shard_map(
        function,
        mesh=shards.mesh,
        in_specs=(tokens, (weights, bias), tokens),
        out_specs=specs,
        check_vma=False,
    )
