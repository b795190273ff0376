"""Where arrays live: a mesh, and one table from logical axes to mesh axes.

Weights name their logical axes where they are declared (`axes` in the metadata of `nnx.Param`); only this file knows
mesh axes. `data` replicates the weights and splits the batch, `fsdp` splits both, `tensor` splits heads,
feed-forward and vocabulary, `context` splits time. The compiler derives the communication from these placements.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor", "context")

Params = Any
"""An `nnx.State` of parameters. Not annotated as one: the type checker of the tests cannot read that class."""

Rules = Mapping[str, tuple[str, ...]]
"""The mesh axes that split a logical axis, the outermost first; () keeps it whole on every device."""

RULES: Rules = MappingProxyType(
    {
        "batch": ("data", "fsdp"),
        "time": ("context",),
        "layer": (),
        "embed": ("fsdp",),
        "vocab": ("tensor",),
        "q_heads": ("tensor",),
        "kv_heads": ("tensor",),
        "head_dim": (),
        "ffw": ("tensor",),
    }
)


def make_mesh(
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    context: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over all devices, or the given ones. `data` takes those that the other axes leave when it is None."""
    devices = jax.devices() if devices is None else devices
    inner = {"fsdp": fsdp, "tensor": tensor, "context": context}
    sizes = {"data": max(1, len(devices) // math.prod(inner.values())) if data is None else data}
    sizes |= inner
    if any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) != len(devices):
        wanted = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"mesh {wanted} = {math.prod(sizes.values())} must use all {len(devices)} devices; "
            "leave data unset, and let the product of the others divide the number of devices"
        )
    grid = mesh_utils.create_device_mesh(
        tuple(sizes.values()), list(devices), allow_split_physical_axes=True
    )
    return Mesh(np.asarray(grid), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def named_sharding(
    axes: Sequence[str],
    mesh: Mesh,
    *,
    shape: Sequence[int] | None = None,
    rules: Rules = RULES,
    what: str = "array",
) -> NamedSharding:
    """Placement of an array with these logical axes. `what` names it in errors; `shape` is checked when given.

    Raises ValueError for an unknown axis, for a mesh axis that would split two axes of the array (the second split
    has no devices left), and for a size that does not divide.
    """
    spec: list[tuple[str, ...] | None] = []
    taken: dict[str, str] = {}
    for index, axis in enumerate(axes):
        if axis not in rules:
            raise ValueError(f"{what}: logical axis {axis!r} has no rule; known are {[*rules]}")
        split = tuple(name for name in rules[axis] if mesh.shape[name] > 1)
        for name in split:
            if name in taken:
                raise ValueError(
                    f"{what}: mesh axis {name!r} would split both {taken[name]!r} and {axis!r}; "
                    "change the rule of one of them"
                )
            taken[name] = axis
        if shape is not None:
            _check_divides(what, axis, shape[index], {name: mesh.shape[name] for name in split})
        spec.append(split or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def shardings(abstract_params: Params, mesh: Mesh, *, rules: Rules = RULES) -> Params:
    """The placement of every parameter: the same tree, a NamedSharding in place of each value.

    For `jax.device_put`, `jax.jit(in_shardings=...)` and `tooljax.model.hf.load`.
    """
    placed = []
    for path, param in nnx.to_flat_state(abstract_params):
        sharding = named_sharding(
            param.get_metadata()["axes"],
            mesh,
            shape=param.shape,
            rules=rules,
            what=".".join(map(str, path)),
        )
        placed.append((path, param.replace(sharding)))
    return nnx.from_flat_state(placed)


def _check_divides(what: str, axis: str, size: int, split: Mapping[str, int]) -> None:
    ways = math.prod(split.values())
    if size % ways:
        wanted = " x ".join(f"{name}={count}" for name, count in split.items())
        fitting = [n for n in range(1, ways + 1) if size % n == 0]
        raise ValueError(
            f"{what}: {axis}={size} does not divide over mesh axes {wanted}; "
            f"choose sizes whose product is one of {fitting}"
        )
