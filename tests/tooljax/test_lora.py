"""Updates of adapters: what they are of, what they leave alone, and that they go on after a checkpoint."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lora_cases import busy_adapters, lora_settings, opened
from policy_mesh_cases import SHAPE, small_batch
from random_decoder import random_decoder
from update_cases import changed, gradient

from tooljax.checkpoint import Checkpointer
from tooljax.config import ConfigError, load_config
from tooljax.config.schema import LoraConfig
from tooljax.lora import is_adapters, lora_of
from tooljax.model import hf
from tooljax.model.adapters import Lora, merged
from tooljax.model.decoder import _dense
from tooljax.model.flops import adapter_weights, forward_flops, layer_weights, update_flops
from tooljax.policy import abstract_state
from tooljax.sharding import ONE_DEVICE

pytestmark = pytest.mark.usefixtures("quick_compilations")

SCALE = 2.0
"""alpha 8 / rank 4."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora") / "model"


@cache
def world(folder):
    """Shared: an updater compiles."""
    return opened(lora_settings(folder))


@cache
def whole_updater(folder):
    """Of all weights."""
    return opened(lora_settings(folder, lora=LoraConfig()))[1]


def named(params) -> dict[str, np.ndarray]:
    """By the last name of each: "wq_a"."""
    return {
        str(path[-1]): np.asarray(param.get_value()) for path, param in nnx.to_flat_state(params)
    }


def test_new_adapters_change_nothing(folder):
    policy, updater = world(folder)
    for name, value in named(policy.trained).items():
        if name.endswith("_b"):
            assert not value.any()
        else:
            # Uniform within 1/sqrt(inputs): w_down has 32, the others 16.
            bound = (32 if name == "w_down_a" else 16) ** -0.5
            assert 0.8 * bound < np.abs(value).max() <= bound
            assert np.std(value) == pytest.approx(bound / 3**0.5, rel=0.2)
    batch = small_batch()
    first = updater.log_probs(updater.init(policy.trained).params, batch)
    np.testing.assert_array_equal(first, updater.log_probs(policy.params, batch))
    tensors = dict(policy.tensors(policy.trained))
    for name, loaded in policy.tensors(policy.params):
        np.testing.assert_array_equal(tensors[name], loaded)


def test_merged_weights_are_w_plus_scale_a_b(folder):
    policy, updater = world(folder)
    adapters = busy_adapters(policy)
    values = named(adapters)
    tensors = {name: np.asarray(x) for name, x in policy.tensors(adapters)}
    loaded = {name: np.asarray(x) for name, x in policy.tensors(policy.params)}
    a, b = (values[f"wo_{part}"][1].astype(np.float64) for part in "ab")  # [N H R], [R D]
    name = "model.layers.1.self_attn.o_proj.weight"
    expected = loaded[name] + SCALE * (a.reshape(16, 4) @ b).T
    np.testing.assert_allclose(tensors[name], expected, rtol=1e-6, atol=1e-6)
    a, b = (values[f"wq_{part}"][0].astype(np.float64) for part in "ab")  # [D R], [R N H]
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = loaded[name] + SCALE * (a @ b.reshape(4, 16)).T
    np.testing.assert_allclose(tensors[name], expected, rtol=1e-6, atol=1e-6)
    kept = [name for name in loaded if "proj.weight" not in name]
    assert (
        len(kept) == 2 * 5 + 2
    )  # two norms and three biases a layer, the embedding and the last norm
    for name in kept:
        np.testing.assert_array_equal(tensors[name], loaded[name])
    whole = dict(policy.tensors(policy.whole(adapters)))
    for name, value in tensors.items():
        np.testing.assert_allclose(whole[name], value, rtol=1e-6, atol=1e-6)


def test_merged_weights_say_what_the_adapters_say(folder):
    policy, updater = world(folder)
    adapters, batch = busy_adapters(policy), small_batch()
    beside = updater.log_probs(adapters, batch)
    np.testing.assert_allclose(updater.log_probs(policy.whole(adapters), batch), beside, atol=1e-5)
    assert np.abs(beside - updater.log_probs(policy.params, batch)).max() > 0.1


def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(folder):
    """With W + s A B in place of W: dA = s dW B', dB = s A' dW."""
    policy, updater = world(folder)
    adapters, batch = busy_adapters(policy), small_batch()
    found = gradient(updater, adapters, batch, loss="sft")
    of_whole = gradient(whole_updater(folder), policy.whole(adapters), batch, loss="sft")
    values = named(adapters)
    inputs = {"wo": 16, "w_down": 32}
    assert len(found) == 14
    for name in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"):
        d, rows = of_whole[f"['layers']['{name}'].value"].astype(np.float64), inputs.get(name, 16)
        d = d.reshape(2, rows, -1)  # [layer in out]
        a = values[f"{name}_a"].reshape(2, rows, 4).astype(np.float64)
        b = values[f"{name}_b"].reshape(2, 4, -1).astype(np.float64)
        expected = {
            "a": SCALE * np.einsum("lio,lro->lir", d, b),
            "b": SCALE * np.einsum("lir,lio->lro", a, d),
        }
        for part, value in expected.items():
            mine = found[f"['layers']['{name}_{part}'].value"].reshape(value.shape)
            largest = np.abs(value).max()
            assert largest > 1e-3
            np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-5 * largest)


def test_gradients_are_slopes_of_the_loss(folder):
    """Central differences along a random direction, in the loss of demonstrations."""
    policy, updater = world(folder)
    adapters, batch = busy_adapters(policy), small_batch()
    rng = np.random.default_rng(3)
    direction = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), adapters
    )

    def loss(step: float) -> float:
        moved = jax.tree.map(lambda x, d: x + step * d, adapters, direction)
        mask = np.asarray(batch.loss_mask)
        return -float(np.mean(updater.log_probs(moved, batch)[mask].astype(np.float64)))

    found = gradient(updater, adapters, batch, loss="sft")
    towards = jax.tree.leaves(direction)
    slope = sum(float(np.vdot(g, d)) for g, d in zip(found.values(), towards, strict=True))
    # Third derivatives of order 1 leave 1e-6; log-probs rounded to 1e-7 leave 1e-4.
    assert slope == pytest.approx((loss(1e-3) - loss(-1e-3)) / 2e-3, rel=1e-2, abs=1e-3)
    assert abs(slope) > 0.1


def test_an_update_is_of_the_adapters_alone(folder):
    policy, updater = world(folder)
    before = {name: np.array(value) for name, value in named(policy.params).items()}
    batch = small_batch()
    found = gradient(updater, policy.trained, batch, loss="sft")
    state = updater.init(policy.trained)
    state, metrics = updater.update(state, batch, loss="sft")
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in found.values()))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    start = named(policy.trained)
    state, _ = updater.update(state, batch, loss="sft")
    assert set(named(state.params)) == set(start)
    for name, value in named(state.params).items():
        assert not np.array_equal(value, start[name]), name
    # Two moments of each adapter, and how many updates they have seen.
    sizes = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * sizes + 1
    for name, value in named(policy.params).items():
        assert value.tobytes() == before[name].tobytes(), name
    # Which are the reference.
    reference = updater.log_probs(policy.params, batch)
    np.testing.assert_array_equal(reference, whole_updater(folder).log_probs(policy.params, batch))


def test_a_frozen_base_stays_in_bfloat16_and_adapters_in_float32(folder):
    policy, updater = opened(lora_settings(folder, dtype="bfloat16"))
    state = updater.init(policy.trained)
    assert {x.dtype.name for x in jax.tree.leaves(policy.params)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    compute = updater.compute_params(state)
    assert {x.dtype.name for _, x in policy.tensors(compute)} == {"bfloat16"}


def test_a_mesh_changes_nothing_and_a_checkpoint_of_it_goes_on_elsewhere(folder, tmp_path):
    batch = small_batch()
    policy, updater = world(folder)
    start = busy_adapters(policy, size=0.05)
    alone, metrics = updater.update(updater.init(start), batch, loss="sft")
    expected = changed(alone)
    spread, of_four = opened(lora_settings(folder, fsdp=2, tensor=2))
    parts = named_parts(spread.trained)
    assert parts["wq_a"] == (2, 8, 4)  # [layer embed rank]: half the embedding
    assert parts["wq_b"] == (2, 4, 2, 4)  # [layer rank heads head_dim]: half the heads
    assert parts["w_down_a"] == (2, 16, 4)
    for name, value in named(spread.trained).items():
        np.testing.assert_allclose(value, named(policy.trained)[name], rtol=1e-5)
    state = of_four.init(busy_adapters(spread, size=0.05))
    state, told = of_four.update(state, batch, loss="sft")
    assert told == pytest.approx(metrics, rel=1e-5)
    for name, value in changed(state).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    tensors = dict(spread.tensors(of_four.compute_params(state)))
    for name, value in policy.tensors(updater.compute_params(alone)):
        np.testing.assert_allclose(np.asarray(tensors[name]), value, rtol=1e-5, atol=1e-5)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {})
        found = checkpoints.restore(abstract_state(updater, policy.trained))
    assert found is not None
    for name, value in changed(found[1]).items():
        np.testing.assert_array_equal(value, changed(state)[name])


def named_parts(params) -> dict[str, tuple[int, ...]]:
    """Shape of what the first device has of each."""
    return {
        str(path[-1]): param.get_value().addressable_shards[0].data.shape
        for path, param in nnx.to_flat_state(params)
    }


def test_a_checkpoint_holds_adapters_only_and_goes_on_exactly(folder, tmp_path):
    policy, updater = world(folder)
    batch = small_batch()
    state, _ = updater.update(updater.init(policy.trained), batch, loss="sft")
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {})
        straight, metrics = updater.update(state, batch, loss="sft")
        found = checkpoints.restore(abstract_state(updater, policy.trained))
    assert found is not None
    assert is_adapters(found[1].params)
    again, told = updater.update(found[1], batch, loss="sft")
    assert told == metrics
    for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(straight), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_model_folder_with_adapters_is_saved_merged(folder, tmp_path):
    policy, _ = world(folder)
    adapters = busy_adapters(policy)
    policy.save(adapters, tmp_path / "merged")
    merged_folder = hf.load(tmp_path / "merged", "float32")
    assert merged_folder.cfg == SHAPE
    for (name, value), (_, expected) in zip(
        hf.to_hf(SHAPE, merged_folder), policy.tensors(adapters), strict=True
    ):
        np.testing.assert_array_equal(value, expected, err_msg=name)


def test_operations_of_frozen_weights_have_no_gradient():
    """Of SHAPE with rank 4, 10 tokens, 55 pairs and 3 predicted tokens."""
    cfg = replace(SHAPE, lora=lora_of(LoraConfig(rank=4)))
    # 2 x 16 x ((2 x 4 + 2 x 2) x 4 + 3 x 32) weights. Adapters of a layer: 4 x (32 + 24 + 24 + 32 + 3 x 48) = 1024.
    assert (layer_weights(cfg), adapter_weights(cfg)) == (4608, 2048)
    # Attention 4 x 2 x 4 x 4 x 55 = 7040, the head 2 x 16 x 64 x 3 = 6144.
    assert forward_flops(cfg, 10, 55, 3) == 2 * (4608 + 2048) * 10 + 7040 + 6144
    assert update_flops(cfg, 10, 55, 3) == 3 * forward_flops(cfg, 10, 55, 3) - 2 * 4608 * 10 - 6144
    assert update_flops(SHAPE, 10, 55, 3) == 3 * (2 * 4608 * 10 + 7040 + 6144)


def test_scales():
    assert Lora(8, 16.0, ("wq",)).scale == 2.0
    assert Lora(16, 16.0, ("wq",), rank_stabilized=True).scale == 4.0
    # (1) + 0.5 (2 3) (4 5)' = 1 + 0.5 (8 + 15) = 12.5, by hand
    given = {"name": "wq", "layer": jnp.int32(0)}
    a, b = jnp.asarray([[2.0, 3.0]]), jnp.asarray([[4.0], [5.0]])
    one = merged(jnp.ones((1, 1)), a, b, 0.5, **given)
    np.testing.assert_array_equal(one, [[12.5]])
    # Heads are axes of their own.
    a, b = jnp.ones((2, 3, 5)), jnp.ones((5, 7))
    np.testing.assert_array_equal(
        merged(jnp.zeros((2, 3, 7)), a, b, 2.0, **given), jnp.full((2, 3, 7), 10.0)
    )


def test_small_changes_of_bfloat16_weights_are_merged_on_average():
    """1 and the next bfloat16 above it are 1/128 apart. A change of a quarter of that moves a quarter of the weights,
    the same ones each time, and where nothing changes, nothing moves."""
    given = {"name": "wq", "layer": jnp.int32(1)}
    weight, a = jnp.ones((256, 64), jnp.bfloat16), jnp.ones((256, 1))
    quarter = jnp.full((1, 64), 1 / 512)
    first = np.asarray(merged(weight, a, quarter, 1.0, **given), np.float64)
    assert set(np.unique(first)) == {1.0, 1 + 1 / 128}
    assert first.mean() - 1 == pytest.approx(1 / 512, rel=0.1)
    again = np.asarray(merged(weight, a, 2 * quarter, 1.0, **given), np.float64)
    assert again.mean() - 1 == pytest.approx(2 / 512, rel=0.1)
    assert np.all(again >= first)
    below = np.asarray(merged(-weight, a, -quarter, 1.0, **given), np.float64)
    np.testing.assert_array_equal(below, -first)
    np.testing.assert_array_equal(merged(weight, a, 0 * quarter, 1.0, **given), weight)


def test_a_bfloat16_product_keeps_what_adapters_add():
    """They add about 1/1000 to products of about 0.8, which are 1/256 apart in bfloat16."""
    cfg = replace(SHAPE, dtype="bfloat16", lora=Lora(1, 1.0, ("w_up",)))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0.5, 1.5, (1, 4096, 16)), jnp.bfloat16)
    weight = jnp.asarray(rng.uniform(0, 0.1, (16, 32)), jnp.bfloat16)
    a, b = jnp.full((16, 1), 1 / 64, jnp.bfloat16), jnp.full((1, 32), 1 / 256, jnp.bfloat16)
    params = {"w_up": weight, "w_up_a": a, "w_up_b": b}
    out, base = (
        np.asarray(_dense(one, params, ONE_DEVICE, "TD,DF->TF", x, "w_up"), np.float64)
        for one in (cfg, replace(cfg, lora=None))
    )
    added = np.asarray(x, np.float64)[0].sum(-1).mean() / 64 / 256
    assert (out - base).mean() == pytest.approx(added, rel=0.05)


def test_targets_are_named_as_in_a_checkpoint():
    assert lora_of(LoraConfig()) is None
    some = lora_of(LoraConfig(rank=2, targets=("down_proj", "q_proj")))
    assert some is not None
    assert some.targets == ("wq", "w_down")
    every = lora_of(LoraConfig(rank=2))
    assert every is not None
    assert every.targets == ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (
            ["lora.rank=4", "lora.targets=('lm_head',)"],
            "lora.targets=('lm_head',): 'lm_head' is no linear layer of a decoder; choose from q_proj",
        ),
        (["lora.rank=4", "lora.targets=()"], "leaves nothing to train with lora.rank=4"),
        (["lora.adapter='.'"], "is not read with lora.rank=0; set lora.rank"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(bindings, sentence):
    with pytest.raises(ConfigError) as error:
        load_config([], bindings)
    assert sentence in str(error.value)


def test_a_decoder_without_adapters_has_none():
    assert random_decoder(SHAPE).cfg.lora is None
    assert not is_adapters(nnx.split(random_decoder(SHAPE))[1])
