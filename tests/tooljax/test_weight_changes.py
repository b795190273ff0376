"""Finding what changed on the devices: exact for every sharding, and given up where too much did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tooljax.weights.changes import find_changes


def arrays(shape, changed, seed=0):
    """bfloat16 weights, and the same with some elements one unit in the last place away."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 65536, shape).astype(np.uint16)
    new = old.copy()
    where = rng.choice(old.size, changed, replace=False)
    new.reshape(-1)[where] += np.uint16(1)
    return old, new


def on_device(bits, sharding=None):
    array = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    return array if sharding is None else jax.device_put(array, sharding)


@pytest.mark.parametrize("changed", [0, 1, 5, 1024, 1500])
def test_exactly_the_changes_are_found(changed):
    old, new = arrays((40, 50), changed)
    delta = find_changes(on_device(old), on_device(new), at_most=2000)
    assert delta is not None
    assert delta.positions.tolist() == np.flatnonzero(old != new).tolist()
    restored = old.reshape(-1).copy()
    delta.apply(restored)
    assert np.array_equal(restored, new.reshape(-1))


@pytest.mark.parametrize(
    "spec", [P("x", None), P(None, "x"), P("x", "y"), P(("x", "y"), None), P(None, None)]
)
def test_shards_give_the_same_as_the_whole(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    old, new = arrays((16, 24), 100)
    sharding = NamedSharding(mesh, spec)
    delta = find_changes(on_device(old, sharding), on_device(new, sharding), at_most=384)
    assert delta is not None
    assert delta.positions.tolist() == np.flatnonzero(old != new).tolist()
    restored = old.reshape(-1).copy()
    delta.apply(restored)
    assert np.array_equal(restored, new.reshape(-1))


def test_too_many_changes_are_not_fetched():
    old, new = arrays((40, 50), 101)
    assert find_changes(on_device(old), on_device(new), at_most=100) is None
    assert find_changes(on_device(old), on_device(new), at_most=101) is not None


def test_bits_count_and_not_values():
    # 0.0 and -0.0 are equal, and two NaNs are not: bits are what is served.
    old = on_device(np.array([0x0000, 0x7FC0, 0x7FC0, 0x3F80], np.uint16))
    new = on_device(np.array([0x8000, 0x7FC0, 0x7FC1, 0x3F80], np.uint16))
    delta = find_changes(old, new, at_most=4)
    assert delta is not None
    assert delta.positions.tolist() == [0, 2]
    assert delta.moves.tolist() == [0x8000, 1]
