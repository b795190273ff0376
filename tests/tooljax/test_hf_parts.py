"""Weights read part by part: values, and how much of them a host holds meanwhile."""

import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from random_decoder import random_decoder

from tooljax.model import hf, hf_parts
from tooljax.model.decoder import DecoderConfig
from tooljax.sharding import RULES, make_mesh, shardings

CONFIG = DecoderConfig(
    family="qwen3",
    vocab=1024,
    embed=32,
    layers=4,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    ffw=512,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_head=False,
    max_positions=256,
    qkv_bias=True,
    qk_norm=True,
    dtype="float32",
)


def _index(place: NamedSharding, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """What one of the eight devices has of an array."""
    index = place.addressable_devices_indices_map(shape)[jax.devices()[5]]
    assert index is not None
    return index


HEADS = RULES
INSIDE_HEADS = dict(RULES) | {"q_heads": (), "kv_heads": (), "head_dim": ("tensor",)}
"""Splits the inner one of two axes that are one in a checkpoint."""


@pytest.mark.parametrize("rules", [HEADS, INSIDE_HEADS], ids=["heads", "inside heads"])
def test_what_is_read_for_a_device_is_its_part_and_one_tensor(rules, tmp_path: Path):
    whole = random_decoder(CONFIG)
    path = hf.save(whole, tmp_path / "model")
    mesh = make_mesh(fsdp=2, tensor=2)
    params = nnx.state(whole, nnx.Param)
    places = dict(nnx.to_flat_state(shardings(params, mesh, rules=rules)))
    with ExitStack() as files:
        tensors = hf._open(path, whole.cfg, files)
        largest = max(4 * int(np.prod(shape)) for shape in hf.tensor_names(whole.cfg).values())
        flat = dict(nnx.to_flat_state(params))
        wanted = {
            key: (param.shape, np.dtype(np.float32), _index(places[key].get_value(), param.shape))
            for key, param in flat.items()
        }
        tracemalloc.start()
        parts = {key: hf_parts.read_part(tensors, key, *what) for key, what in wanted.items()}
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    for key, param in flat.items():
        np.testing.assert_array_equal(
            parts[key], np.asarray(param[...])[wanted[key][-1]], strict=True
        )
    own = sum(part.nbytes for part in parts.values())
    assert own < 0.3 * sum(param.nbytes for param in jax.tree.leaves(params))
    assert peak < own + largest


def test_what_several_devices_have_is_read_once():
    place = NamedSharding(make_mesh(data=4, fsdp=2), PartitionSpec("fsdp"))
    asked = []

    def read(index: tuple[slice, ...]) -> np.ndarray:
        asked.append(index)
        return np.arange(8)[index]

    np.testing.assert_array_equal(hf_parts.in_parts(read, (8,), place), np.arange(8))
    assert sorted(asked, key=str) == [(slice(0, 4),), (slice(4, 8),)]
