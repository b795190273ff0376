"""token_log_probs on this GPU against float64, on fresh inputs and with poisoned memory."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.gpu_timing import Run, compiled

from pallas_kernels.token_log_probs import token_log_probs, token_loss, tune
from pallas_kernels.token_log_probs.problem import product

SIZES = [(1023, 256, 5000), (777, 128, 1187), (512, 192, 1216), (64, 64, 128), (1500, 512, 4096)]
"""Tokens, embed, vocab."""
SPREADS = (2.0, 60.0)
"""Of the logits; with 60, some targets have p < e^-400."""


def check(run: Run) -> None:
    """Odd sizes, both layouts in turn, masks, far targets."""
    seed = int.from_bytes(os.urandom(3), "little")
    print(f"seed {seed}")
    for i, sizes in enumerate(SIZES):
        axes = ("vocab embed", "embed vocab")[i % 2]
        name = "x".join(str(size) for size in sizes)
        made: dict[str, Any] = {}
        for spread in SPREADS:
            run.attempt(
                f"check {name} [{axes}] spread {spread:.0f}",
                lambda made=made, spread=spread, sizes=sizes, axes=axes, i=i: _checked(
                    made, sizes, seed + i, axes, spread
                ),
            )


def poison() -> None:
    """Fills free memory with NaN, so that what a kernel does not write is seen."""
    jax.block_until_ready([jnp.full((2**i,), jnp.nan, jnp.float32) for i in range(8, 30)])


def _checked(
    made: dict, sizes: tuple[int, int, int], seed: int, head_axes: str, spread: float
) -> dict:
    given = tune.inputs(*sizes, seed, spread)
    rng = np.random.default_rng(seed)
    given["slope"] = jnp.asarray(rng.normal(size=sizes[0]), jnp.float32)
    given["valid"] = jnp.asarray(rng.random(sizes[0]) < 0.8)
    expected = exact(**{name: np.asarray(values) for name, values in given.items()})
    turned = head_axes == "embed vocab"
    given["hidden"] = jnp.where(given["valid"][:, None], given["hidden"], jnp.nan)
    given["head"] = jnp.array(given["head"].T) if turned else given["head"]
    if not made:
        made |= {name: compiled(f, given)[0] for name, f in _functions(head_axes).items()}
    told, errors = {}, {}
    for name, function in made.items():
        poison()
        (_, out), gradients = function(given)
        errors[name] = [
            float(np.abs(np.where(given["valid"], values, 0.0) - wanted).max())
            for values, wanted in zip(out, expected[:3], strict=True)
        ]
        if gradients is None:
            continue
        d_hidden, d_head = gradients
        norms = [
            float(np.linalg.norm(np.asarray(g, np.float64) - w) / np.linalg.norm(w))
            for g, w in zip((d_hidden, d_head.T if turned else d_head), expected[3:], strict=True)
        ]
        told |= {f"{name}, values": max(errors[name]), f"{name}, gradients": max(norms)}
        # No worse than a softmax of float32 logits, within a factor of 2.
        limits = [2 * error + 2e-7 * spread for error in errors["float32 logits"]]
        good = np.all(np.array(errors[name]) <= limits) and max(norms) < 1e-2
        told[name] = "PASS" if good else "FAIL"
    return told | {"float32 logits": max(errors["float32 logits"]), "lowest": expected[0].min()}


def _functions(head_axes: str) -> dict:
    """Of the same dictionary: float32 logits, loss and gradient in one pass, log-probs and gradients in two."""

    def gradient_of(loss):
        def run(given):
            def of(hidden, head):
                return loss(**(given | {"hidden": hidden, "head": head}))

            return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(
                given["hidden"], given["head"]
            )

        return run

    options = {"head_axes": head_axes, "implementation": "gpu", "chunk_tokens": 512}

    def one_pass(hidden, head, targets, scale, slope, valid):
        more = {"temperature": 1 / scale, "valid": valid, **options}
        return token_loss(lambda x, weight: weight * x, slope, hidden, head, targets, **more)

    def two_passes(hidden, head, targets, scale, slope, valid):
        more = {"temperature": 1 / scale, "valid": valid, **options}
        out = token_log_probs(hidden, head, targets, **more)
        return jnp.sum(slope * out.log_prob), out

    def float32_logits(given):
        axes = "TD,VD->TV" if head_axes == "vocab embed" else "TD,DV->TV"
        logits = product(axes, given["hidden"], given["head"]) * given["scale"][:, None]
        log_softmax = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_softmax, given["targets"][:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=1)
        return (None, (log_prob, jax.nn.logsumexp(logits, axis=1), entropy)), None

    return {
        "float32 logits": float32_logits,
        "one pass": gradient_of(one_pass),
        "two": gradient_of(two_passes),
    }


def exact(hidden, head, targets, scale, slope, valid) -> tuple[np.ndarray, ...]:
    """log_prob, log_normaliser, entropy, d_hidden and d_head in float64."""
    hidden, head, scale, slope = (np.asarray(x, np.float64) for x in (hidden, head, scale, slope))
    rows = np.arange(len(hidden))
    logits = hidden @ head.T * scale[:, None]
    highest = logits.max(1)
    log_total = np.log(np.exp(logits - highest[:, None]).sum(1))
    log_softmax = logits - (highest + log_total)[:, None]
    softmax = np.exp(log_softmax)
    d_logits = -softmax * slope[:, None]
    d_logits[rows, targets] += slope
    d_logits *= (scale * valid)[:, None]
    values = log_softmax[rows, targets], highest + log_total, -(softmax * log_softmax).sum(1)
    return *(np.where(valid, x, 0) for x in values), d_logits @ head, d_logits.T @ hidden
