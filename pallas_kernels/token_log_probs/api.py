"""token_log_probs, token_loss and the choice of their implementation.

There is one chooser, this file, and two exceptions: an implementation raises NotImplementedError when it cannot serve
this backend or these shapes (the next one is tried) and ValueError when the caller is wrong (nothing else is tried).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.token_log_probs import chunked, gpu, op, reference, spread, tpu
from pallas_kernels.token_log_probs.problem import (
    WHOLE,
    Head,
    Problem,
    Rows,
    Shards,
    vocab_axis,
)

_IMPLEMENTATIONS: dict[str, ModuleType] = {
    "gpu": gpu,
    "tpu": tpu,
    "chunked": chunked,
    "reference": reference,
}
"""In the order in which they are tried."""


class TokenLogProbs(NamedTuple):
    """Of each token, in float32 and nats; 0 where not valid."""

    log_prob: Float[Array, " tokens"]
    """Of the target. Never above 0."""
    log_normaliser: Float[Array, " tokens"]
    """log sum exp of the tempered logits."""
    entropy: Float[Array, " tokens"]
    """NaN if not asked for."""


def token_log_probs(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "..."],
    targets: Int[Array, " tokens"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    master: Float[Array, "..."] | None = None,
    temperature: float | Float[Array, ""] | Float[Array, " tokens"] = 1.0,
    soft_cap: float | None = None,
    valid: Bool[Array, " tokens"] | None = None,
    head_axes: str = "vocab embed",
    entropy: bool = True,
    shards: Shards = WHOLE,
    implementation: str | None = None,
    chunk_tokens: int | None = None,
) -> TokenLogProbs:
    """log softmax(logits)[target] of each token, the logarithm of the softmax's denominator, and its entropy.

        logits = cap(hidden @ head.T + bias) / temperature,    cap(z) = soft_cap tanh(z / soft_cap) if given

    All three have gradients for hidden, head and bias (reverse mode), none for temperature. The head's is summed in
    float32. Tokens that are not valid give exactly 0 and no gradient, whatever else they hold. The target of a valid
    token must be in [0, vocab): others give a log-prob of NaN.

    `master` are the float32 weights that a bfloat16 `head` was rounded from, or an array like them: it is not read. The
    head's gradient goes to it in float32, as it was summed, and none goes to `head`.
    `head_axes` is "vocab embed" (a tied embedding) or "embed vocab". With `entropy=False` it is not computed.
    `shards` says how tokens and vocabulary are spread over devices: see Shards. Targets count from the first shard.
    `implementation` names one of "gpu", "tpu", "chunked", "reference"; None takes the first that can serve.
    `chunk_tokens` overrides the number of tokens whose logits, or their gradients, are in memory at a time.

    ValueError: arguments that do not fit. NotImplementedError: the implementation asked for cannot serve them.
    """
    rows = _rows(hidden, head, targets, bias, master, temperature, soft_cap, valid, head_axes)
    problem = Problem(head_axes == "vocab embed", soft_cap, entropy, shards, chunk_tokens)
    module = _chosen(implementation, problem, hidden, head, bias)
    out = _per_token(module, problem, hidden, (head, bias), master, rows)
    return _named(out)


def token_loss(
    loss_of: Callable[[Array, Any], Array],
    given: Any,
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "..."],
    targets: Int[Array, " tokens"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    master: Float[Array, "..."] | None = None,
    temperature: float | Float[Array, ""] | Float[Array, " tokens"] = 1.0,
    soft_cap: float | None = None,
    valid: Bool[Array, " tokens"] | None = None,
    head_axes: str = "vocab embed",
    entropy: bool = True,
    shards: Shards = WHOLE,
    implementation: str | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Float[Array, ""], TokenLogProbs]:
    """The sum over valid tokens of loss_of(log_probs, given), with its gradient made in the same pass.

    `loss_of` takes log-probs [n] and the same n tokens of `given`, a pytree of arrays [tokens], and returns losses [n].
    Each may depend on its own token only; what depends on several, such as a ratio per sequence, needs token_log_probs.
    Only hidden, head and bias get gradients, and only through the sum: the values per token are for metrics. The
    gradient is computed for a cotangent of 1 and multiplied by the real one: put weights and denominators in `given`.

    6 tokens x embed x vocab operations in all, where value and gradient of token_log_probs take 8. Keeps the head's
    gradient in float32 until the backward pass: with `master` that is the result, without it one more array.
    `loss_of` must be the same function, or an equal one, for JAX not to compile anew. The other arguments are those of
    token_log_probs; inside a shard_map the loss is summed over tokens' shards, and a gradient is to be taken there too.
    """
    rows = _rows(hidden, head, targets, bias, master, temperature, soft_cap, valid, head_axes)
    problem = Problem(head_axes == "vocab embed", soft_cap, entropy, shards, chunk_tokens)
    module = _chosen(implementation, problem, hidden, head, bias)
    given = jax.lax.stop_gradient(given)
    if module is reference or hidden.shape[0] == 0:
        out = _per_token(module, problem, hidden, (head, bias), master, rows)
        losses = loss_of(out["log_prob"], given)
        loss = jnp.sum(losses if valid is None else jnp.where(valid, losses, 0.0))
    else:
        call = op.Call(module, problem)
        both: Any = op.loss_sum(call, loss_of, hidden, (head, bias), master, rows, given)
        loss, out = both
    out = jax.lax.stop_gradient(out)
    return loss, _named(out)


def _named(out: Rows) -> TokenLogProbs:
    missing = jnp.full_like(out["log_prob"], jnp.nan)
    return TokenLogProbs(out["log_prob"], out["log_normaliser"], out.get("entropy", missing))


def _per_token(module, problem: Problem, hidden, head: Head, master, rows: Rows) -> Rows:
    if module is not reference and hidden.shape[0]:
        return op.per_token(op.Call(module, problem), hidden, head, master, rows)
    if master is not None:
        weights = jax.lax.stop_gradient(head[0].astype(master.dtype))
        head = (weights + (master - jax.lax.stop_gradient(master)), head[1])
    return reference.per_token(problem, hidden, head, rows)


def _rows(hidden, head, targets, bias, master, temperature, soft_cap, valid, head_axes) -> Rows:
    """Checks the arguments; targets, scale and valid."""
    tokens = hidden.shape[0]
    if head_axes not in ("vocab embed", "embed vocab"):
        raise ValueError(f"head_axes={head_axes!r} must be 'vocab embed' or 'embed vocab'")
    if head.ndim != 2 or targets.shape != (tokens,) or _embed(head, head_axes) != hidden.shape[1]:
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape} and targets {targets.shape} do not fit; "
            f"they are [tokens embed], [{head_axes}] and [tokens]"
        )
    if bias is not None and bias.shape != (head.size // hidden.shape[1],):
        raise ValueError(f"bias {bias.shape} does not fit head {head.shape}; it is [vocab]")
    if master is not None and master.shape != head.shape:
        raise ValueError(f"master {master.shape} must have the shape of head {head.shape}")
    if hidden.dtype != head.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} but head is {head.dtype}; cast one to the other's dtype"
        )
    if isinstance(temperature, int | float | np.number) and not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; use 1.0 for greedy sampling")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be above 0; use None for no cap")
    scale = 1.0 / jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    scale = jnp.broadcast_to(scale, (tokens,))
    if valid is None:
        return {"targets": targets.astype(jnp.int32), "scale": scale}
    # A padding row's temperature may be 0.
    return {
        "targets": targets.astype(jnp.int32),
        "scale": jnp.where(valid, scale, 1.0),
        "valid": valid,
    }


def _check_spread(problem: Problem, head: Array) -> None:
    """ValueError for axes that the mesh does not have, and for devices without a column."""
    shards = problem.shards
    if shards.mesh is None:
        return
    spread.ways(shards, "tokens")
    ways, vocab = spread.ways(shards, "vocab"), problem.vocab(head)
    if vocab < ways:
        raise ValueError(
            f"vocab={vocab} is less than the {ways} devices of shards.vocab={shards.vocab!r}; "
            "leave it whole: shards.vocab=None"
        )
    embed, parts = head.shape[1 - vocab_axis(problem)], spread.ways(shards, "embed")
    strange = {*spread.axis_names(shards.embed)} - {*spread.axis_names(shards.tokens)}
    if embed % parts or strange:
        raise ValueError(
            f"shards.embed={shards.embed!r} must be of shards.tokens={shards.tokens!r} and divide embed={embed}; "
            "leave the gradient whole: shards.embed=None"
        )


def _embed(head: Array, head_axes: str) -> int:
    return head.shape[1 if head_axes == "vocab embed" else 0]


def _chosen(
    implementation: str | None, problem: Problem, hidden: Array, head: Array, bias: Array | None
) -> ModuleType:
    names = list(_IMPLEMENTATIONS)
    if implementation is not None and implementation not in names:
        raise ValueError(f"implementation={implementation!r} is unknown; choose one of {names}")
    _check_spread(problem, head)
    reasons = []
    for name in names if implementation is None else [implementation]:
        try:
            _IMPLEMENTATIONS[name].check(problem, hidden, head, bias)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
        else:
            return _IMPLEMENTATIONS[name]
    raise NotImplementedError(f"no implementation of token_log_probs can serve: {reasons}")
