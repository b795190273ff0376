"""Frozen dataclasses whose array fields JAX sees.

Unlike `jax.tree_util.register_dataclass` and `flax.struct`, rebuilding one does not call `__init__`: `vmap`, `grad` and
`eval_shape` put tracers, shapes or None where arrays were, which checked field types would reject.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree's structure, not an array: it must be hashable."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static_field))
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and a pytree: leaves are its fields, but for those made by `static_field`."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    arrays = [field.name for field in fields if not field.metadata.get("static")]
    static = [field.name for field in fields if field.metadata.get("static")]

    def flatten_with_keys(tree: T):
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in arrays]
        return keyed, tuple(getattr(tree, name) for name in static)

    def flatten(tree: T):
        return [getattr(tree, name) for name in arrays], tuple(getattr(tree, n) for n in static)

    def unflatten(values: tuple, children: Any) -> T:
        tree = object.__new__(cls)
        for name, value in zip([*arrays, *static], [*children, *values], strict=True):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
