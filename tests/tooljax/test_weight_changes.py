"""Finding what changed on the devices: exact for every sharding, and given up where too much did."""

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tooljax.weights import changes as finding
from tooljax.weights.changes import Changes, Part, alike, find_changes, in_order
from tooljax.weights.stopwatch import Stopwatch


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


def found_in(pairs, share=1.0):
    """What changed in one group."""
    (found,) = find_changes([pairs], share=share, watch=Stopwatch())
    return found


def assert_found(changes, old, new):
    assert changes is not None
    (delta,) = in_order([changes])
    assert delta.positions.tolist() == np.flatnonzero(old != new).tolist()
    restored = old.reshape(-1).copy()
    delta.apply(restored)
    assert np.array_equal(restored, new.reshape(-1))


@pytest.mark.parametrize("changed", [0, 1, 5, 1024, 1500, 2000])
def test_exactly_the_changes_are_found(changed):
    old, new = arrays((40, 50), changed)
    (changes,) = found_in([(on_device(old), on_device(new))])
    assert_found(changes, old, new)


def test_positions_lie_right_across_rows_words_and_blocks_of_marks():
    old = np.zeros(3 * 4096 + 100, np.uint16)
    new = old.copy()
    edges = [0, 127, 128, 31 * 128, 4095, 4096, 4096 + 129, 2 * 4096 + 5, 3 * 4096, len(old) - 1]
    new[edges] = np.arange(1, len(edges) + 1)
    (changes,) = found_in([(on_device(old), on_device(new))])
    assert_found(changes, old, new)
    (delta,) = in_order([changes])  # type: ignore[list-item]
    assert (delta.positions.tolist(), delta.moves.tolist()) == (edges, list(range(1, 11)))


@pytest.mark.parametrize("search", ["scan", "scan_unrolled"])
def test_marked_positions_by_either_search(search):
    words = (
        jnp.zeros(3 * finding.LANES, jnp.uint32)
        .at[jnp.array([0, 5, 300])]
        .set(jnp.array([0x80000001, 2, 12], jnp.uint32))
    )
    found = finding._positions(words, size=5, search=search)
    # Bit k of word i of a block is row k, element i; a block has 32 rows of 128.
    assert found.tolist() == [
        0,
        31 * 128,
        128 + 5,
        2 * 4096 + 2 * 128 + 44,
        2 * 4096 + 3 * 128 + 44,
    ]


def test_arrays_of_one_shape_are_told_apart():
    some = [arrays((40, 50), changed, seed) for seed, changed in enumerate((7, 0, 1900, 60))]
    found = found_in([(on_device(old), on_device(new)) for old, new in some], 0.4)
    assert found.pop(2) is None  # too many, which the others do not suffer from
    del some[2]
    for changes, (old, new) in zip(found, some, strict=True):
        assert_found(changes, old, new)
    together = in_order([changes for changes in found if changes is not None])
    assert together.counts == [7, 0, 60]
    for delta, changes in zip(together, found, strict=True):
        (alone,) = in_order([changes])  # type: ignore[list-item]
        assert delta.positions.tolist() == alone.positions.tolist()
        assert delta.moves.tolist() == alone.moves.tolist()


def test_eight_arrays_have_room_in_a_sorting_key():
    parts = [Part((slice(None),), (2**45,), np.array([2**31 - 1]), np.array([65535]))] * 8
    found = list(in_order([Changes((2**45,), [part]) for part in parts]))
    assert [(d.positions.tolist(), d.moves.tolist()) for d in found] == [([2**31 - 1], [65535])] * 8


@pytest.mark.parametrize("in_flight", [1, 4000, 2**31])
def test_groups_come_back_in_their_order(monkeypatch, in_flight):
    """However many are under way at once: one, two, all."""
    monkeypatch.setattr(finding, "IN_FLIGHT", in_flight)
    some = [arrays((40, 50), changed, seed) for seed, changed in enumerate((3, 0, 900, 20, 5))]
    groups = [[(on_device(old), on_device(new))] for old, new in some]
    watch = Stopwatch()
    found = list(find_changes(groups, share=0.4, watch=watch))
    assert found.pop(2) == [None]
    del some[2]
    for (changes,), (old, new) in zip(found, some, strict=True):
        assert_found(changes, old, new)
    assert set(watch.seconds) == {"find", "fetch"}


def test_remembered_sizes_only_save_time():
    """More change than the time before, fewer, none, too many."""
    sizes: dict[int, int] = {}
    for seed, changed in enumerate((0, 1500, 3, 20000, 1100, 0, 1)):
        old, new = arrays((200, 150), changed, seed)
        pairs = [(on_device(old), on_device(new))]
        ((changes,),) = find_changes([pairs], share=0.5, watch=Stopwatch(), sizes=sizes)
        if changed == 20000:
            assert changes is None
        else:
            assert_found(changes, old, new)
    assert sizes == {0: 1024}


def test_what_is_remembered_changes_by_large_steps_only():
    sizes: dict[int, int] = {}
    seen = []
    for seed, changed in enumerate((1000, 1100, 1000, 2100, 1000, 0)):
        old, new = arrays((200, 150), changed, seed)
        deque(
            find_changes(
                [[(on_device(old), on_device(new))]], share=0.5, watch=Stopwatch(), sizes=sizes
            )
        )
        seen.append(sizes[0])
    assert seen == [1024, 2048, 2048, 4096, 4096, 0]


def test_the_next_push_compiles_nothing():
    """Numbers of changes differ from push to push."""
    programs: list[Any] = [finding._marks, finding._picked]
    sizes = []
    remembered: dict[int, int] = {}
    for seed, changed in enumerate((300, 310, 17, 1000)):
        old, new = arrays((41, 53), changed, seed)
        pairs = [(on_device(old), on_device(new))]
        deque(find_changes([pairs], share=1.0, watch=Stopwatch(), sizes=remembered))
        sizes.append([program._cache_size() for program in programs])
    assert sizes == sizes[:1] * 4


@pytest.mark.parametrize(
    "spec", [P("x", None), P(None, "x"), P("x", "y"), P(("x", "y"), None), P(None, None)]
)
def test_shards_give_the_same_as_the_whole(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    some = [arrays((16, 24), changed, changed) for changed in (100, 1)]
    sharding = NamedSharding(mesh, spec)
    pairs = [(on_device(old, sharding), on_device(new, sharding)) for old, new in some]
    found = found_in(pairs)
    for changes, (old, new) in zip(found, some, strict=True):
        assert_found(changes, old, new)


def test_too_many_changes_are_not_fetched():
    old, new = arrays((40, 50), 101)
    pairs = [(on_device(old), on_device(new))]
    assert found_in(pairs, 100 / 2000) == [None]
    assert found_in(pairs, 101 / 2000) != [None]


def test_bits_count_and_not_values():
    # 0.0 and -0.0 are equal, and two NaNs are not: bits are what is served.
    old = on_device(np.array([0x0000, 0x7FC0, 0x7FC0, 0x3F80], np.uint16))
    new = on_device(np.array([0x8000, 0x7FC0, 0x7FC1, 0x3F80], np.uint16))
    (changes,) = found_in([(old, new)])
    assert changes is not None
    (delta,) = in_order([changes])
    assert delta.positions.tolist() == [0, 2]
    assert delta.moves.tolist() == [0x8000, 1]


def test_groups_are_of_one_shape_dtype_and_sharding():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    split = NamedSharding(mesh, P("x"))
    new = {
        "a": jnp.zeros((16, 4), jnp.bfloat16),
        "large": jnp.zeros((64, 64), jnp.bfloat16),
        "b": jnp.zeros((16, 4), jnp.bfloat16),
        "half": jnp.zeros((16, 4), jnp.float16),
        "split": jax.device_put(jnp.zeros((16, 4), jnp.bfloat16), split),
    }
    assert alike(new, new) == [["large"], ["a", "b"], ["half"], ["split"]]
