"""Rematerialisation by name: equal losses and gradients, and what each finds of the forward pass."""

from functools import cache, partial
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tolerance import tol
from tooljax.config.types import Remat
from tooljax.model import remat as remat_module
from tooljax.model.attention import segment_attention
from tooljax.model.decoder import Decoder, DecoderConfig, block, rotary
from tooljax.model.remat import check_remat, rematerialised
from tooljax.sharding import ONE_DEVICE, Layout, make_layout

CONFIG = DecoderConfig(
    family="qwen3", vocab=16, embed=16, layers=4, q_heads=2, kv_heads=2, head_dim=8, ffw=64,
    rope_theta=1e4, norm_eps=1e-6, tied_head=True, max_positions=128, qk_norm=True, dtype="float32",
)  # fmt: skip
TIME = 64
BLOCKWISE = Layout(None, "blockwise")
NAMES = get_args(Remat)


@cache
def compiled(remat: Remat, layout: Layout = BLOCKWISE) -> Any:
    """Of the sum of sines of the hidden states: its value and gradient."""
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    graph, params = nnx.split(decoder)

    def loss(params: Any, tokens: Any) -> Any:
        decoder = nnx.merge(graph, params)
        decoder.layout = layout
        positions = jnp.broadcast_to(jnp.arange(TIME), tokens.shape)
        return jnp.sum(jnp.sin(decoder.hidden(tokens, positions, positions // 48 + 1, remat=remat)))

    tokens = jax.random.randint(jax.random.key(1), (2, TIME), 0, 16)
    program = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
    return program, program(params, tokens)


@pytest.mark.parametrize("remat", [name for name in NAMES if name != "none"])
@pytest.mark.usefixtures("quick_compilations")
def test_values_and_gradients_are_those_of_keeping_everything(remat):
    (value, gradient), (kept, expected) = (compiled(r)[1] for r in (remat, "none"))
    assert float(value) == pytest.approx(float(kept), rel=1e-6)
    for found, wanted in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert np.abs(wanted).max() > 1e-2
        np.testing.assert_allclose(found, wanted, **tol(jnp.float32, 100, gradient=True))


@pytest.mark.parametrize("remat", ["attention", "offload"])
@pytest.mark.usefixtures("quick_compilations")
def test_so_they_are_on_a_mesh(remat):
    layout = make_layout(data=1, fsdp=2, tensor=2, attention="blockwise")
    value, gradient = compiled(remat, layout)[1]
    kept, expected = compiled("none")[1]
    assert float(value) == pytest.approx(float(kept), rel=1e-5)
    for found, wanted in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_memory_falls_from_none_to_full():
    temporaries = {
        remat: compiled(remat)[0].memory_analysis().temp_size_in_bytes
        for remat in ("none", "dots", "full")
    }
    assert temporaries["none"] > temporaries["dots"] > temporaries["full"], temporaries
    names = ("none", "dots_attention", "dots", "attention", "full")
    kept = [sum(map(np.prod, residuals(remat))) for remat in names]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0


def residuals(remat: Remat, attention: str = "blockwise") -> list[tuple[int, ...]]:
    """Shapes of what the backward pass of one layer finds, beside the layer's arguments."""
    layout = Layout(None, attention)
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    params = {name: w[0] for name, w in decoder.layers.stacked().items()}
    positions = jnp.arange(TIME)[None]
    segments = positions // 48 + 1
    attend = segment_attention(segments, layout, jnp.dtype("float32"))
    cos, sin = rotary(CONFIG, positions)
    layer = partial(block, CONFIG, cos=cos, sin=sin, attend=attend, layout=layout)
    x = jnp.ones((1, TIME, CONFIG.embed))
    _, backward = jax.vjp(rematerialised(layer, layout, remat), params, x)
    given = {id(leaf) for leaf in jax.tree.leaves((params, x, cos, sin, segments))}
    found = [leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in given]
    return [leaf.shape for leaf in found if leaf.dtype == jnp.float32]  # not the list of blocks


def test_attention_finds_its_output_and_the_log_of_its_denominator():
    # [batch time key_heads heads_of_a_key_head head_dim] and [batch key_heads heads_of_a_key_head time]
    assert sorted(residuals("attention")) == [(1, 2, 1, TIME), (1, TIME, 2, 1, 8)]
    assert residuals("attention", "plain") == [(1, TIME, 2, 8)]


def test_dots_finds_products_with_weights():
    # q, k, v [tokens heads head_dim]; the output of wo [tokens embed]; gate and up [tokens ffw]. Not w_down's: no
    # gradient needs it.
    assert sorted(residuals("dots")) == [*[(TIME, 2, 8)] * 3, (TIME, 16), *[(TIME, 64)] * 2]


def test_dots_attention_finds_both():
    assert sorted(residuals("dots_attention")) == sorted(residuals("dots") + residuals("attention"))


def test_cudnn_results_are_found_by_the_name_of_their_operation():
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    policy = remat_module._attention_saveable
    assert policy(fused._dot_product_attention_fwd_p_wrapper, layout=4)
    assert not policy(fused._dot_product_attention_bwd_p_wrapper, layout=4)


class Elsewhere(Layout):
    """On a device without the host's memory."""

    @property
    def device(self) -> Any:
        memory = [SimpleNamespace(kind="device"), SimpleNamespace(kind="unpinned_host")]
        return SimpleNamespace(platform="abacus", addressable_memories=lambda: memory)


def test_what_a_backend_cannot_is_refused():
    with pytest.raises(
        ValueError,
        match=r"model.remat='offload' keeps arrays in pinned host memory, which abacus devices with this version of "
        r"JAX do not have \(they have device, unpinned_host\); choose 'dots' or 'full'",
    ):
        check_remat("offload", Elsewhere())
    with pytest.raises(ValueError, match=r"model.remat='some' is unknown; choose one of \['none'"):
        check_remat("some", ONE_DEVICE)
