"""Attention of branches to their trunk: every way to compute it against a float64 loop over pairs, with gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import inputs, slow

from tolerance import tol
from tooljax.model import (
    attention,
    attention_blockwise,
    attention_cudnn,
    attention_splash,
    attention_trunks,
)
from tooljax.model.attention_trunks import Kernel, Spans, merged, own_spans, trunk_spans
from tooljax.model.flops import visible_pairs

TIME = 128


def rows(*given: list, time: int = TIME) -> tuple[np.ndarray, np.ndarray]:
    """Segment and trunk ids of rows: a number is a segment of so many tokens, a tuple a trunk and its branches."""
    segments, trunks = (np.zeros((len(given), time), np.int32) for _ in range(2))
    for r, row in enumerate(given):
        start, segment = 0, 0
        for part in row:
            trunk = segment + 1
            for n in part if isinstance(part, tuple) else (part,):
                segment += 1
                segments[r, start : start + n] = segment
                trunks[r, start : start + n] = trunk
                start += n
    return segments, trunks


ROWS = rows([(20, 7, 30, 1), 9, (5, 20, 10, 3)], [40, (33, 50, 2)], [60, 8])


def dense_forward(q, k, v, spans: Spans, causal: bool):
    """As cuDNN, with what it does not write to set to NaN."""
    seen, at, inside = _dense(spans, q.shape[1], causal)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    logs = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - jnp.where(jnp.isfinite(logs), logs, 0)[..., None])
    out = jnp.where(inside[..., None, None], jnp.einsum("BNTS,BSNH->BTNH", p, v), jnp.nan)
    stats = jnp.full((spans.q_lengths.size, q.shape[2], q.shape[1]), jnp.nan)
    return out, stats.at[at[0], :, at[1]].set(jnp.moveaxis(logs, 1, 2), mode="drop")


def dense_backward(q, k, v, spans: Spans, causal: bool, out, stats, d_out):
    seen, at, inside = _dense(spans, q.shape[1], causal)
    logs = jnp.moveaxis(jnp.where(inside[..., None], stats[at[0], :, at[1]], 0.0), 2, 1)
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * scale
    p = jnp.where(seen[:, None], jnp.exp(scores - logs[..., None]), 0.0)
    dp = jnp.einsum("BTNH,BSNH->BNTS", d_out, v)
    delta = jnp.moveaxis((d_out * out).sum(-1), 2, 1)[..., None]
    ds = p * (dp - delta) * scale
    k_inside = seen.any(axis=1)[..., None, None]
    grads = (
        jnp.where(inside[..., None, None], jnp.einsum("BNTS,BSNH->BTNH", ds, k), jnp.nan),
        jnp.where(k_inside, jnp.einsum("BNTS,BTNH->BSNH", ds, q), jnp.nan),
        jnp.where(k_inside, jnp.einsum("BNTS,BTNH->BSNH", p, d_out), jnp.nan),
    )
    return grads


def _dense(spans: Spans, time: int, causal: bool):
    """Pairs that are seen, where each query's log is, and whether it has one: written from the contract of Spans."""
    q_lengths, k_lengths, q_starts, k_starts = (x[:, : spans.q_lengths.shape[1]] for x in spans)
    of_q, of_k = (
        jnp.arange(time)[None, None] - starts[..., None] for starts in (q_starts, k_starts)
    )
    q_in, k_in = (
        (at >= 0) & (at < n[..., None]) for at, n in ((of_q, q_lengths), (of_k, k_lengths))
    )
    pairs = q_in[..., None] & k_in[:, :, None]
    if causal:
        pairs &= of_q[..., None] >= of_k[:, :, None]
    known = (q_lengths >= 0).reshape(-1)
    number = jnp.where(known, jnp.cumsum(known) - 1, 0).reshape(q_lengths.shape)
    inside = q_in.any(axis=1)
    rank = jnp.where(inside, jnp.where(q_in, number[..., None], 0).sum(axis=1), known.size)
    return pairs.any(axis=1), (rank, jnp.where(q_in, of_q, 0).sum(axis=1)), inside


def two_passes(q, k, v, q_segments, k_segments, first, *, dtype, q_trunks):
    """As for cuDNN, in float32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    spans = own_spans(q_segments, 16), trunk_spans(q_segments, q_trunks, 16)
    inside = (q_segments != 0)[..., None, None]
    out: Any = merged(Kernel(dense_forward, dense_backward), q, k, v, *spans)
    return jnp.where(inside, out, jnp.zeros((), out.dtype))


@pytest.mark.parametrize("compute", [
    attention.plain,
    attention_blockwise.attend,
    partial(attention_splash.attend, interpret=True),
    two_passes,
], ids=["plain", "blockwise", "splash", "two passes"])  # fmt: skip
def test_output_and_gradients_equal_a_slow_float64_reference(compute, monkeypatch):
    monkeypatch.setattr(attention_blockwise, "BLOCK", 32)
    segments, trunks = (jnp.asarray(x) for x in ROWS)
    q, k, v, d_out = inputs(ROWS[0], 4, 2, 8)

    @jax.jit
    def both(q, k, v, d_out):
        more = {"dtype": jnp.dtype(jnp.float32), "q_trunks": trunks}
        out, pull = jax.vjp(lambda *x: compute(*x, segments, segments, 0, **more), q, k, v)
        return [out, *pull(d_out)]

    names = ("out", "dq", "dk", "dv")
    for what, found, expected in zip(
        names, both(q, k, v, d_out), slow(ROWS[0], q, k, v, d_out, ROWS[1]), strict=True
    ):
        np.testing.assert_allclose(
            found, expected, err_msg=what, **tol(np.float32, reduced=TIME, gradient=what != "out")
        )


def test_a_branch_sees_its_trunk_and_itself():
    segments, trunks = rows([(2, 2, 1), 2], time=8)
    drawing = """
        1 . . . . . . .
        1 1 . . . . . .
        1 1 1 . . . . .
        1 1 1 1 . . . .
        1 1 . . 1 . . .
        . . . . . 1 . .
        . . . . . 1 1 .
        . . . . . . . .
    """
    wanted = [[c == "1" for c in line.split()] for line in drawing.split("\n") if line.strip()]
    mask = attention.segment_mask(jnp.asarray(segments), jnp.asarray(trunks))
    np.testing.assert_array_equal(mask[0], wanted)
    # The trunk's own 3, 3 and 2 x 2 of a branch, 1 and 1 x 2 of the other, and 3.
    assert visible_pairs(segments, trunks) == int(mask.sum()) == 16


def test_spans_by_hand():
    segments, trunks = (jnp.asarray(x) for x in rows([2, (3, 1, 2)], [(1, 2, 1)], time=8))
    own = own_spans(segments, 6)
    assert own.q_lengths.tolist() == [[2, 3, 1, 2, -1, -1], [1, 2, 1, -1, -1, -1]]
    assert own.k_starts.tolist() == [[0, 2, 5, 6, -1, -1, -1], [0, 1, 3, -1, -1, -1, -1]]
    shared = trunk_spans(segments, trunks, 6)
    assert shared.q_lengths.tolist() == [[3, -1], [3, -1]]
    assert shared.k_lengths.tolist() == [[3, -1], [1, -1]]
    assert shared.q_starts.tolist() == [[5, -1, -1], [1, -1, -1]]
    assert shared.k_starts.tolist() == [[2, -1, -1], [0, -1, -1]]
    (rank, index), inside = attention_trunks._places(own.q_lengths, own.q_starts, 8)
    assert jnp.where(inside, rank, -1).tolist() == [
        [0, 0, 1, 1, 1, 2, 3, 3],
        [4, 5, 5, 6] + [-1] * 4,
    ]
    assert jnp.where(inside, index, -1).tolist()[0] == [0, 1, 0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("where", ["all", "one"])
def test_cudnn_gets_what_its_kernels_take(where, monkeypatch):
    """Traced and lowered for NVIDIA GPUs, with the private module's own checks: the numbers need a card."""
    cudnn = attention_cudnn._cudnn
    if cudnn is None:
        pytest.skip("this JAX has moved the private module")
    monkeypatch.setattr(attention_cudnn, "_packed", lambda layout: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    wide, narrow = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (4, 2))
    trunks = ids if where == "all" else None

    def loss(q, k, v, ids, trunks):
        dtype = jnp.dtype(jnp.bfloat16)
        out = attention_cudnn.attend(q, k, v, ids, ids, 0, dtype=dtype, q_trunks=trunks)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(wide, narrow, narrow, ids, trunks)
    text = str(traced.jaxpr)
    passes = 2 if trunks is not None else 1
    assert text.count("dot_product_attention_fwd_wrapper[") == passes
    assert text.count("dot_product_attention_bwd_wrapper[") == passes


@pytest.mark.gpu
@pytest.mark.parametrize("given", [
    [[(200, 70, 300, 1), 90, (50, 200, 100, 3)], [400, (330, 50, 20)], [60, 8]],
    [[60, 8], [1000]],
], ids=["trunks", "none"])  # fmt: skip
def test_cudnn_equals_the_slow_reference(given):
    segments, trunks = rows(*given, time=1024)
    q, k, v, d_out = (jnp.asarray(x, jnp.bfloat16) for x in inputs(segments, 4, 2, 64))
    wide = [np.asarray(x, np.float64) for x in (q, k, v, d_out)]
    expected = slow(segments, *wide, trunks=trunks)

    @jax.jit
    def both(q, k, v, d_out):
        compute: Any = partial(attention_cudnn.attend, dtype=jnp.dtype(jnp.bfloat16))
        ids, on_device = jnp.asarray(segments), jnp.asarray(trunks)
        out, pull = jax.vjp(
            lambda q, k, v: compute(q, k, v, ids, ids, 0, q_trunks=on_device), q, k, v
        )
        return [out, *pull(d_out)]

    for found, wanted in zip(both(q, k, v, d_out), expected, strict=True):
        # bfloat16 keeps 8 bits of q, k, v, probabilities and results.
        error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
        assert error < 1e-2 * np.linalg.norm(wanted)
