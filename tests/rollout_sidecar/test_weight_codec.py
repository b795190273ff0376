"""A coded delta gives back exactly what changed, costs little more than entropy, and garbage is an error."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sidecar.weight_codec import (
    Delta,
    Deltas,
    decode,
    decode_all,
    encode,
    encode_all,
    entropy_floor_bits,
)


def test_a_worked_case():
    old = np.array([10, 20, 30, 40], np.uint16)
    new = np.array([10, 21, 30, 39], np.uint16)
    delta = Delta.between(old, new)
    assert delta.positions.tolist() == [1, 3]
    assert delta.moves.tolist() == [1, 65535]
    data = encode(delta)
    # 2 changed; 1 plane of gaps (1 and 1), 2 of moves (2 and 1 after zigzag, high bytes 0), none worth compressing.
    assert data == bytes([2, 1, 2, 2, 2, 1, 1, 2, 1, 0, 0])
    decoded = decode(data, 4)
    decoded.apply(old)
    assert old.tolist() == new.tolist()
    decoded.undo(old)
    assert old.tolist() == [10, 20, 30, 40]


@given(
    st.integers(1, 300_000),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 65535)), max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_any_change_comes_back(elements, changes):
    rng = np.random.default_rng(elements)
    old = rng.integers(0, 65536, elements).astype(np.uint16)
    new = old.copy()
    for where, bits in changes:
        new[where % elements] = bits
    delta = decode(encode(Delta.between(old, new)), elements)
    restored = old.copy()
    delta.apply(restored)
    assert np.array_equal(restored, new)
    delta.undo(restored)
    assert np.array_equal(restored, old)


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 1)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_several_tensors_are_coded_as_each_alone(tensors):
    rng = np.random.default_rng(len(tensors))
    news = [rng.integers(0, 2, size) * (rng.random(size) < share) for size, share in tensors]
    alone = [Delta.between(np.zeros(new.size, np.uint16), new.astype(np.uint16)) for new in news]
    together = Deltas(
        np.concatenate([np.zeros(0, np.int64), *(delta.positions for delta in alone)]),
        np.concatenate([np.zeros(0, np.uint16), *(delta.moves for delta in alone)]),
        [delta.positions.size for delta in alone],
    )
    coded = encode_all(together)
    assert coded == [encode(delta) for delta in alone]
    decoded = decode_all([(data, new.size) for data, new in zip(coded, news, strict=True)])
    for delta, expected in zip(decoded, alone, strict=True):
        assert delta.positions.tolist() == expected.positions.tolist()
        assert delta.moves.tolist() == expected.moves.tolist()


def test_one_bad_delta_among_several_is_seen():
    good = encode(Delta(np.array([5, 90]), np.array([1, 2], np.uint16)))
    bad = encode(Delta(np.array([5, 150]), np.array([1, 2], np.uint16)))
    for order in ([good, bad], [bad, good], [good, good[:-1], good]):
        with pytest.raises(ValueError, match="beyond the 100 of its|not what its header says"):
            decode_all([(data, 100) for data in order])


@pytest.mark.parametrize("gap", [0, 255, 256, 65535, 65536, 2**24, 2**31])
def test_gaps_take_as_many_planes_as_the_largest_needs(gap):
    delta = Delta(np.array([gap, 2 * gap + 1]), np.array([7, 9], np.uint16))
    data = encode(delta)
    assert data[1] == (gap.bit_length() + 7) // 8
    decoded = decode(data, 2 * gap + 2)
    assert decoded.positions.tolist() == [gap, 2 * gap + 1]
    assert decoded.moves.tolist() == [7, 9]


@pytest.mark.parametrize("density", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.4])
def test_the_size_is_near_the_entropy_floor_even_for_random_values(density):
    rng = np.random.default_rng(0)
    size = int(max(2_000_000, 100 / density))  # headers are of no weight
    old = rng.integers(0, 65536, size).astype(np.uint16)
    where = np.flatnonzero(rng.random(old.size) < density)
    new = old.copy()
    new[where] = rng.integers(0, 65536, where.size)
    delta = Delta.between(old, new)
    floor = entropy_floor_bits(old.size, len(delta.positions)) / 8
    assert len(encode(delta)) <= 1.25 * floor
    # One unit in the last place, as after an optimizer step: a fraction of the floor.
    new[where] = old[where] + rng.choice([1, 65535], where.size).astype(np.uint16)
    assert len(encode(Delta.between(old, new))) <= 0.9 * floor


def test_the_floor_by_hand():
    # p = 1/2: one bit of position and half of 16 bits of value an element.
    assert entropy_floor_bits(100, 50) == pytest.approx(100 * (1 + 8))
    assert entropy_floor_bits(100, 0) == 0


def damaged():
    """Codes that no delta of 100 elements has, and what is said of them."""
    good = encode(Delta(np.array([5, 90]), np.array([1, 2], np.uint16)))
    assert good[:5] == bytes([2, 1, 2, 2, 2])
    yield b"", "header is cut off"
    yield b"\x80" * 20, "header is cut off"
    yield bytes([101]) + good[1:], "changes 101 of 100 elements"
    yield bytes([2, 9]) + good[2:], "in 9 planes"
    yield good[:-1], "not what its header says"
    yield good + b"x", "not what its header says"
    yield bytes([3]) + good[1:], "plane of the delta cannot be unpacked"
    plane = zstandard.ZstdCompressor().compress(b"12")
    yield bytes([50, 0, len(plane), 0]) + plane, "unpacks to 2 bytes instead of 50"
    yield encode(Delta(np.array([5, 150]), np.array([1, 2], np.uint16))), "beyond the 100"
    yield encode(Delta(np.array([5, 2**40]), np.array([1, 2], np.uint16))), "beyond the 100"
    # Gaps that fit each, and together do not; and one that is negative as 64 bits.
    yield bytes([3, 1, 3, 3, 3]) + bytes([99, 99, 99]) + bytes(6), "beyond the 100"
    yield bytes([1, 8, *[1] * 10]) + bytes([255] * 8) + bytes(2), "beyond the 100"


@pytest.mark.parametrize(("data", "message"), list(damaged()))
def test_what_is_no_delta_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        decode(data, 100)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_garbage_never_does_anything_but_raise(data):
    try:
        delta = decode(data, 1000)
    except ValueError:
        return
    assert len(delta.positions) <= 1000
