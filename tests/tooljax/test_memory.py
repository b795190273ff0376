"""What a trainer's devices hold: state in parts, buffers used again, the host's memory, and no copy without a use."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from policy_mesh_cases import settings

from tooljax.checkpoint import Checkpointer
from tooljax.config import Config
from tooljax.policy import Policy, abstract_state, layout_of, make_updater
from tooljax.update import TrainState, Updater

pytestmark = pytest.mark.usefixtures("quick_compilations")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("memory") / "model"


@pytest.fixture(scope="module")
def opened(folder):
    """Of these settings, shared, because an updater compiles."""

    @cache
    def made(
        dtype: str = "bfloat16", mesh: Any = (2, 2), **optimizer: Any
    ) -> tuple[Policy, Updater]:
        config = settings(folder, dtype=dtype, fsdp=mesh[0], tensor=mesh[1])
        config: Config = replace(config, optimizer=replace(config.optimizer, **optimizer))
        policy = Policy.load(str(folder), config.model.dtype, layout_of(config))
        return policy, make_updater(config, policy, total_updates=9, learning_rate=1e-2)

    return made


def on_a_device(tree: Any) -> int:
    """Bytes on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def host(state: TrainState) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def test_moments_and_master_weights_are_in_parts_as_the_weights_are(opened):
    policy, updater = opened()
    state = updater.init(policy.params)
    kept = state.opt_state
    for leaf, *others in zip(
        *map(jax.tree.leaves, (state.params, kept.mu, kept.nu, kept.master)), strict=True
    ):
        for other in others:
            assert other.dtype == np.float32
            assert other.sharding == leaf.sharding
    # embedding 64 x 16, final norm 16, and in each of two layers q 16 x 16 and its bias 16, k and v 16 x 8 and biases
    # of 8, o 16 x 16, gate, up and down 16 x 32, two norms of 16. Over fsdp x tensor all but norms (fsdp alone) and
    # biases (tensor alone).
    both = 64 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)
    mine = both // 4 + 16 // 2 + 2 * (2 * 16 // 2 + (16 + 8 + 8) // 2)
    assert on_a_device(state.params) == 2 * mine
    assert on_a_device(kept) == 12 * mine + 4  # and the count


@pytest.mark.parametrize(
    "options", [{}, {"rounding": "stochastic"}, {"dtype": "float32"}, {"offload": True}], ids=str
)
def test_an_update_is_written_over_the_state_before_it(opened, options):
    policy, updater = opened(**options)
    state = updater.abstract(policy.params)
    wide = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=x.sharding), state.params
    )
    means = {"policy/loss": jax.ShapeDtypeStruct((), np.float32, sharding=updater.layout.whole)}
    program = updater._apply.lower(state, wide, means, {}).compile()
    whole = sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
    )
    assert (
        program.memory_analysis().alias_size_in_bytes >= whole - 8
    )  # the count and the step may be copied


def gradients(params: Any, seed: int) -> Any:
    """Random ones, in float32 and in parts as the weights are."""
    flat, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    made = [jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding) for x in flat]
    return jax.tree.unflatten(tree, made)


def applied(updater: Updater, state: TrainState, seed: int) -> TrainState:
    """One update by such gradients: without a loss there is less to compile."""
    means = updater.layout.put({"policy/loss": np.float32(0)})
    return updater._apply(state, gradients(state.params, seed), means, {})[0]


@pytest.mark.parametrize(("rounding", "mesh"), [("stochastic", (2, 2)), ("master", (1, 1))])
def test_an_offloaded_run_is_resumed_to_the_bit_and_is_the_plain_one(
    opened, tmp_path, rounding, mesh
):
    policy, plain = opened(rounding=rounding, mesh=mesh)
    wanted = applied(plain, applied(plain, plain.init(policy.params), 1), 2)

    _, updater = opened(rounding=rounding, mesh=mesh, offload=True)
    state = applied(updater, updater.init(policy.params), 1)
    saved = updater.saved(state)
    assert (saved.params is None) == (rounding == "master")  # they are the master weights, rounded
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, saved, {})
        found = checkpoints.restore(abstract_state(updater, policy.params))
    assert found is not None
    again = updater.restored(found[1])
    for leaf, other, place in zip(
        *map(jax.tree.leaves, (again, state, updater.placement(state))), strict=True
    ):
        assert leaf.sharding == other.sharding == place
        np.testing.assert_array_equal(leaf, other)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(again.opt_state) if x.ndim}
    assert kinds == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(again.params)} == {"device"}

    # The compiler may contract other products and sums in a loop: float32 differs in its last bit, and then a rounding.
    for leaf, expected in zip(host(applied(updater, again, 2)), host(wanted), strict=True):
        rtol = 1e-5 if leaf.dtype.itemsize == 4 else 2**-7
        leaf, expected = leaf.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(leaf, expected, rtol=rtol, atol=1e-6)
    assert updater._apply._cache_size() == 1


def test_what_is_pushed_outlives_the_next_update(opened):
    policy, updater = opened()
    state = updater.init(policy.params)
    sent = dict(policy.tensors(updater.compute_params(state)))
    before = {name: np.array(x) for name, x in sent.items()}
    applied(updater, state, 1)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    for name, x in sent.items():
        assert x.dtype == "bfloat16"
        np.testing.assert_array_equal(x, before[name])
