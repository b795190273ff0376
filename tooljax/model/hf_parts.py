"""Parts of weights out of a Hugging Face checkpoint: each device gets what it is to have, and no more is read."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from tooljax.model.hf_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    flat_axes,
    is_linear,
    layer_tensor,
)

Index = tuple[slice, ...]
"""A part of an array: a slice of each axis."""


def in_parts(read: Callable[[Index], np.ndarray], shape: tuple[int, ...], place: Sharding) -> Array:
    """An array whose parts are read one after the other; what several devices have is read once."""
    parts: list[Array] = []
    first: dict[Any, Array] = {}
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None, "only devices of the placement are asked"
        key = tuple((one.start, one.stop) for one in index)
        part = jax.device_put(first[key] if key in first else read(index), device)
        # The host's copy goes before the next one comes.
        first.setdefault(key, part.block_until_ready())
        parts.append(part)
    return jax.make_array_from_single_device_arrays(shape, place, parts)


def read_part(
    tensors: Mapping[str, Any],
    key: tuple[Any, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: Index,
) -> np.ndarray:
    """The part at `index` of the weight `key` of the decoder, filled layer by layer if it is stacked.

    `tensors` are the open files by the names of the tensors in them.
    """
    if key[0] != "layers":
        name = {"embedding": EMBEDDING, "final_norm": FINAL_NORM, "head": HEAD}[str(key[0])]
        return tensors[name].get_slice(name)[index].astype(dtype, copy=False)
    bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    stacked = np.empty([stop - start for start, stop in bounds], dtype)
    for row, layer in enumerate(range(*bounds[0])):
        name = layer_tensor(layer, key[1])
        stacked[row] = _part_of_layer(key[1], tensors[name].get_slice(name), shape[1:], index[1:])
    return stacked


def _part_of_layer(name: str, tensor: Any, shape: tuple[int, ...], index: Index) -> np.ndarray:
    """Of the axes that are one axis in the checkpoint, the first is cut while reading, the others after it."""
    spans: list[slice] = []
    held, rest = list(shape), list(index)
    for axes in flat_axes(name, tuple(range(len(shape)))):
        first = axes[0]
        start, stop, _ = index[first].indices(shape[first])
        inner = math.prod(shape[axis] for axis in axes[1:])
        spans.append(slice(start * inner, stop * inner))
        held[first], rest[first] = stop - start, slice(None)
    return from_flat(name, tensor[tuple(spans)], tuple(held))[tuple(rest)]


def from_flat(name: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A layer's weight as the decoder has it: a view of the checkpoint's tensor."""
    return (tensor.T if is_linear(name) else tensor).reshape(shape)
