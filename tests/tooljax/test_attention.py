"""Every way to compute attention against a float64 loop over pairs, with gradients; and the choice between them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tolerance import tol
from tooljax.model import attention, attention_blockwise, attention_cudnn, attention_splash
from tooljax.sharding import Layout, make_mesh

ATTEND = {
    "plain": attention.plain,
    "blockwise": attention_blockwise.attend,
    "splash": partial(attention_splash.attend, interpret=True),
}


def segments(*rows: tuple[int, ...], time: int) -> np.ndarray:
    """Segments of these lengths in each row, then padding."""
    out = np.zeros((len(rows), time), np.int32)
    for row, lengths in zip(out, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return out


def inputs(ids: np.ndarray, q_heads: int, kv_heads: int, head_dim: int) -> list[np.ndarray]:
    """q, k, v and a cotangent of the output."""
    rng = np.random.default_rng(0)
    shape = (*ids.shape, q_heads, head_dim)
    narrow = (*ids.shape, kv_heads, head_dim)
    return [rng.normal(size=s).astype(np.float32) for s in (shape, narrow, narrow, shape)]


def slow(ids: np.ndarray, q, k, v, d_out, trunks: np.ndarray | None = None) -> list[np.ndarray]:
    """Output, dq, dk and dv in float64: softmax row by row, its derivative by hand."""
    trunks = ids if trunks is None else trunks
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(*q.shape[:3]):
        mine = {int(ids[b, t]), int(trunks[b, t])} - {0}
        seen = [s for s in range(t + 1) if ids[b, s] in mine]
        if not seen:
            continue
        keys, values = k[b, seen, n // group], v[b, seen, n // group]
        scores = keys @ q[b, t, n] * scale
        p = np.exp(scores - scores.max())
        p /= p.sum()
        out[b, t, n] = p @ values
        dp = values @ d_out[b, t, n]
        ds = p * (dp - p @ dp) * scale
        dq[b, t, n] = ds @ keys
        dk[b, seen, n // group] += np.outer(ds, q[b, t, n])
        dv[b, seen, n // group] += np.outer(p, d_out[b, t, n])
    return [out, dq, dk, dv]


@pytest.mark.parametrize(("name", "time", "head_dim"), [
    ("plain", 12, 4),
    ("blockwise", 12, 4),
    ("blockwise", 96, 8),
    ("splash", 128, 8),
])  # fmt: skip
def test_output_and_gradients_equal_a_slow_float64_reference(name, time, head_dim, monkeypatch):
    # Blocks of 32: three each way for 96 tokens.
    monkeypatch.setattr(attention_blockwise, "BLOCK", 32)
    ids = segments((5, time // 2, 1), (time // 3, time // 3), time=time)
    q, k, v, d_out = inputs(ids, 4, 2, head_dim)
    compute = partial(ATTEND[name], dtype=jnp.dtype(jnp.float32))

    @jax.jit
    def both(q, k, v, d_out):
        on_device = jnp.asarray(ids)
        out, pull = jax.vjp(lambda q, k, v: compute(q, k, v, on_device, on_device, 0), q, k, v)
        return [out, *pull(d_out)]

    names = ("out", "dq", "dk", "dv")
    for what, found, expected in zip(
        names, both(q, k, v, d_out), slow(ids, q, k, v, d_out), strict=True
    ):
        np.testing.assert_allclose(
            found, expected, err_msg=what, **tol(np.float32, reduced=time, gradient=what != "out")
        )


def test_queries_of_a_later_part_of_the_row_see_the_keys_before_them(monkeypatch):
    monkeypatch.setattr(attention_blockwise, "BLOCK", 8)
    ids = segments((6, 17), time=24)[:1]
    ids = np.concatenate([ids, segments((24,), time=24)])
    q, k, v, d_out = inputs(ids, 2, 2, 4)
    expected = slow(ids, q, k, v, d_out)[0]
    for compute in (attention.plain, attention_blockwise.attend):
        found = jax.jit(partial(compute, dtype=jnp.dtype(jnp.float32)))(
            q[:, 16:], k, v, ids[:, 16:], ids, jnp.int32(16)
        )
        np.testing.assert_allclose(found, expected[:, 16:], **tol(np.float32, reduced=24))


def test_blockwise_never_holds_all_scores_of_a_row():
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    heads = jax.ShapeDtypeStruct((1, 8192, 2, 8), jnp.float32)
    compute = partial(attention_blockwise.attend, dtype=jnp.dtype(jnp.float32))

    def loss(q, k, v, ids):
        return compute(q, k, v, ids, ids, 0).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(heads, heads, heads, ids).compile()
    memory = compiled.memory_analysis()
    # One head's scores would take 8192**2 * 4 bytes = 256 MiB.
    assert memory is not None
    assert memory.temp_size_in_bytes < 32 << 20


def test_the_choice_depends_on_platform_and_row_length():
    def shapes(time: int, dtype=jnp.float32, head_dim: int = 64):
        return [jax.ShapeDtypeStruct((1, time, n, head_dim), dtype) for n in (4, 2)]

    here = Layout()
    assert attention.chosen(here, *shapes(1024)) == "plain"
    assert attention.chosen(here, *shapes(4096)) == "blockwise"
    # No divisor between 64 and 512.
    assert attention.chosen(here, *shapes(2 * 1031)) == "plain"
    assert attention.chosen(Layout(attention="blockwise"), *shapes(64)) == "blockwise"
    message = (
        "attention='splash' cannot serve: it needs TPUs, not cpu; set model.attention = 'auto'"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        attention.chosen(Layout(attention="splash"), *shapes(1024))
    with pytest.raises(ValueError, match="attention='flash' is unknown; choose one of"):
        attention.chosen(Layout(attention="flash"), *shapes(1024))


def test_what_kernels_cannot_do_is_said(monkeypatch):
    q, k = (jax.ShapeDtypeStruct((1, 1000, n, 64), jnp.float32) for n in (4, 2))
    assert attention_cudnn.reason_not(Layout(), q, k) == "it needs NVIDIA GPUs, not cpu"
    monkeypatch.setattr(Layout, "platform", "gpu")
    assert attention_cudnn.reason_not(Layout(), q, k) == "it computes in bfloat16, not float32"
    monkeypatch.setattr(Layout, "platform", "tpu")
    assert (
        attention_splash.reason_not(Layout(), q, k) == "a row length of 1000 is no multiple of 128"
    )
    split = Layout(make_mesh(context=2))
    assert attention_splash.reason_not(split, q, k) == "mesh.context splits the time axis"


@pytest.mark.gpu
@pytest.mark.parametrize("time", [256, 2048])
def test_cudnn_equals_the_slow_reference(time):
    ids = segments((5, time // 2, 1), (time // 3, time // 3), time=time)
    q, k, v, d_out = (jnp.asarray(x, jnp.bfloat16) for x in inputs(ids, 4, 2, 64))
    expected = slow(ids, *(np.asarray(x, np.float64) for x in (q, k, v, d_out)))

    @jax.jit
    def both(q, k, v, d_out):
        compute = partial(attention_cudnn.attend, dtype=jnp.dtype(jnp.bfloat16))
        on_device = jnp.asarray(ids)
        out, pull = jax.vjp(lambda q, k, v: compute(q, k, v, on_device, on_device, 0), q, k, v)
        return [out, *pull(d_out)]

    for found, wanted in zip(both(q, k, v, d_out), expected, strict=True):
        # bfloat16 keeps 8 bits of q, k, v, probabilities and results.
        error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
        assert error < 1e-2 * np.linalg.norm(wanted)
