"""A policy on a mesh, as the entry points use it: loaded, saved on one mesh and restored on another, and pushed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from policy_mesh_cases import opened, settings, small_batch
from scripted_sidecar import KeepingEngine, serving, write_tokenizer
from update_cases import changed

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.checkpoint import Checkpointer
from tooljax.policy import abstract_state
from tooljax.weights.push import WeightSender

pytestmark = pytest.mark.usefixtures("quick_compilations")


def test_a_checkpoint_of_four_devices_goes_on_with_two(tmp_path):
    batch = small_batch()
    policy, updater = opened(settings(tmp_path / "model", fsdp=2, tensor=2))
    state, _ = updater.update(updater.init(policy.params), batch)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {})
        expected, metrics = updater.update(state, batch)

        policy, updater = opened(settings(tmp_path / "model", data=2))
        target = abstract_state(updater, policy.params)
        found = checkpoints.restore(target)
    assert found is not None
    for leaf, wanted in zip(jax.tree.leaves(found[1]), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding
        assert len(leaf.sharding.device_set) == 2
    again, told = updater.update(found[1], batch)
    assert told == pytest.approx(metrics, rel=1e-5)
    other = changed(again)
    for name, value in changed(expected).items():
        np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6)


async def test_pushes_of_a_policy_in_parts_arrive_to_the_bit(tmp_path):
    tokenizer = ChatTokenizer.from_folder(write_tokenizer(tmp_path / "tokenizer"))
    spread, _ = opened(settings(tmp_path / "model", dtype="bfloat16", data=2, fsdp=2, tensor=2))
    whole, _ = opened(settings(tmp_path / "model", dtype="bfloat16"))
    assert spread.params["layers"]["wq"][...].addressable_shards[0].data.shape == (2, 8, 2, 4)
    engine = KeepingEngine(tokenizer)
    async with serving(engine, tokenizer) as url, SidecarClient(url) as client:
        sender = WeightSender([client], mode="delta", part_bytes=1024)
        for version in (1, 2):
            tensors = list(spread.tensors(_moved(spread.params, version)))
            report = await sender.push(tensors, version=version, timeout_s=30.0)
            expected = whole.tensors(_moved(whole.params, version))
            assert engine.weights == {name: np.asarray(x).tobytes() for name, x in expected}
    # The second one sent what had changed.
    assert 0 < report.bytes < report.full_bytes / 2


def _moved(params: nnx.State, version: int) -> nnx.State:
    """Every tenth weight is another one in each version."""

    def move(x: jax.Array) -> jax.Array:
        places = np.arange(x.size).reshape(x.shape) % 10 == 0
        return jnp.where(places, x * (1 + version / 8), x).astype(x.dtype)

    return jax.tree.map(move, params)


def test_one_device_needs_no_mesh(tmp_path):
    policy, updater = opened(settings(tmp_path / "model"))
    assert policy.layout.mesh is None
    assert updater.placement(jax.eval_shape(updater.init, policy.params)) is None


def test_a_model_that_does_not_divide_is_refused_with_the_weight(tmp_path):
    with pytest.raises(
        ValueError, match=r"layers.bq: q_heads=4 does not divide over mesh axes tensor=8"
    ):
        opened(settings(tmp_path / "model", tensor=8))
