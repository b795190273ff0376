"""Where arrays live: a mesh, and one table from logical axes to mesh axes.

Weights name their logical axes where they are declared (`axes` in the metadata of `nnx.Param`); only this file knows
mesh axes. `data` replicates the weights and splits the batch, `fsdp` splits both, `tensor` splits heads,
feed-forward and vocabulary, `context` splits time. The compiler derives the communication from these placements.
docs/sharding.md draws one layer of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

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
        "lora_rank": (),
    }
)

COMPUTE_RULES: Rules = MappingProxyType({**RULES, "embed": ()})
"""Of weights and activations while they are used: weights are gathered over `fsdp`, layer by layer."""

HOST_MEMORY = "pinned_host"
"""JAX's name of the host's memory that devices read and write themselves."""

SHARED: Mapping[str, str] = MappingProxyType(
    {
        "kv_heads": "fewer than devices: each device has all, and computes with the one that its queries need",
        "vocab": "where it does not divide: each device has all, and computes the logits of a part",
    }
)
"""Logical axes that stay whole where they do not divide; others that do not divide are refused."""

GATHERED = "gathered weight"
"""Name of gathered weights in policies of rematerialisation."""


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    context: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over all devices, or the given ones. The axis that is -1 takes those that the others leave.

    With no axis -1 it is over as many devices as their product says, which on several hosts must be all of them.
    ValueError names what does not fit, and a way out.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _filled({"data": data, "fsdp": fsdp, "tensor": tensor, "context": context}, devices)
    used = list(devices)[: math.prod(sizes.values())]
    grid = mesh_utils.create_device_mesh(
        tuple(sizes.values()), used, allow_split_physical_axes=True
    )
    return Mesh(np.asarray(grid), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _filled(sizes: dict[str, int], devices: Sequence[Any]) -> dict[str, int]:
    """The sizes with a number in place of -1, after it has been checked that there are devices for them."""
    count = len(devices)
    shown = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    wrong = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    rest = [axis for axis, size in sizes.items() if size == -1]
    if wrong or len(rest) > 1:
        raise ValueError(
            f"{shown}: sizes are 1 or more, and at most one is -1; "
            f"change mesh.{(wrong or rest[1:])[0]}"
        )
    product = math.prod(size for size in sizes.values() if size != -1)
    kind = f"{count} {devices[0].platform} devices"
    fitting = [n for n in range(1, count + 1) if count % n == 0]
    if rest and count % product:
        raise ValueError(
            f"{shown}: {kind} do not divide by the {product} that the other axes take, so mesh.{rest[0]}=-1 has no "
            f"value; choose sizes whose product is one of {fitting}"
        )
    if product > count:
        raise ValueError(
            f"{shown} takes {product} devices, but there are {kind}; lower a size, or set one axis to -1 for all that "
            "the others leave"
        )
    if not rest and product < count and len({device.process_index for device in devices}) > 1:
        raise ValueError(
            f"{shown} takes {product} of {kind}, but a run on several hosts uses all; set one axis to -1"
        )
    return {axis: count // product if size == -1 else size for axis, size in sizes.items()}


def make_layout(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    context: int = 1,
    *,
    attention: str = "auto",
    devices: Sequence[Any] | None = None,
) -> "Layout":
    """The layout over such a mesh; one device needs none."""
    mesh = make_mesh(data, fsdp, tensor, context, devices=devices)
    return Layout(mesh if mesh.size > 1 else None, attention)


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
    spec: list[tuple[str, ...]] = []
    taken: dict[str, str] = {}
    for index, axis in enumerate(axes):
        if axis not in rules:
            raise ValueError(f"{what}: logical axis {axis!r} has no rule; known are {[*rules]}")
        split = _split(axis, None if shape is None else shape[index], mesh, rules)
        for name in split:
            if name in taken:
                raise ValueError(
                    f"{what}: mesh axis {name!r} would split both {taken[name]!r} and {axis!r}; "
                    "change the rule of one of them"
                )
            taken[name] = axis
        if shape is not None:
            _check_divides(what, axis, shape[index], {name: mesh.shape[name] for name in split})
        spec.append(split)
    return NamedSharding(mesh, _partition_spec(spec))


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


def alike(tree: Any, params: Any, placed: Any, mesh: Mesh) -> Any:
    """The placement of every leaf of `tree`: a parameter's where the leaf mirrors one (a moment), else a whole copy.

    `placed` holds the placements of `params`; leaves mirror a parameter if their path ends with its path and the shapes
    are equal.
    """
    places = {
        jax.tree_util.keystr(path): (leaf.shape, place)
        for (path, leaf), place in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(placed), strict=True
        )
    }

    def place(path: tuple, leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            shape, found = places.get(jax.tree_util.keystr(path[start:]), (None, None))
            if shape == leaf.shape and found is not None:
                return found
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, tree)


@dataclass(frozen=True)
class Layout:
    """Where a forward and backward pass puts its arrays. Without a mesh all is on one device, and nothing is done."""

    mesh: Mesh | None = None
    attention: str = "auto"
    """What computes attention (tooljax.model.attention)."""

    @property
    def gathers(self) -> bool:
        """Whether weights are stored in parts and gathered for use."""
        return self.mesh is not None and self.mesh.shape["fsdp"] > 1

    @property
    def device(self) -> Any:
        """One of the devices."""
        return jax.local_devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        """Of the devices, which need not be this machine's: a program may be compiled for others."""
        return self.device.platform

    def check_host_memory(self, setting: str, way_out: str) -> None:
        """ValueError unless the devices' programs can keep arrays in the host's memory, as `setting` wants."""
        kinds = [memory.kind for memory in self.device.addressable_memories()]
        if HOST_MEMORY not in kinds:
            raise ValueError(
                f"{setting} keeps arrays in pinned host memory, which {self.platform} devices with this version of "
                f"JAX do not have (they have {', '.join(kinds)}); {way_out}"
            )

    def splits(self, axis: str, size: int | None = None) -> tuple[str, ...]:
        """The mesh axes of more than one device that split a logical axis; none where this size of it stays whole
        (SHARED)."""
        return _split(axis, size, self.mesh, COMPUTE_RULES) if self.mesh else ()

    def stored_splits(self, axis: str) -> tuple[str, ...]:
        """The same of weights as they are stored."""
        return _split(axis, None, self.mesh, RULES) if self.mesh else ()

    def ways(self, axis: str) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.mesh.shape[name] for name in self.splits(axis)) if self.mesh else 1

    def spec(self, *axes: str, shape: Sequence[int | None] = ()) -> PartitionSpec:
        """The axes, of these sizes where they are known, as a shard_map takes them."""
        sizes = shape or (None,) * len(axes)
        return _partition_spec([self.splits(*each) for each in zip(axes, sizes, strict=True)])

    @property
    def whole(self) -> NamedSharding:
        """Of arrays that every device has a copy of. There must be a mesh."""
        assert self.mesh is not None, "one device has no placements"
        return NamedSharding(self.mesh, PartitionSpec())

    def pin(self, x: Array, *axes: str) -> Array:
        """`x`, placed by its logical axes; whole on every device without any."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(*axes)))

    def put(self, tree: Any, *axes: str) -> Any:
        """Arrays of the host, the same on every host, as arrays on the devices, placed by their logical axes."""
        if self.mesh is None:
            return jax.device_put(tree)
        place = NamedSharding(self.mesh, self.spec(*axes))
        if place.is_fully_addressable:
            return jax.device_put(tree, place)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, place, np.asarray(x).__getitem__), tree
        )

    def gather(self, weight: Array, *axes: str) -> Array:
        """A weight as it is used; its gradient goes straight to where the weight is stored, a reduce-scatter."""
        if self.mesh is None:
            return weight
        stored = named_sharding(axes, self.mesh, shape=weight.shape)
        used = NamedSharding(self.mesh, self.spec(*axes, shape=weight.shape))
        return checkpoint_name(_regathered(used, stored, weight), GATHERED)

    def spread(
        self, function: Callable, inputs: Sequence[PartitionSpec], outputs: PartitionSpec
    ) -> Callable:
        """The function on each device's part of its arguments."""
        if self.mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False
        )

    def lookup(
        self, embedding: Float[Array, "vocab embed"], tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time embed"]:
        """Rows of the embedding; each device looks up those that its part of the vocabulary has.

        Spread by hand: a device looks up its part of embed for the tokens of all devices that store the other parts,
        and they swap. Tokens move, of which there are fewer than words; and so the gradient of each part is made
        where it is stored.
        """
        if self.mesh is None:
            return jnp.take(embedding, tokens, axis=0)
        stored = named_sharding(("vocab", "embed"), self.mesh, shape=embedding.shape).spec
        vocab, embed = self.splits("vocab", embedding.shape[0]), self.stored_splits("embed")

        def found(mine: Array, tokens: Array) -> Array:
            if not vocab:
                return jnp.take(mine, tokens, axis=0)
            inside = tokens - jax.lax.axis_index(vocab) * mine.shape[0]
            known = (inside >= 0) & (inside < mine.shape[0])
            rows = jnp.take(mine, jnp.where(known, inside, 0), axis=0)
            rows = jnp.where(known[..., None], rows, jnp.zeros((), rows.dtype))
            return jax.lax.psum(rows, vocab)

        def part(mine: Array, tokens: Array) -> Array:
            if not embed:
                return found(mine, tokens)
            everybodys = found(mine, jax.lax.all_gather(tokens, embed))
            return jax.lax.all_to_all(everybodys, embed, 0, everybodys.ndim - 1, tiled=True)[0]

        rows = self.spec("batch", "time")
        return self.spread(part, (stored, rows), rows)(embedding, tokens)

    @property
    def token_splits(self) -> tuple[str, ...]:
        """The mesh axes that split the one axis of `merged`."""
        return (*self.splits("batch"), *self.splits("time"))

    def merged(self, x: Shaped[Array, "batch time ..."]) -> Array:
        """[batch * time, ...] in an order in which every device keeps its own tokens; `parted` takes it back."""
        if self.ways("time") == 1:
            return x.reshape(-1, *x.shape[2:])
        rows, parts = self.ways("batch"), self.ways("time")
        batch, time, *rest = x.shape
        x = x.reshape(rows, batch // rows, parts, time // parts, *rest).swapaxes(1, 2)
        return x.reshape(batch * time, *rest)

    def parted(self, x: Array, batch: int) -> Array:
        """[batch, time, ...] of what `merged` made one axis of."""
        time, rest = x.shape[0] // batch, x.shape[1:]
        if self.ways("time") == 1:
            return x.reshape(batch, time, *rest)
        rows, parts = self.ways("batch"), self.ways("time")
        x = x.reshape(rows, parts, batch // rows, time // parts, *rest).swapaxes(1, 2)
        return x.reshape(batch, time, *rest)


ONE_DEVICE = Layout()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _regathered(used: NamedSharding, stored: NamedSharding, weight: Array) -> Array:
    del stored
    return jax.lax.with_sharding_constraint(weight, used)


def _regathered_forward(used: NamedSharding, stored: NamedSharding, weight: Array):
    return _regathered(used, stored, weight), None


def _regathered_backward(used: NamedSharding, stored: NamedSharding, _, cotangent: Array):
    del used
    return (jax.lax.with_sharding_constraint(cotangent, stored),)


_regathered.defvjp(_regathered_forward, _regathered_backward)


def _split(axis: str, size: int | None, mesh: Mesh, rules: Rules) -> tuple[str, ...]:
    """The mesh axes that split a logical axis; none where it is one of SHARED that does not divide."""
    split = tuple(name for name in rules[axis] if mesh.shape[name] > 1)
    ways = math.prod(mesh.shape[name] for name in split)
    if size is None or size % ways == 0 or axis not in SHARED:
        return split
    return split if axis == "kv_heads" and ways % size else ()


def _partition_spec(splits: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """As JAX writes it: what a program returns then has the very placement that it was given, and compiles once."""
    parts = [split[0] if len(split) == 1 else split or None for split in splits]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _check_divides(what: str, axis: str, size: int, split: Mapping[str, int]) -> None:
    ways = math.prod(split.values())
    if size % ways:
        wanted = " x ".join(f"{name}={count}" for name, count in split.items())
        fitting = [n for n in range(1, ways + 1) if size % n == 0]
        raise ValueError(
            f"{what}: {axis}={size} does not divide over mesh axes {wanted}; "
            f"choose sizes whose product is one of {fitting}"
        )
