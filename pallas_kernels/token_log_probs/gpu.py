"""token_log_probs on NVIDIA Hopper: the kernel of hopper.py, and XLA's matrix products for the gradients.

Forward: one pass of the kernel, logits in registers only. Backward: for a chunk of tokens at a time, the kernel writes
what its logits' gradient is made of, in bfloat16, and two products of the library make gradients of it. The chunk is
bounded, so [tokens, vocab] never exists.

D embed, V vocab, T tokens, C tokens of a chunk.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array

from pallas_kernels.token_log_probs import chunks, hopper, op, tuned
from pallas_kernels.token_log_probs.chunks import Gradients, SlopeOf
from pallas_kernels.token_log_probs.problem import (
    Head,
    Problem,
    Rows,
    clean,
    highest_over_vocab,
    product,
    target_logits,
)

LOG2_E = math.log2(math.e)
_STATISTICS_BYTES = 2**25
"""Of partial statistics that leave the kernel, before they are merged."""
_FORWARD_CHUNK = 4096
"""Tokens that are skipped together if none is valid."""
_CHUNK_ELEMENTS = 5 * 2**26
"""Of a chunk's logit gradients: 640 MiB."""


class Device(NamedTuple):
    """Where the kernel runs."""

    multiprocessors: int
    interpret: Any = None


_interpreted: Device | None = None


@contextlib.contextmanager
def interpreted(multiprocessors: int = 4) -> Iterator[None]:
    """Within it, kernels are traced for JAX's GPU interpreter, which needs no GPU. For tests: it is slow."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    global _interpreted
    params: Any = plgpu
    before, _interpreted = _interpreted, Device(multiprocessors, params.InterpretGPUParams())
    try:
        yield
    finally:
        _interpreted = before


def check(problem: Problem, hidden: Array, head: Array, bias: Array | None) -> None:
    """NotImplementedError without a Hopper GPU, and for what its kernel does not do."""
    if _interpreted is None:
        if jax.default_backend() != "gpu":
            raise NotImplementedError(f"needs a GPU, and JAX runs on {jax.default_backend()}")
        capability = getattr(jax.devices()[0], "compute_capability", "unknown")
        if capability != "9.0":
            raise NotImplementedError(f"needs compute capability 9.0 (Hopper), not {capability}")
    if hidden.dtype != jnp.bfloat16:
        raise NotImplementedError(f"multiplies bfloat16 only, not {hidden.dtype}")
    if bias is not None or problem.soft_cap is not None:
        raise NotImplementedError("has neither bias nor soft-cap")
    tiles = forward_tiles(problem, hidden, head)
    if hidden.shape[1] % tiles.tile_k:
        raise NotImplementedError(
            f"embed={hidden.shape[1]} must be a multiple of {tiles.tile_k} for it"
        )
    if problem.vocab(head) < tiles.tile_n:
        raise NotImplementedError(f"vocab={problem.vocab(head)} is below its tile {tiles.tile_n}")


def forward_tiles(problem: Problem, hidden: Array, head: Array) -> hopper.Tiles:
    """The tiles of statistics."""
    return tuned.tiles("gpu forward", hidden.shape[1], problem.vocab(head), hopper.Tiles())


def powers_tiles(problem: Problem, hidden: Array, head: Array) -> hopper.Tiles:
    """The tiles of the passes that write a chunk."""
    return tuned.tiles("gpu powers", hidden.shape[1], problem.vocab(head), hopper.Tiles())


def default_chunk_tokens(vocab: int, tiles: hopper.Tiles) -> int:
    """Tokens of a chunk: whole row blocks, as many as the memory allowed holds."""
    return max(_CHUNK_ELEMENTS // vocab // tiles.rows, 1) * tiles.rows


def statistics(problem: Problem, rows: Rows, head: Head) -> Rows:
    """See op."""
    run = functools.partial(kernel_statistics, problem, head=head)
    tokens = rows["targets"].shape[0]
    if "valid" not in rows and not problem.chunk_tokens:
        return run(rows)
    return chunks.forward(rows, min(problem.chunk_tokens or _FORWARD_CHUNK, tokens), run)


def gradients(problem: Problem, rows: Rows, head: Head) -> Gradients:
    """See op."""
    return chunks.backward(problem, rows, head, _chunk(problem, rows, head), _d_logits)


def fused(problem: Problem, rows: Rows, head: Head, slope_of: SlopeOf) -> tuple[Gradients, Rows]:
    """See chunks.fused."""
    chunk = _chunk(problem, rows, head)
    return chunks.fused(problem, rows, head, chunk, _powers, slope_of, chunks.scattered)


def _chunk(problem: Problem, rows: Rows, head: Head) -> int:
    tiles = powers_tiles(problem, rows["hidden"], head[0])
    wanted = problem.chunk_tokens or default_chunk_tokens(problem.vocab(head[0]), tiles)
    return min(wanted, rows["targets"].shape[0])


def _powers(problem: Problem, rows: Rows, head: Head, again: Array) -> Rows:
    """Relative to the target's logit, which costs no maximum; relative to the maximum when asked again."""

    def highest(rows: Rows) -> Array:
        got = kernel_statistics(problem, rows, head=head)["highest"]
        return highest_over_vocab(problem, got, rows)

    shift = lax.cond(again, highest, lambda rows: rows["picked"], rows)
    return kernel_powers(problem, rows | {"shift": shift}, head) | {"shift": shift}


def _d_logits(problem: Problem, rows: Rows, head: Head) -> Array:
    highest, log_total, scale = (rows[name] for name in ("highest", "log_total", "scale"))
    slope = rows.get("slope", jnp.zeros_like(scale))
    log_prob = target_logits(problem, rows, head)[0] - highest - log_total
    at_target = jnp.exp(log_prob) * (rows["level"] + slope * log_prob) + rows["pick"]
    if "valid" in rows:
        # Their level, slope and pick are 0, but highest and log_total may hold anything.
        highest, log_total, at_target = (
            jnp.where(rows["valid"], values, 0.0) for values in (highest, log_total, at_target)
        )
    # The kernel's powers are relative to the maximum. What makes a softmax of them is one factor per row.
    factor = jnp.exp(-log_total) * scale
    given = {
        "shift": highest,
        "level": (rows["level"] - slope * log_total) * factor,
        "slope": slope * factor,
    }
    powers = kernel_powers(problem, rows | given, head)["powers"]
    return chunks.scattered(powers, rows["targets"], (at_target * scale).astype(powers.dtype))


# --- the kernel, for any number of rows and columns -----------------------------------------------------------------


def kernel_statistics(
    problem: Problem, rows: Rows, *, head: Head, tiles: hopper.Tiles | None = None
) -> Rows:
    """The statistics of op, from one pass of the kernel."""
    weights = head[0]
    tiles = tiles or forward_tiles(problem, rows["hidden"], weights)
    x, tokens = clean(rows), rows["targets"].shape[0]
    padding = -tokens % tiles.rows
    max_runs = max(_STATISTICS_BYTES // (12 * (tokens + padding)), 8)
    parts = _kernel(problem, tiles, max_runs)(
        _padded(x, padding), weights, {"scale": _padded(rows["scale"], padding)}
    )
    parts = {name: values[:, :tokens] for name, values in parts.items()}
    parts["highest"] = parts["highest"] * rows["scale"][None]
    if "weighted" in parts:
        parts["weighted"] = parts["weighted"] / LOG2_E
    rest = rest_logits(problem, x, weights, tiles)
    if rest is not None:
        parts = _with_rest(parts, rest * rows["scale"][:, None])
    return op.merged(parts) | {"picked": target_logits(problem, rows, head)[0]}


def kernel_powers(
    problem: Problem, rows: Rows, head: Head, *, tiles: hopper.Tiles | None = None
) -> Rows:
    """exp(logits - shift) [rows, vocab] and its sums total and weighted; with level and slope in rows, its product with
    level + slope * (logits - shift), and no sums."""
    weights = head[0]
    tiles = tiles or powers_tiles(problem, rows["hidden"], weights)
    x, tokens, vocab = clean(rows), rows["targets"].shape[0], problem.vocab(weights)
    padding = -tokens % tiles.rows
    # Before the temperature; 0 / 0 if that is infinite.
    shift = rows["shift"] / jnp.maximum(rows["scale"], jnp.finfo(jnp.float32).tiny)
    values = {"scale": rows["scale"], "shift": shift}
    if "level" in rows:
        values |= {"level": rows["level"], "slope": rows["slope"] / LOG2_E}
    values = {name: _padded(each, padding) for name, each in values.items()}
    parts = _kernel(problem, tiles, 128)(_padded(x, padding), weights, values)
    powers = parts.pop("powers")[:tokens]
    out = {name: jnp.sum(values, axis=0)[:tokens] for name, values in parts.items()}
    if "weighted" in out:
        out["weighted"] = out["weighted"] / LOG2_E
    rest = rest_logits(problem, x, weights, tiles)
    if rest is None:
        return out | {"powers": powers}
    below = (rest - shift[:, None]) * rows["scale"][:, None]
    raised = jnp.exp(jnp.minimum(below, hopper.MAX_POWER / LOG2_E))
    if "level" in rows:
        raised = raised * (rows["level"][:, None] + rows["slope"][:, None] * below)
    else:
        out["total"] = out["total"] + jnp.sum(raised, axis=1)
        if problem.entropy:
            out["weighted"] = out["weighted"] + jnp.sum(raised * below, axis=1)
    raised = raised.astype(powers.dtype)
    if powers.shape[1] < vocab:
        return out | {"powers": jnp.concatenate([powers, raised], axis=1)}
    start = vocab - raised.shape[1]
    return out | {"powers": lax.dynamic_update_slice_in_dim(powers, raised, start, 1)}


def _kernel(problem: Problem, tiles: hopper.Tiles, max_runs: int):
    """hopper.softmax_statistics on this device; under vmap, one member after the other."""
    device = _interpreted or Device(getattr(jax.devices()[0], "core_count", 132))

    @sequential_vmap
    def run(x: Array, weights: Array, values: Rows) -> Rows:
        vocab = problem.vocab(weights)
        whole = vocab // tiles.tile_n * tiles.tile_n
        # Copies a head with an odd vocabulary: the copy unit takes whole tiles of 8 rows, or of 64 columns.
        if problem.vocab_major and vocab % hopper.ALIGN_ROWS:
            weights = weights[:whole]
        elif not problem.vocab_major and vocab % hopper.ALIGN:
            weights = weights[:, :whole]
        return hopper.softmax_statistics(
            x,
            weights,
            **values,
            vocab_major=problem.vocab_major,
            entropy=problem.entropy,
            tiles=tiles,
            max_runs=max_runs,
            multiprocessors=device.multiprocessors,
            interpret=device.interpret,
        )

    return run


def rest_logits(problem: Problem, x: Array, head: Array, tiles: hopper.Tiles) -> Array | None:
    """Logits of the columns after the last whole tile, without the temperature."""
    vocab = problem.vocab(head)
    rest = vocab % tiles.tile_n
    if not rest:
        return None
    if problem.vocab_major:
        return product("TD,VD->TV", x, head[vocab - rest :])
    return product("TD,DV->TV", x, head[:, vocab - rest :])


def _padded(values: Array, padding: int) -> Array:
    """With rows of zeros at the end."""
    if not padding:
        return values
    return jnp.pad(values, [(0, padding)] + [(0, 0)] * (values.ndim - 1))


def _with_rest(parts: Rows, logits: Array) -> Rows:
    """One more run: the columns that no tile covers."""
    highest = jnp.max(logits, axis=1)
    below = logits - highest[:, None]
    powers = jnp.exp(below)
    more = {
        "highest": highest,
        "total": jnp.sum(powers, axis=1),
        "weighted": jnp.sum(powers * below, axis=1),
    }
    return {name: jnp.concatenate([parts[name], more[name][None]]) for name in parts}
