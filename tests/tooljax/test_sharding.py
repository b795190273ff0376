import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from random_decoder import random_decoder

from tolerance import tol
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.sharding import RULES, make_layout, make_mesh, named_sharding, shardings

CONFIG = DecoderConfig(
    family="llama",
    vocab=32,
    embed=16,
    layers=2,
    q_heads=8,
    kv_heads=4,
    head_dim=4,
    ffw=32,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied_head=False,
    max_positions=64,
    dtype="float32",
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(CONFIG)


def run(graph, params: nnx.State, *rows: jax.Array) -> jax.Array:
    return nnx.merge(graph, params).logits(*rows)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"fsdp": 8},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"tensor": 4, "context": 2},
    ],
)
def test_sharded_logits_equal_unsharded(decoder: Decoder, sizes: dict[str, Any]):
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab, (8, 6)), jnp.int32)
    positions = jnp.broadcast_to(jnp.asarray([0, 1, 2, 0, 1, 2], jnp.int32)[None], tokens.shape)
    segments = jnp.broadcast_to(jnp.asarray([1, 1, 1, 2, 2, 2], jnp.int32)[None], tokens.shape)
    graph, params = nnx.split(decoder)
    expected = jax.jit(run, static_argnums=0)(graph, params, tokens, positions, segments)

    mesh = make_mesh(**sizes)
    placed = jax.device_put(params, shardings(params, mesh))
    rows = jax.device_put(
        (tokens, positions, segments), named_sharding(("batch", "time"), mesh, shape=tokens.shape)
    )
    logits = jax.jit(run, static_argnums=0)(graph, placed, *rows)
    assert len(logits.sharding.device_set) == 8
    np.testing.assert_allclose(logits, expected, **tol(jnp.float32, reduced=100))


def test_data_takes_the_devices_that_are_left():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1, "context": 1}
    assert dict(make_mesh(tensor=2).shape) == {"data": 4, "fsdp": 1, "tensor": 2, "context": 1}
    two = make_mesh(devices=jax.devices()[:2])
    assert list(two.devices.flat) == jax.devices()[:2]


def test_numbers_without_a_rest_take_as_many_devices():
    assert list(make_mesh(data=1, fsdp=2).devices.flat) == jax.devices()[:2]
    assert make_layout(data=1).mesh is None
    assert make_layout(data=1, fsdp=-1, attention="plain").ways("batch") == 8


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"tensor": 3},
            "mesh.data=-1 x mesh.fsdp=1 x mesh.tensor=3 x mesh.context=1: 8 cpu devices do not divide by the 3 that "
            "the other axes take, so mesh.data=-1 has no value; choose sizes whose product is one of [1, 2, 4, 8]",
        ),
        (
            {"data": 2, "fsdp": 8},
            "mesh.data=2 x mesh.fsdp=8 x mesh.tensor=1 x mesh.context=1 takes 16 devices, but there are 8 cpu devices; "
            "lower a size, or set one axis to -1 for all that the others leave",
        ),
        ({"fsdp": -1}, "at most one is -1; change mesh.fsdp"),
        ({"context": 0}, "sizes are 1 or more, and at most one is -1; change mesh.context"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make_mesh(**sizes)


def test_several_hosts_use_all_devices():
    two_hosts = [SimpleNamespace(process_index=i // 4, platform="tpu") for i in range(8)]
    with pytest.raises(ValueError, match=r"takes 4 of 8 tpu devices, but a run on several hosts"):
        make_mesh(data=4, devices=two_hosts)


def test_weights_are_placed_by_their_logical_axes(decoder: Decoder):
    placed = shardings(nnx.state(decoder, nnx.Param), make_mesh(data=2, fsdp=2, tensor=2))
    # [vocab embed], [layer embed kv_heads head_dim], [layer ffw embed], [embed]
    assert placed["embedding"].get_value().spec == PartitionSpec("tensor", "fsdp")
    assert placed["layers"]["wk"].get_value().spec == PartitionSpec(None, "fsdp", "tensor")
    assert placed["layers"]["w_down"].get_value().spec == PartitionSpec(None, "tensor", "fsdp")
    assert placed["final_norm"].get_value().spec == PartitionSpec("fsdp")


def test_abstract_weights_are_enough():
    abstract = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    mesh = make_mesh(fsdp=8)
    placed = shardings(nnx.state(abstract, nnx.Param), mesh)
    assert placed["head"].get_value() == named_sharding(("vocab", "embed"), mesh)


def test_a_batch_is_split_over_data_and_fsdp():
    mesh = make_mesh(data=2, fsdp=2, context=2)
    rows = jax.device_put(jnp.zeros((8, 6)), named_sharding(("batch", "time"), mesh))
    assert rows.addressable_shards[0].data.shape == (2, 3)


def test_one_mesh_axis_cannot_split_two_axes_of_an_array():
    rules = dict(RULES) | {"head_dim": ("tensor",)}
    message = "wq: mesh axis 'tensor' would split both 'q_heads' and 'head_dim'; change the rule"
    with pytest.raises(ValueError, match=message):
        named_sharding(("q_heads", "head_dim"), make_mesh(tensor=2), rules=rules, what="wq")
    # An axis of one device splits nothing.
    named_sharding(("q_heads", "head_dim"), make_mesh(), rules=rules)


def test_sizes_that_do_not_divide_are_named():
    narrow = dataclasses.replace(CONFIG, q_heads=6, kv_heads=3)
    message = re.escape(
        "layers.wk: kv_heads=3 does not divide over mesh axes tensor=2; choose sizes whose product is one of [1]"
    )
    with pytest.raises(ValueError, match=message):
        shardings(nnx.state(random_decoder(narrow), nnx.Param), make_mesh(tensor=2))


def test_few_key_heads_and_an_odd_vocabulary_stay_whole():
    mesh = make_mesh(tensor=8)
    odd = random_decoder(dataclasses.replace(CONFIG, vocab=33))
    placed = shardings(nnx.state(odd, nnx.Param), mesh)
    # Of four key heads each of eight devices has all, as of 33 words; of eight query heads it has one.
    assert placed["layers"]["wk"].get_value().spec == PartitionSpec()
    assert placed["embedding"].get_value().spec == PartitionSpec()
    assert placed["layers"]["wq"].get_value().spec == PartitionSpec(None, None, "tensor")


def test_an_axis_without_a_rule_is_named():
    with pytest.raises(ValueError, match="array: logical axis 'expert' has no rule; known are"):
        named_sharding(("expert",), make_mesh())
