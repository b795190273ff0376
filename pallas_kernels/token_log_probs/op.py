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

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.token_log_probs import chunked
from pallas_kernels.token_log_probs.chunks import Gradients
from pallas_kernels.token_log_probs.problem import Head, Problem, Rows, vocab_axis
from pallas_kernels.token_log_probs.spread import HeadGradients, Heads, axis_names, spread


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
    out = spread(call.problem, partial(_forward_shard, call), "tokens")(hidden, head, rows)
    kept = {name: out.pop(name) for name in ("highest", "log_total")}
    result = dict(out)
    if call.problem.entropy:
        kept["entropy"] = out["entropy"]
    return result, (hidden, head, _like(master), rows, kept)


def _forward_shard(call: Call, hidden: Array, heads: Heads, rows: Rows) -> Rows:
    problem = call.problem
    rows, rest, known = _of_this_shard(problem, rows | {"hidden": hidden}, heads)
    stats = combined(problem, call.implementation.statistics(problem, rows, heads.mine))
    if rest is not None:
        more = _rest_statistics(problem, rest, heads)
        stats = merged({name: jnp.stack([stats[name], more[name]]) for name in stats})
    return _outputs(problem, stats, rows, known) | {
        "highest": stats["highest"],
        "log_total": jnp.log(stats["total"]),
    }


def _backward(call: Call, saved, cotangents: Rows):
    hidden, head, master, rows, kept = saved
    given = rows | kept | {f"d_{name}": value for name, value in cotangents.items()}
    backward = spread(call.problem, partial(_backward_shard, call), "gradients")
    gradients = backward(hidden, head, given)
    return gradients.hidden, *_in_dtypes(head, master, gradients), None


def _backward_shard(call: Call, hidden: Array, heads: Heads, rows: Rows) -> HeadGradients:
    problem = call.problem
    rows, rest, _ = _of_this_shard(problem, rows | {"hidden": hidden}, heads)
    d_log_prob = _masked(rows, rows.pop("d_log_prob"))
    level = _masked(rows, rows.pop("d_log_normaliser")) - d_log_prob
    if problem.entropy:
        d_entropy = _masked(rows, rows.pop("d_entropy"))
        level = level - d_entropy * rows.pop("entropy")
        rows["slope"] = -d_entropy
    rows |= {"level": level, "pick": d_log_prob}
    mine = call.implementation.gradients(problem, rows, heads.mine)
    if rest is not None:
        rest = rows | {"targets": rest["targets"]}
    return _summed(problem, mine, _rest_gradients(problem, rest, heads), hidden)


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
    both = spread(call.problem, partial(_fused_shard, call, loss_of), "both")
    gradients, out = both(hidden, head, rows | {"given": given})
    loss = _total_loss(call, loss_of, out["log_prob"], rows, given)
    return (loss, out), (gradients, head, _like(master))


def _fused_shard(call: Call, loss_of, hidden: Array, heads: Heads, rows: dict[str, Any]):
    problem = call.problem
    given, tree = jax.tree.flatten(rows.pop("given"))
    rows, rest, known = _of_this_shard(problem, rows | {"hidden": hidden}, heads)
    rows |= {f"given {i}": values for i, values in enumerate(given)}
    if rest is not None:
        stats = _rest_statistics(problem, rest, heads)
        rows |= {f"rest {name}": values for name, values in stats.items()}

    def slope_of(log_probs: Array, rows: Rows) -> Array:
        mine = jax.tree.unflatten(tree, [rows[f"given {i}"] for i in range(len(given))])
        return jax.grad(lambda values: jnp.sum(loss_of(values, mine)))(log_probs)

    mine, stats = call.implementation.fused(problem, rows, heads.mine, slope_of)
    stats["highest"] = stats.pop("shift")
    if rest is not None:
        log_total = jnp.log(stats["total"])
        log_prob = jnp.minimum(stats["picked"] - stats["highest"] - log_total, 0.0)
        slope = _masked(rows, slope_of(log_prob, rows))
        rest |= {
            "highest": stats["highest"],
            "log_total": log_total,
            "level": -slope,
            "pick": slope,
        }
    gradients = _summed(problem, mine, _rest_gradients(problem, rest, heads), hidden)
    return gradients, _outputs(problem, stats, rows, known)


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


def _of_this_shard(problem: Problem, rows: Rows, heads: Heads) -> tuple[Rows, Rows | None, Array]:
    """Rows with targets counted from this shard's first column, -1 outside it; the same for the rest, if there is one;
    and which targets are in the vocabulary."""
    vocab, shards, first = problem.vocab(heads.mine[0]), 1, jnp.int32(0)
    if problem.shards.vocab is not None:
        shards = lax.axis_size(problem.shards.vocab)
        first = lax.axis_index(problem.shards.vocab) * vocab
    targets = rows["targets"]

    def within(first: Array | int, count: int) -> Rows:
        inside = (targets >= first) & (targets < first + count)
        return rows | {"targets": jnp.where(inside, targets - first, -1)}

    if heads.rest is None:
        return within(first, vocab), None, (targets >= 0) & (targets < vocab * shards)
    more = problem.vocab(heads.rest[0])
    known = (targets >= 0) & (targets < vocab * shards + more)
    return within(first, vocab), within(vocab * shards, more), known


def _rest_statistics(problem: Problem, rest: Rows, heads: Heads) -> Rows:
    """Of the rest's columns, the same on all shards of the vocabulary."""
    assert heads.rest is not None
    return chunked.statistics(problem._replace(chunk_tokens=None), rest, heads.rest)


def _rest_gradients(problem: Problem, rest: Rows | None, heads: Heads) -> Gradients | None:
    if rest is None or heads.rest is None:
        return None
    return chunked.gradients(problem._replace(chunk_tokens=None), rest, heads.rest)


def _summed(
    problem: Problem, mine: Gradients, rest: Gradients | None, hidden: Array
) -> HeadGradients:
    """Gradients summed over the shards that share what they are of: each once."""
    d_hidden: Array = mine.hidden
    d_heads: Any = [(part.head, part.bias) for part in (mine, rest) if part is not None]
    if problem.shards.vocab is not None:
        d_hidden = lax.psum(d_hidden, problem.shards.vocab)
    if rest is not None:
        d_hidden = d_hidden + rest.hidden
    if problem.shards.tokens is not None:
        d_heads = [_over_tokens(problem, part) for part in d_heads[:1]] + [
            lax.psum(part, problem.shards.tokens) for part in d_heads[1:]
        ]
    of_mine = Gradients(d_hidden.astype(hidden.dtype), *d_heads[0])
    none: Any = None
    return HeadGradients(of_mine, None if rest is None else Gradients(none, *d_heads[1]))


def _over_tokens(problem: Problem, gradient: Head) -> Head:
    """The sum over the tokens' devices, or each device's part of it along embed."""
    shards = problem.shards
    if shards.embed is None:
        return lax.psum(gradient, shards.tokens)
    weights, bias = gradient
    split = axis_names(shards.embed)
    others = tuple(axis for axis in axis_names(shards.tokens) if axis not in split)
    weights = lax.psum_scatter(
        weights, split, scatter_dimension=1 - vocab_axis(problem), tiled=True
    )
    weights = lax.psum(weights, others) if others else weights
    return weights, None if bias is None else lax.psum(bias, shards.tokens)


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
