"""The trajectory store: what is written comes back, what a crash cut off is told, steps are never there twice."""

from dataclasses import replace

import numpy as np
import pytest

from rollout_sidecar.protocol import RewardWeights, Task, Trajectory, Turn
from tooljax.config import Config
from tooljax.store import StoreError, TrajectoryStore, read_step, stored_steps
from tooljax.store.arrays import Packed
from tooljax.store.store import Credit


def trajectory(sample: int = 0) -> Trajectory:
    return Trajectory(
        task_index=0,
        sample_index=sample,
        task_id="t:1",
        seed=sample,
        status="completed",
        token_ids=[5, 6, 70_000, 8],
        prompt_tokens=2,
        loss_mask=[False, False, True, True],
        rollout_log_probs=[0.0, 0.0, -0.1, -0.5],
        turns=[Turn(start=2, end=4, policy_version=1, finish="stop")],
        reward=1.0,
        reward_terms={"outcome": 1.0},
    )


def store(folder) -> TrajectoryStore:
    config = Config()
    config = replace(config, run=replace(config.run, dir=str(folder)))
    return TrajectoryStore(config, [Task(task_id="t:1", messages=[], ground_truth="7")])


def write(folder, step: int):
    values = [{"advantages": np.array([0, 0, 0.5, 0.5], np.float32)}]
    path = store(folder).write(
        step,
        [[trajectory(0), trajectory(1)]],
        credit=Credit(np.array([[0.5, -0.5]]), [["", "nothing was sampled"]]),
        values=values,
        metrics={"policy/loss": 0.25},
        reward_weights=RewardWeights(),
    )
    assert path is not None
    return path


def test_a_step_comes_back(tmp_path):
    write(tmp_path, 3)
    step = read_step(tmp_path, 3)
    assert [record.whole() for record in step.records] == [trajectory(0), trajectory(1)]
    assert [record.dropped for record in step.records] == ["", "nothing was sampled"]
    assert step.header.tasks["t:1"].ground_truth == "7"
    advantages = step.records[0].streams[0].array("advantages")
    np.testing.assert_array_equal(advantages, np.array([0, 0, 0.5, 0.5], np.float32))
    assert step.records[1].streams[0].array("advantages") is None
    assert step.groups == [[0, 1]]
    assert not step.notes


def test_a_torn_tail_is_dropped_and_told(tmp_path):
    path = write(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-5])
    step = read_step(tmp_path, 1)
    assert [record.whole() for record in step.records] == [trajectory(0)]
    assert "cut short or damaged, and were dropped" in step.notes[0]
    assert "1 of 2 trajectories are left" in step.notes[1]


def test_a_flipped_bit_is_noticed(tmp_path):
    path = write(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert len(read_step(tmp_path, 1).records) == 1


def test_a_resumed_run_forgets_later_steps(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    store(tmp_path).forget_after(1)
    assert stored_steps(tmp_path) == [1]
    write(tmp_path, 1)
    assert len(read_step(tmp_path, 1).records) == 2


def test_a_step_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(StoreError, match="no step is stored"):
        read_step(tmp_path, 9)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, False, True], "bool"),
        ([1, -2, 2**31 - 1], "int32"),
        ([2**40], "int64"),
        ([0.5, -0.25], "float32"),
        ([0.1], "float64"),
    ],
)
def test_arrays_are_packed_without_loss(values, kind):
    packed = Packed.of(values)
    assert packed.kind == kind
    assert packed.unpack().tolist() == values
