"""Which 16-bit elements of an array changed, found where the array is: only positions and moves come to the host."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rollout_sidecar.weight_codec import Delta

Index = tuple[slice, ...]


def find_changes(old: jax.Array, new: jax.Array, *, at_most: int) -> Delta | None:
    """What changed from `old` to `new`; None if more than `at_most` elements did.

    Each shard is compared on its own device, so that a sharded array is gathered nowhere. Shapes, dtypes (of 2 bytes)
    and shardings must agree.
    """
    pairs = _shards(old, new)
    counts = [int(count) for count in jax.device_get([_count(a, b) for _, a, b in pairs])]
    if sum(counts) > at_most:
        return None
    # Sizes from a short ladder, so that few are compiled.
    found = [
        _changes(a, b, size=min(_ladder(count), a.size)) if count else None
        for count, (_, a, b) in zip(counts, pairs, strict=True)
    ]
    positions: list[np.ndarray] = []
    moves: list[np.ndarray] = []
    for count, arrays, (index, shard, _) in zip(counts, found, pairs, strict=True):
        if arrays is not None:
            here, move = (np.asarray(array)[:count] for array in arrays)
            positions.append(_global_positions(here, shard.shape, index, new.shape))
            moves.append(move)
    if not positions:
        return Delta(np.zeros(0, np.int64), np.zeros(0, np.uint16))
    at, by = np.concatenate(positions), np.concatenate(moves)
    order = np.argsort(at, kind="stable")
    return Delta(at[order], by[order])


def bits(array: jax.Array) -> jax.Array:
    """The array's elements as flat uint16."""
    return jax.lax.bitcast_convert_type(array, jnp.uint16).reshape(-1)


@jax.jit
def _count(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.sum(bits(old) != bits(new), dtype=jnp.int32)


@partial(jax.jit, static_argnames="size")
def _changes(old: jax.Array, new: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    before, after = bits(old), bits(new)
    (positions,) = jnp.nonzero(before != after, size=size, fill_value=0)
    return positions, after[positions] - before[positions]


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
        return positions.astype(np.int64)
    coordinates = np.unravel_index(positions, shard_shape)
    starts = [part.indices(size)[0] for part, size in zip(index, shape, strict=True)]
    moved = tuple(c + start for c, start in zip(coordinates, starts, strict=True))
    return np.ravel_multi_index(moved, shape).astype(np.int64)
