"""Checkpoints: bit-exact round trips, pruning, damage, mismatches and a full disk."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tooljax.checkpoint import Best, Checkpointer, CheckpointError
from tooljax.model.decoder import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    family="qwen3",
    vocab=32,
    embed=16,
    layers=2,
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    ffw=32,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_head=True,
    max_positions=64,
    qk_norm=True,
)


def train_state(seed: int = 0) -> dict:
    """Policy parameters in bfloat16, AdamW state after one real update, and the small things around them."""
    _, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(seed)), nnx.Param)
    optimizer = optax.adamw(1e-2)
    opt_state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):  # optax computes decay**count, a float and an int32
        _, opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
    return {
        "params": params,
        "opt_state": opt_state,
        "moment": jnp.asarray(np.random.default_rng(seed).normal(size=(3, 5)), jnp.float32),
        "step": jnp.asarray(7, jnp.int32),
        "key": jax.random.key_data(jax.random.key(seed)),
    }


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert x.sharding == y.sharding
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def restored(checkpoints: Checkpointer, like):
    found = checkpoints.restore(like)
    assert found is not None
    return found


def weights(value: float, size: int = 4) -> dict:
    return {"w": jnp.full((size,), value, jnp.float32)}


@pytest.mark.parametrize("block", [True, False])
def test_a_train_state_comes_back_bit_for_bit(tmp_path, block):
    state = train_state()
    extra = {"step": 7, "position": {"epoch": 1, "rows": [3, 1, 2]}, "name": "Δ"}
    with Checkpointer(tmp_path / "ck") as checkpoints:
        checkpoints.save(7, state, extra, block=block)
    with Checkpointer(tmp_path / "ck") as checkpoints:
        step, arrays, restored_extra = restored(checkpoints, abstract(state))
    assert step == 7
    assert restored_extra == extra
    assert_identical(arrays, state)
    assert {str(x.dtype) for x in jax.tree.leaves(arrays)} == {
        "float32",
        "bfloat16",
        "int32",
        "uint32",
    }


def test_special_floats_keep_their_bits(tmp_path):
    bits = np.array([0x7FC00001, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    state = {"w": jnp.asarray(bits.view(np.float32))}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        _, arrays, _ = restored(checkpoints, state)
    assert np.asarray(arrays["w"]).view(np.uint32).tolist() == bits.tolist()


def test_arrays_are_placed_on_the_sharding_asked_for(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    values = np.arange(8, dtype=np.float32)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jax.device_put(values, sharded)}, {})
        single = jax.sharding.SingleDeviceSharding(jax.devices()[2])
        for target in (single, sharded):
            asked = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=target)}
            _, arrays, _ = restored(checkpoints, asked)
            assert arrays["w"].sharding == target
            np.testing.assert_array_equal(arrays["w"], values)


def test_an_empty_folder_restores_nothing(tmp_path):
    with Checkpointer(tmp_path / "none") as checkpoints:
        assert checkpoints.restore(weights(0.0)) is None
        assert checkpoints.latest_step() is None


def test_the_newest_steps_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, weights(step), {})
        assert checkpoints.steps() == [3, 4]
        assert checkpoints.latest_step() == 4
        step, arrays, _ = restored(checkpoints, weights(0.0))
    assert step == 4
    assert arrays["w"].tolist() == [4.0] * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]


def test_a_step_that_is_there_already_is_left_alone(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0), {"n": 1})
        checkpoints.save(1, weights(2.0), {"n": 2})
        assert restored(checkpoints, weights(0.0))[2] == {"n": 1}


def test_saving_an_older_step_says_what_to_do(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, weights(1.0), {})
        with pytest.raises(CheckpointError, match=r"holds step 5, newer than step 3; restore it"):
            checkpoints.save(3, weights(1.0), {})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"w": jnp.zeros((5,))}, r"\['w'\] is float32\[4\], expected float32\[5\]"),
        ({"w": jnp.zeros((4,), jnp.bfloat16)}, r"is float32\[4\], expected bfloat16\[4\]"),
        ({"v": jnp.zeros((4,))}, r"\['v'\] is absent, expected float32\[4\]; \['w'\] is float32"),
        (
            {c: jnp.zeros(()) for c in "abcde"},
            r"and 3 more. Use the config that wrote it, or another run.dir \(changed since: x: 1 -> 2\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, asked, message):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0), {"x": 1})
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(asked, changes=lambda extra: [f"x: {extra['x']} -> 2"])
        assert checkpoints.steps() == [1]


def truncate_data(step_dir) -> None:
    """Cuts every data file in half, as a power cut can."""
    files = [p for p in step_dir.rglob("d/*") if p.is_file() and p.stat().st_size]
    assert files
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


def test_a_damaged_step_is_skipped_and_can_be_saved_again(tmp_path, caplog):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0, 1000), {})
        checkpoints.save(2, weights(2.0, 1000), {})
    truncate_data(tmp_path / "2")
    with Checkpointer(tmp_path) as checkpoints:
        with caplog.at_level(logging.WARNING, "tooljax"):
            step, arrays, _ = restored(checkpoints, weights(0.0, 1000))
        assert (step, float(arrays["w"][0])) == (1, 1.0)
        assert "skipped the damaged checkpoint of step 2" in caplog.text
        checkpoints.save(2, weights(3.0, 1000), {})
        assert float(restored(checkpoints, weights(0.0, 1000))[1]["w"][0]) == 3.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "damaged_2"]


def test_damage_everywhere_is_an_error_not_a_fresh_start(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0, 1000), {})
    truncate_data(tmp_path / "1")
    with (
        Checkpointer(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read \(step 1: "),
    ):
        restored(checkpoints, weights(0.0, 1000))
    assert (tmp_path / "1").exists()


def test_an_interrupted_save_is_not_seen(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0), {})
    # What Orbax leaves when the process is killed before the rename.
    (tmp_path / "2.orbax-checkpoint-tmp" / "arrays").mkdir(parents=True)
    with Checkpointer(tmp_path) as checkpoints:
        assert restored(checkpoints, weights(0.0))[0] == 1
        checkpoints.save(2, weights(2.0), {})
        assert checkpoints.steps() == [1, 2]


def test_extra_that_is_not_json_is_the_callers_mistake(tmp_path):
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(TypeError, match="not JSON"):
        checkpoints.save(1, weights(1.0), {"x": object()})


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small file system needs root on Linux")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


# Orbax closes its event loop when one write fails, and others that end after that find it closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("block", [True, False])
def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(small_disk, block, capfd):
    noise = np.random.default_rng(0).normal(size=(3, 300_000)).astype(np.float32)  # incompressible
    states = [{"w": jnp.asarray(row)} for row in noise]  # 1.2 MB each: the third does not fit
    with Checkpointer(small_disk / "ck") as checkpoints:
        checkpoints.save(1, states[0], {"n": 1})
        checkpoints.save(2, states[1], {"n": 2})
        capfd.readouterr()
        message = r"could not save step 3 to .*/ck: the disk is full .*; step 2 is still readable"
        with pytest.raises(CheckpointError, match=message):  # noqa: PT012
            checkpoints.save(3, states[2], {"n": 3}, block=block)
            for _ in range(500):
                checkpoints.look()
                time.sleep(0.02)
        assert capfd.readouterr().err == ""
        assert sorted(p.name for p in (small_disk / "ck").iterdir()) == ["1", "2"]
        step, arrays, extra = restored(checkpoints, states[0])
        assert (step, extra) == (2, {"n": 2})
        assert_identical(arrays, states[1])
        # Space again: the same step can be saved.
        subprocess.run(["rm", "-r", str(small_disk / "ck" / "1")], check=True)
        checkpoints.save(3, states[2], {"n": 3})
        assert restored(checkpoints, states[0])[0] == 3


# --- the best step ----------------------------------------------------------------------------------------------


def test_the_best_step_outlives_newer_ones_until_another_is_better(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        assert checkpoints.best() is None
        checkpoints.save(1, weights(1.0), {"at": 1})
        checkpoints.mark_best(Best(1, "eval/accuracy", 0.5))
        for step in (2, 3, 4):
            checkpoints.save(step, weights(float(step)), {"at": step})
        assert checkpoints.steps() == [1, 3, 4]
    text = (tmp_path / "best.json").read_text()
    assert json.loads(text) == {"step": 1, "metric": "eval/accuracy", "value": 0.5}
    # Another process, such as an evaluation of the run.
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        best = checkpoints.best()
        assert best == Best(1, "eval/accuracy", 0.5)
        found = checkpoints.restore(weights(0.0), step=1)
        assert found is not None
        assert (found[0], found[2]) == (1, {"at": 1})
        np.testing.assert_array_equal(found[1]["w"], np.ones(4))
        assert restored(checkpoints, weights(0.0))[0] == 4  # a run goes on with the newest
        assert checkpoints.restore(weights(0.0), step=2) is None
        checkpoints.mark_best(Best(3, "eval/accuracy", 0.75))
        checkpoints.save(5, weights(5.0), {})
        assert checkpoints.steps() == [3, 4, 5]


def test_only_a_saved_step_can_be_the_best(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0), {})
        with pytest.raises(CheckpointError, match=r"step 2 of .* is not saved"):
            checkpoints.mark_best(Best(2, "eval/accuracy", 0.5))
        for text in ("", "{", '{"step": 9, "metric": "eval/accuracy", "value": 1}', "[1]"):
            (tmp_path / "best.json").write_text(text)
            assert checkpoints.best() is None
        checkpoints.save(2, weights(2.0), {})


# --- saving in the background ---------------------------------------------------------------------------------------


def test_what_is_donated_while_it_is_written_was_copied_before(tmp_path):
    """The update that follows a save writes over the very buffers."""
    step = jax.jit(lambda x: jax.tree.map(lambda w: -w, x), donate_argnums=0)
    noise = np.random.default_rng(0).normal(size=(4, 500_000)).astype(np.float32)
    state = {str(i): jnp.asarray(row) for i, row in enumerate(noise)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, {}, block=False)
        for _ in range(5):
            state = step(state)
        jax.block_until_ready(state)
        _, arrays, _ = restored(checkpoints, state)
    for i, row in enumerate(noise):
        np.testing.assert_array_equal(arrays[str(i)], row)


@pytest.fixture
def held(monkeypatch):
    """Writing in the background does not end before the event is set."""
    gate = threading.Event()
    finish = ocp.CheckpointManager._finalize
    monkeypatch.setattr(
        ocp.CheckpointManager,
        "_finalize",
        lambda *args: (gate.wait(30), finish(*args)),
    )
    yield gate
    gate.set()


def test_saving_returns_while_a_step_is_written_and_the_next_waits_for_it(tmp_path, held):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0), {}, block=False)
        assert checkpoints.steps() == []
        assert checkpoints.latest_step() is None
        checkpoints.look()  # does not wait
        threading.Timer(0.2, held.set).start()
        checkpoints.save(2, weights(2.0), {}, block=False)
        assert 1 in checkpoints.steps()
        assert restored(checkpoints, weights(0.0))[0] == 2  # reading waits
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_the_end_of_the_block_waits_for_what_is_written(tmp_path, held):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, weights(1.0), {}, block=False)
        threading.Timer(0.2, held.set).start()
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_a_best_step_counts_once_it_is_complete(tmp_path, held):
    held.set()
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, weights(1.0), {})
        checkpoints.mark_best(Best(1, "eval/accuracy", 0.25))
        held.clear()
        checkpoints.save(2, weights(2.0), {}, block=False)
        checkpoints.mark_best(Best(2, "eval/accuracy", 0.5))
        assert checkpoints.best() == Best(2, "eval/accuracy", 0.5)
        # What a crash in this moment would leave.
        shutil.copytree(tmp_path / "1", tmp_path / "crashed" / "1")
        shutil.copy(tmp_path / "best.json", tmp_path / "crashed" / "best.json")
        held.set()
        checkpoints.save(3, weights(3.0), {})
        assert checkpoints.steps() == [2, 3]
    assert Checkpointer(tmp_path).best() == Best(2, "eval/accuracy", 0.5)
    with Checkpointer(tmp_path / "crashed", keep=1) as checkpoints:
        assert checkpoints.best() == Best(1, "eval/accuracy", 0.25)
        # Made again, it need not be the best again.
        checkpoints.save(2, weights(2.0), {})
        checkpoints.save(3, weights(3.0), {})
        assert checkpoints.best() == Best(1, "eval/accuracy", 0.25)
        assert checkpoints.steps() == [1, 3]
