"""Which 16-bit elements of an array changed, found where the array is: one bit an element comes to the host, then the
moves of those that changed."""

import jax
import jax.numpy as jnp
import numpy as np

from rollout_sidecar.weight_codec import Delta

Index = tuple[slice, ...]

LARGEST = 2**31 - 1
"""Elements of a shard that 32-bit positions can name."""


def find_changes(old: jax.Array, new: jax.Array, *, at_most: int) -> Delta | None:
    """What changed from `old` to `new`; None if more than `at_most` elements did, or a shard is larger than LARGEST.

    Each shard is compared on its own device, so that a sharded array is gathered nowhere. Shapes, dtypes (of 2 bytes)
    and shardings must agree. May run in several threads at once.
    """
    pairs = _shards(old, new)
    if any(shard.size > LARGEST for _, _, shard in pairs):
        return None
    planes = [_changed_bits(before, after) for _, before, after in pairs]
    for plane in planes:
        plane.copy_to_host_async()
    found = [_positions(np.asarray(plane)) for plane in planes]
    if sum(len(positions) for positions in found) > at_most:
        return None
    moved = [
        _moves(before, after, _padded(positions)) if len(positions) else None
        for positions, (_, before, after) in zip(found, pairs, strict=True)
    ]
    at, by = [np.zeros(0, np.int64)], [np.zeros(0, np.uint16)]
    for positions, moves, (index, shard, _) in zip(found, moved, pairs, strict=True):
        if moves is not None:
            at.append(_global_positions(positions, shard.shape, index, new.shape))
            by.append(np.asarray(moves)[: len(positions)])
    delta = Delta(np.concatenate(at), np.concatenate(by))
    if len(pairs) == 1:
        return delta
    order = np.argsort(delta.positions, kind="stable")
    return Delta(delta.positions[order], delta.moves[order])


def bits(array: jax.Array) -> jax.Array:
    """The array's elements as flat uint16."""
    return jax.lax.bitcast_convert_type(array, jnp.uint16).reshape(-1)


@jax.jit
def _changed_bits(old: jax.Array, new: jax.Array) -> jax.Array:
    """One bit an element: bit k of byte j is element k * len + j. Elementwise, so no device needs memory for it."""
    changed = bits(old) != bits(new)
    rows = jnp.pad(changed, (0, -changed.size % 8)).reshape(8, -1)
    values = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8))[:, None]
    return jnp.sum(jnp.where(rows, values, jnp.uint8(0)), axis=0, dtype=jnp.uint8)


def _positions(plane: np.ndarray) -> np.ndarray:
    """Where the bits are set, as `_changed_bits` numbers them. Ascending."""
    if not plane.any():
        return np.zeros(0, np.int64)
    one = np.uint8(1)
    rows = [np.flatnonzero(((plane >> np.uint8(k)) & one).view(bool)) for k in range(8)]
    return np.concatenate([row + k * plane.size for k, row in enumerate(rows)])


@jax.jit
def _moves(old: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    return bits(new)[positions] - bits(old)[positions]


def _padded(positions: np.ndarray) -> np.ndarray:
    """As int32, of a length from a short ladder, so that few are compiled."""
    padded = np.zeros(_ladder(len(positions)), np.int32)
    padded[: len(positions)] = positions
    return padded


def _shards(old: jax.Array, new: jax.Array) -> list[tuple[Index, jax.Array, jax.Array]]:
    """One copy of every shard that this host holds: where it lies, and its data before and after."""
    before = {shard.device: shard.data for shard in old.addressable_shards}
    return [
        (shard.index, before[shard.device], shard.data)
        for shard in new.addressable_shards
        if shard.replica_id == 0
    ]


def _ladder(count: int) -> int:
    """The next power of 4, at least 1024."""
    return max(1024, 4 ** ((count - 1).bit_length() // 2 + (count - 1).bit_length() % 2))


def _global_positions(
    positions: np.ndarray, shard_shape: tuple[int, ...], index: Index, shape: tuple[int, ...]
) -> np.ndarray:
    """Positions in a flattened shard as positions in the flattened whole."""
    if shard_shape == shape:
        return positions
    coordinates = np.unravel_index(positions, shard_shape)
    starts = [part.indices(size)[0] for part, size in zip(index, shape, strict=True)]
    moved = tuple(c + start for c, start in zip(coordinates, starts, strict=True))
    return np.ravel_multi_index(moved, shape).astype(np.int64)
