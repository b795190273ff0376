"""The update on meshes of several devices: on every mesh the log-probs, loss and gradients of one device."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from random_decoder import random_decoder
from update_cases import gradient, new_items, new_updater

from tooljax.batch import TrainBatch, pack
from tooljax.model.decoder import DecoderConfig
from tooljax.sharding import ONE_DEVICE, Layout, make_layout

pytestmark = pytest.mark.usefixtures("quick_compilations")

CONFIG = DecoderConfig(
    family="qwen3",
    vocab=24,
    embed=8,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=4,
    ffw=16,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tied_head=False,
    max_positions=64,
    qkv_bias=True,
    qk_norm=True,
    dtype="float32",
)

MESHES = [
    ({"data": 2}, 4),
    ({"fsdp": 4}, 8),
    ({"tensor": 2}, 2),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 4),
    ({"fsdp": 2, "tensor": 2, "context": 2}, 8),
]
"""Sizes of mesh axes, and rows of a microbatch: eight rows are cut into one, two or four of them."""


def layout(sizes: dict[str, int], **settings) -> Layout:
    return make_layout(**{"data": 1} | sizes, **settings)


@cache
def params(config: DecoderConfig = CONFIG) -> nnx.State:
    return nnx.split(random_decoder(config))[1]


def updater(place: Layout = ONE_DEVICE, config: DecoderConfig = CONFIG, **changes):
    graphdef, _ = nnx.split(random_decoder(config))
    return new_updater(graphdef=graphdef, layout=place, kl_coef=0.5, **changes)


@cache
def batch() -> TrainBatch:
    """Eight rows of 1, 2, 3, 4, 4, 1, 0 and 0 loss tokens, the last one padding: devices have unequal shares."""
    made = pack(new_items((1, 2, 3, 4, 4, 1, 0)), row_lengths=(16,), rows_multiple=8)
    rng = np.random.default_rng(1)
    noise = [rng.uniform(-4, -2, made.tokens.shape).astype(np.float32) for _ in range(2)]
    old, ref = (np.where(made.loss_mask, x, np.float32(0)) for x in noise)
    return made.with_log_probs(old=old, ref=ref)


@cache
def on_one_device(config: DecoderConfig = CONFIG):
    one, weights = updater(config=config, rows_per_microbatch=8), params(config)
    _, metrics = one.update(one.init(weights), batch())
    return one.log_probs(weights, batch()), gradient(one, weights, batch()), metrics


def checked_update(config: DecoderConfig, sizes: dict[str, int], rows: int):
    """Metrics and gradients are those of one device; the updater and the state."""
    _, gradients, metrics = on_one_device(config)
    spread = updater(layout(sizes), config, rows_per_microbatch=rows)
    state, found = spread.update(spread.init(params(config)), batch())
    mu = {
        jax.tree_util.keystr(path): np.array(value) / 0.1
        for path, value in jax.tree_util.tree_leaves_with_path(state.opt_state.mu)
    }
    for name, expected in gradients.items():
        largest = np.abs(expected).max()
        assert largest > 1e-3, name
        np.testing.assert_allclose(mu[name], expected, rtol=1e-5, atol=1e-5 * largest)
    assert found == pytest.approx(metrics, rel=1e-5)
    return spread, state


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {"tensor": 4, "context": 2}),
        ({"vocab": 25, "tied_head": True}, {"fsdp": 2, "tensor": 4}),
    ],
    ids=str,
)
def test_fewer_key_heads_than_devices_and_an_odd_vocabulary_are_shared(changes, sizes):
    config = replace(CONFIG, **changes)
    _, state = checked_update(config, sizes, rows=8)
    wk, embedding = state.params["layers"]["wk"][...], state.params["embedding"][...]
    # Each device has all heads; all of the vocabulary where it does not divide.
    heads = 1 if config.kv_heads % sizes["tensor"] else sizes["tensor"]
    assert wk.addressable_shards[0].data.shape[2] == config.kv_heads // heads
    parts = 1 if config.vocab % sizes["tensor"] else sizes["tensor"]
    assert embedding.addressable_shards[0].data.shape[0] == config.vocab // parts


@pytest.mark.parametrize(("sizes", "rows"), MESHES, ids=str)
def test_every_mesh_and_cut_gives_the_update_of_one_device(sizes, rows):
    log_probs = on_one_device()[0]
    spread, state = checked_update(CONFIG, sizes, rows)
    # What was sampled comes back whole, in the rows of the batch.
    seen = np.concatenate([one.log_probs for one in spread.seen if one is not None])
    np.testing.assert_allclose(seen, log_probs[: len(seen)], rtol=1e-5, atol=1e-6)
    if sizes.keys() == {"data", "fsdp", "tensor"}:  # the others would only be more compilations
        logged = spread.log_probs(params(), batch())
        np.testing.assert_allclose(logged, log_probs, rtol=1e-5, atol=1e-6)
    # And the state stays in its parts, so that the next update compiles nothing.
    places = spread.placement(state)
    for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True):
        assert leaf.sharding == place
    assert spread._accumulate["grpo"]._cache_size() == 1
    spread.update(state, batch())
    assert spread._accumulate["grpo"]._cache_size() == 1


def test_weights_and_moments_are_stored_in_parts():
    spread = updater(layout({"data": 2, "fsdp": 2, "tensor": 2}), rows_per_microbatch=8)
    state = spread.init(params())
    for tree in (state.params, state.opt_state.mu, state.opt_state.nu):
        wq = tree["layers"]["wq"][...]
        assert wq.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
        assert wq.addressable_shards[0].data.shape == (2, 4, 2, 4)
    assert state.params["final_norm"][...].addressable_shards[0].data.shape == (4,)


def test_rows_that_cannot_be_spread_are_refused():
    message = (
        "batch.rows_per_microbatch=6 does not divide over the 4 devices of mesh axes data x fsdp; "
        "set it to a multiple"
    )
    with pytest.raises(ValueError, match=message):
        updater(layout({"data": 2, "fsdp": 2}), rows_per_microbatch=6)
