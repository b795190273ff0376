"""Pytree dataclasses under jax's transformations, while jaxtyping and beartype check their fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_checker import check
from jaxtyping import Array, Float, Int, TypeCheckError, jaxtyped

from tooljax.pytree import pytree_dataclass, static_field


@jaxtyped(typechecker=check)
@pytree_dataclass
class Pair:
    """Two arrays and a word, with checked fields as in the packages under test."""

    left: Float[Array, " n"]
    right: Int[Array, " n"] | None = None
    word: str = static_field(default="a")


def new_pair() -> Pair:
    return Pair(jnp.array([1.0, 2.0]), jnp.array([3, 4]), "b")


def test_leaves_are_the_arrays_and_static_fields_are_structure():
    leaves, tree = jax.tree.flatten(new_pair())
    assert [leaf.tolist() for leaf in leaves] == [[1.0, 2.0], [3, 4]]
    assert jax.tree.unflatten(tree, [5, 6]).word == "b"
    assert tree != jax.tree.structure(dataclasses.replace(new_pair(), word="c"))


def test_paths_name_the_fields():
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(new_pair())
    ]
    assert paths == [".left", ".right"]


def test_wrong_shapes_and_assignments_are_refused():
    with pytest.raises(TypeCheckError, match="right"):
        Pair(jnp.ones(2), jnp.arange(3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        new_pair().word = "c"  # pyright: ignore[reportAttributeAccessIssue]


def test_rebuilding_does_not_check_what_the_fields_hold():
    shapes = jax.eval_shape(lambda pair: pair, new_pair())
    assert shapes.left == jax.ShapeDtypeStruct((2,), jnp.float32)
    words = jax.tree.map(lambda _: "spec", new_pair())
    assert (words.left, words.right, words.word) == ("spec", "spec", "b")


def test_grad_vmap_jit_and_scan_see_through_it():
    def energy(pair: Pair) -> jax.Array:
        return jnp.sum(pair.left**2) * len(pair.word)

    pair = dataclasses.replace(new_pair(), right=None)
    # d/dx x^2 = 2 x, times the length of "b"
    np.testing.assert_array_equal(jax.grad(energy)(pair).left, [2.0, 4.0])
    np.testing.assert_array_equal(jax.jit(jax.grad(energy))(pair).left, [2.0, 4.0])
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), new_pair())
    # 1 + 4, then 4 + 16
    np.testing.assert_array_equal(jax.vmap(energy)(stacked), [5.0, 20.0])
    last, _ = jax.lax.scan(lambda pair, _: (pair, energy(pair)), pair, length=2)
    assert last.word == "b"
