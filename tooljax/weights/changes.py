"""Which 16-bit elements of arrays changed, found where the arrays are: only those come to the host, where they are and
how far they moved.

Arrays of one shape are compared in one call to a device, because every call, and every wait for an answer, costs more
than reading a small array, and most where an engine keeps the same device busy. Two calls are made: the first marks the
changes, one bit an element, and counts them; the second, whose sizes come from a short ladder so that few are compiled,
picks the marked elements. The first time all first calls are made before the first count is waited for, and all second
ones before the first answer is. From then on both are made at once: about as many elements change as the time before.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rollout_sidecar.threads import workers
from rollout_sidecar.weight_codec import Deltas
from tooljax.weights.stopwatch import Stopwatch

Index = tuple[slice, ...]
Pair = tuple[jax.Array, jax.Array]
Arrays = tuple[jax.Array, ...]

LARGEST = 2**31 - 1
"""Elements of a shard that 32-bit positions can name."""

AT_ONCE = 8
"""Arrays that are compared in one call. More make a program longer to compile, fewer make more calls."""

NUMBER_AT = 61
"""The bit from which a sorting key has the number of an array, which is below AT_ONCE."""

IN_FLIGHT = 2**31
"""Elements that are compared, at most, before what changed in them is fetched. Their marks take 1/16 of the weights."""

SHARDS = P("shards")

BITS, LANES = 32, 128
"""Marks are laid out in blocks of 32 rows of 128 elements, which the words of a block cross: bit k of word i is element
i of row k. So every device reads whole rows."""


class Part(NamedTuple):
    """Changes in a shard, in no order."""

    index: Index
    """Where the shard lies in the whole."""
    shape: tuple[int, ...]
    positions: np.ndarray
    """int32, in the flattened shard."""
    moves: np.ndarray
    """uint16."""


class Changes(NamedTuple):
    """Of one array, on the host."""

    shape: tuple[int, ...]
    parts: list[Part]


def in_order(changes: Sequence[Changes]) -> Deltas:
    """Of at most AT_ONCE arrays, in order: sorted together, by array, position and move."""
    keys = [np.zeros(0, np.uint64)]
    counts = []
    for number, change in enumerate(changes):
        counts.append(sum(len(part.positions) for part in change.parts))
        for part in change.parts:
            at = _global_positions(part.positions, part.shape, part.index, change.shape)
            key = (at.astype(np.uint64) << np.uint64(16)) | part.moves.astype(np.uint64)
            keys.append(key | np.uint64(number << NUMBER_AT))
    key = np.concatenate(keys)
    key.sort()
    moves = key.astype(np.uint16)
    key &= np.uint64((1 << NUMBER_AT) - 1)
    key >>= np.uint64(16)
    return Deltas(key.view(np.int64), moves, counts)


class _Comparison:
    """Arrays that are alike, being compared. Each step asks the devices, and waits for what the step before asked."""

    def __init__(self, pairs: Sequence[Pair], share: float, size: int | None):
        """Has the changes marked and counted, and if it is known how many will be picked, these picked as well."""
        self._like = pairs[0][1]
        self._pairs = pairs
        self._limit = int(share * self._like.size)
        self._shape = self._like.sharding.shard_shape(self._like.shape)
        self._fits = math.prod(self._shape) <= LARGEST
        self._picked: tuple[jax.Array, ...] = ()
        self._size = -1
        """How many elements are picked of each shard; below 0 before any are."""
        if self._fits:
            self._indices, self._mesh, self._old, self._new = _local(pairs)
            self._words, self._counts = _marks(self._old, self._new, mesh=self._mesh)
            self._counts.copy_to_host_async()
            if size is not None:
                self._pick(size)

    def pick(self) -> int:
        """Waits for the counts, and has the marked elements picked where they are few. Gives how many to pick the next
        time."""
        if not self._fits:
            return 0
        counted = np.asarray(self._counts)
        self._few = counted.sum(axis=0, dtype=np.int64) <= self._limit
        self._wanted = np.where(self._few, counted, np.int32(0))
        wanted = _ladder(int(self._wanted.max()), math.prod(self._shape))
        if wanted > self._size:
            self._pick(wanted)
        # Numbers on both sides of a step of the ladder should neither be picked twice nor compile more.
        return self._size if self._size <= 4 * wanted else wanted

    def _pick(self, size: int) -> None:
        self._size, self._picked = size, ()
        if size:
            self._picked = _picked(self._words, self._old, self._new, mesh=self._mesh, size=size)
            for array in self._picked:
                array.copy_to_host_async()

    def changes(self) -> list[Changes | None]:
        """Waits for the picked elements."""
        if not self._fits:
            return [None] * len(self._pairs)
        parts: list[list[Part]] = [[] for _ in self._pairs]
        if self._wanted.any():
            positions, moves = map(np.asarray, self._picked)
            for shard, index in enumerate(self._indices):
                for number, count in enumerate(self._wanted[shard]):
                    at = shard, number, slice(count)
                    parts[number].append(Part(index, self._shape, positions[at], moves[at]))
        pairs = zip(parts, self._few, strict=True)
        return [Changes(self._like.shape, part) if ok else None for part, ok in pairs]


def find_changes(
    groups: Sequence[Sequence[Pair]],
    *,
    share: float,
    watch: Stopwatch,
    sizes: dict[int, int] | None = None,
) -> Iterator[list[Changes | None]]:
    """For each group, what changed from the first array of each pair to the second; None where more than that share of
    the elements did, or a shard is larger than LARGEST.

    Each shard is compared on its own device, so that a sharded array is gathered nowhere. All arrays of a group must
    agree in shape (of one dimension or more) and dtype (of 2 bytes), the first ones in their sharding, and the second
    ones. `watch` gets the seconds of "find", until all has been asked of the devices, and of "fetch".

    Args:
        sizes: what is remembered from one comparison of the same groups to the next; empty before the first.
    """
    sizes = {} if sizes is None else sizes
    with workers() as asking:
        for several in _in_flight(groups):
            with watch.stage("find"):
                known = [sizes.get(number) for number, _ in several]
                begin = [
                    partial(_Comparison, pairs, share, size)
                    for (_, pairs), size in zip(several, known, strict=True)
                ]
                # The first time in threads, because programs are compiled; and all picked before any is fetched.
                if None in known:
                    under_way = deque(asking.map(lambda call: call(), begin))
                    deque(asking.map(_Comparison.pick, under_way), maxlen=0)
                else:
                    under_way = deque(call() for call in begin)
            for number, _ in several:
                with watch.stage("fetch"):
                    comparison = under_way.popleft()
                    sizes[number] = comparison.pick()
                    changes = comparison.changes()
                yield changes


def _in_flight(
    groups: Sequence[Sequence[Pair]],
) -> Iterator[list[tuple[int, Sequence[Pair]]]]:
    """Groups, with their numbers, of at most IN_FLIGHT elements together, or one."""
    several: list[tuple[int, Sequence[Pair]]] = []
    elements = 0
    for number, pairs in enumerate(groups):
        size = len(pairs) * pairs[0][1].size
        if several and elements + size > IN_FLIGHT:
            yield several
            several, elements = [], 0
        several.append((number, pairs))
        elements += size
    if several:
        yield several


def alike(old: Mapping[str, jax.Array], new: Mapping[str, jax.Array]) -> list[list[str]]:
    """Names of arrays that are compared in one call. The most elements first, so that no thread is left with them."""
    groups: dict[object, list[str]] = {}
    for name, array in new.items():
        key = array.shape, array.dtype, old[name].sharding, array.sharding
        groups.setdefault(key, []).append(name)
    pieces = [
        names[i : i + AT_ONCE] for names in groups.values() for i in range(0, len(names), AT_ONCE)
    ]
    return sorted(pieces, key=lambda names: -len(names) * new[names[0]].size)


def bits(array: jax.Array) -> jax.Array:
    """The array's elements as flat uint16."""
    return jax.lax.bitcast_convert_type(array, jnp.uint16).reshape(-1)


@partial(jax.jit, static_argnames="mesh")
def _marks(old: Arrays, new: Arrays, *, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Words of marks [shards, arrays, words], and how many elements are marked [shards, arrays]."""

    def of_shard(old: Arrays, new: Arrays) -> tuple[jax.Array, jax.Array]:
        words = jnp.stack([_words(bits(a) != bits(b)) for a, b in zip(old, new, strict=True)])
        return words[None], jnp.sum(_ones(words), axis=1)[None]

    return _on_each(of_shard, mesh)(old, new)


@partial(jax.jit, static_argnames=("mesh", "size"))
def _picked(
    words: jax.Array, old: Arrays, new: Arrays, *, mesh: Mesh, size: int
) -> tuple[jax.Array, jax.Array]:
    """Positions and moves [shards, arrays, size] of marked elements. What lies beyond their number means nothing."""

    # Unrolled, a search is one program to a device instead of a loop of them; a CPU would only compile it longer.
    search = "scan" if mesh.devices.flat[0].platform == "cpu" else "scan_unrolled"

    def of_shard(words: jax.Array, old: Arrays, new: Arrays) -> tuple[jax.Array, jax.Array]:
        at = jax.vmap(partial(_positions, size=size, search=search))(words[0])
        at = jnp.minimum(at, jnp.int32(new[0].size - 1))
        moves = [bits(b)[i] - bits(a)[i] for a, b, i in zip(old, new, at, strict=True)]
        return at[None], jnp.stack(moves)[None]

    return _on_each(of_shard, mesh)(words, old, new)


def _words(marks: jax.Array) -> jax.Array:
    """Packed as BITS says."""
    rows = jnp.pad(marks, (0, -marks.size % (BITS * LANES))).reshape(-1, BITS, LANES)
    values = jnp.left_shift(jnp.uint32(1), jnp.arange(BITS, dtype=jnp.uint32))[None, :, None]
    words = jnp.where(rows, jnp.broadcast_to(values, rows.shape), jnp.uint32(0))
    return jnp.sum(words, axis=1, dtype=jnp.uint32).reshape(-1)


def _ones(words: jax.Array) -> jax.Array:
    return jnp.bitwise_count(words).astype(jnp.int32)


def _positions(words: jax.Array, *, size: int, search: str) -> jax.Array:
    """Where the first `size` marks are, word by word."""
    ends = jnp.cumsum(_ones(words))
    ranks = jnp.arange(size, dtype=jnp.int32)
    at = jnp.searchsorted(ends, ranks, side="right", method=search).astype(jnp.int32)
    at = jnp.minimum(at, jnp.int32(words.size - 1))
    word = words[at]
    bit = _nth_bit(word, ranks - (ends[at] - _ones(word)))
    return at // LANES * (BITS * LANES) + bit * LANES + at % LANES


def _nth_bit(value: jax.Array, rank: jax.Array) -> jax.Array:
    """Which bit of a word is the one with `rank` set bits below it."""
    at = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = jnp.bitwise_count(value & jnp.uint32(2**width - 1)).astype(jnp.int32)
        upper = rank >= low
        value = jnp.where(upper, value >> jnp.uint32(width), value)
        rank = jnp.where(upper, rank - low, rank)
        at = jnp.where(upper, at + width, at)
    return at


def _on_each(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """On every device of the mesh, with what it holds."""
    return jax.shard_map(function, mesh=mesh, in_specs=SHARDS, out_specs=SHARDS, check_vma=False)


def _local(pairs: Sequence[Pair]) -> tuple[list[Index], Mesh, Arrays, Arrays]:
    """One copy of every shard that this host holds, as arrays of these alone, end to end on a mesh of their own: where
    each lies in the whole, the mesh, and the first and second arrays. Nothing is copied."""
    like = pairs[0][1]
    if len(like.sharding.device_set) == 1:  # without the time that making shards takes
        mesh = Mesh(np.array(list(like.sharding.device_set)), ("shards",))
        old, new = zip(*pairs, strict=True)
        return [(slice(None),) * like.ndim], mesh, old, new
    held = [shard for shard in like.addressable_shards if shard.replica_id == 0]
    mesh = Mesh(np.array([shard.device for shard in held]), ("shards",))

    def local(array: jax.Array) -> jax.Array:
        data = {shard.device: shard.data for shard in array.addressable_shards}
        here = [data[shard.device] for shard in held]
        rows, *others = here[0].shape
        return jax.make_array_from_single_device_arrays(
            (len(held) * rows, *others), NamedSharding(mesh, SHARDS), here
        )

    old, new = (tuple(map(local, arrays)) for arrays in zip(*pairs, strict=True))
    return [shard.index for shard in held], mesh, old, new


def _ladder(count: int, most: int) -> int:
    """The next power of 2, at least 1024; but not more than `most`, and 0 for 0."""
    return min(max(1024, 1 << (count - 1).bit_length()), most) if count else 0


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
