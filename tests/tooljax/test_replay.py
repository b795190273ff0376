"""Replay: steps that the training loop's own update made and the store wrote come out the same, and what was tampered
with is told by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from update_cases import CONFIG, model, new_updater

from rollout_sidecar.protocol import Task, Trajectory, Turn
from tooljax.config import Config
from tooljax.config.schema import (
    BatchConfig,
    DataConfig,
    GrpoConfig,
    LimitsConfig,
    RewardConfig,
    RunConfig,
    SidecarConfig,
)
from tooljax.grpo.controller import KlController
from tooljax.guards import Guard
from tooljax.metrics import check_names
from tooljax.objective import make_objective
from tooljax.replay import main, replay_step
from tooljax.store import TrajectoryStore
from tooljax.store.frames import FrameReader, FrameWriter
from tooljax.store.records import Header, Record
from tooljax.train import Run
from tooljax.training_batch import make_batch, refilled, with_greedy
from tooljax.update import Updater

REWARD = """
def length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 10, "acc": float(len(solution_str) > 3)}
"""

GROUPS, SAMPLES, STEPS = 3, 3, 2


def trajectory(task: int, sample: int, rng: np.random.Generator, *, flat: bool) -> Trajectory:
    """Two turns with an observation between them; what it wrote, and so its reward, has the length of its turns."""
    turns, tokens, mask = [], [1, 2, 3], [False] * 3
    for n in (2 if flat else 1 + sample, 2):
        start = len(tokens)
        turns.append(Turn(start=start, end=start + n, policy_version=0, finish="stop"))
        tokens += [*rng.integers(0, CONFIG.vocab, n).tolist(), 7]
        mask += [True] * n + [False]
    said = ["x" * (turn.end - turn.start) for turn in turns]
    reward = len("\n".join(said)) / 10
    return Trajectory(
        task_index=task,
        sample_index=sample,
        task_id=f"t{task}",
        seed=sample,
        status="completed",
        token_ids=tokens,
        prompt_tokens=3,
        loss_mask=mask,
        rollout_log_probs=[-float(rng.uniform(2.4, 3.4)) if m else 0.0 for m in mask],
        turns=turns,
        reward=reward,
        reward_terms={"outcome": reward},
        metrics={"acc": float(reward > 0.3)},
        messages=[{"role": "assistant", "content": text} for text in said],
    )


def sample(rng: np.random.Generator, first: int):
    """One group of each batch has equal rewards."""
    return [
        [trajectory(first + i, j, rng, flat=i == 0) for j in range(SAMPLES)] for i in range(GROUPS)
    ]


def make_run(folder, **grpo: Any) -> SimpleNamespace:
    """What Run.update and Run.store_step read of a run."""
    (folder / "reward.py").write_text(REWARD)
    config = Config(
        run=RunConfig(dir=str(folder / "run")),
        grpo=GrpoConfig(group_size=SAMPLES, **grpo),
        data=DataConfig(prompts_per_step=GROUPS),
        batch=BatchConfig(
            row_lengths=(32,),
            rows_per_microbatch=1,
            mixed_lengths="rollout_correction" in grpo,
        ),
        limits=LimitsConfig(max_prompt_tokens=8, max_trajectory_tokens=32),
        reward=RewardConfig(function=f"{folder / 'reward.py'}:length"),
        sidecar=SidecarConfig(max_model_tokens=64),
    )
    updater = new_updater(objective=make_objective(config))
    tasks = [Task(task_id=f"t{i}", messages=[], ground_truth="7") for i in range(99)]
    return SimpleNamespace(
        config=config,
        updater=updater,
        policy=SimpleNamespace(params=model()[1]),
        kl=KlController(config.grpo.kl_coef, config.grpo.kl_target or None, config.grpo.kl_horizon),
        guard=Guard(config.guard),
        store=TrajectoryStore(config, tasks),
    )


def trained(folder, **grpo: Any) -> tuple[Any, list[dict[str, float]]]:
    """A run of two steps, and the metrics of its updates."""
    run: Any = make_run(folder, **grpo)
    updater: Updater = run.updater
    state, rng, told = updater.init(run.policy.params), np.random.default_rng(0), []
    for step in range(1, STEPS + 1):
        groups = refilled(run.config, lambda number: sample(rng, GROUPS * number))
        if run.config.grpo.adv_estimator == "remax":
            greedy = [[trajectory(i, 0, rng, flat=False)] for i in range(GROUPS)]
            groups = with_greedy(groups, greedy)
        batch, metrics, credit = make_batch(run.config, groups)
        state, batch, metrics = Run.update(run, state, batch, groups, step, metrics)
        Run.store_step(run, step, groups, batch, credit, metrics)
        told.append(metrics)
    return run, told


KL_IN_REWARD = {
    "kl_coef": 0.2,
    "kl_in": "reward",
    "kl_loss_type": "k1",
    "kl_target": 0.001,
    "kl_horizon": 40.0,
    "updates_per_batch": 2,
    "adv_estimator": "reinforce_plus_plus",
    "gamma": 0.9,
    "zero_variance": "keep",
    "rollout_is": "token",
    "rollout_rs": ("token_k2",),
    "rollout_rs_high": (0.05,),
}

REMAX = KL_IN_REWARD | {"adv_estimator": "remax", "gamma": 1.0}

BYPASSED = {
    "kl_coef": 0.2,
    "kl_target": 0.001,
    "kl_horizon": 40.0,
    "kl_loss_type": "k3+",
    "zero_variance": "refill",
    "refill_max_batches": 2,
    "rollout_correction": "bypass",
    "rollout_rs": ("seq_mean_k1", "token_k2"),
    "rollout_rs_high": (1.5, 0.1),
    "entropy_coef": 0.01,
    "turn_coef": 0.5,
}


@pytest.mark.parametrize(
    "grpo", [KL_IN_REWARD, REMAX, BYPASSED], ids=["kl in reward", "remax", "bypass"]
)
def test_what_was_trained_comes_out_the_same(tmp_path, grpo):
    run, told = trained(tmp_path, **grpo)
    for metrics in told:
        check_names(metrics)
    # The weight of the KL is another one in each step, and none of them the config's but the first.
    coefficients = [metrics["policy/kl_coef"] for metrics in told]
    assert coefficients[0] == 0.2 != coefficients[1]
    assert all(0 < metrics["policy/rejected_frac"] < 1 for metrics in told)
    for step in (1, 2):
        report = replay_step(run.config.run.dir, step)
        assert report.mismatches == []
        assert report.notes == []
        assert max(report.largest.values()) <= 1e-6
        trajectories = GROUPS * (SAMPLES + (grpo is REMAX)) * (2 if grpo is BYPASSED else 1)
        assert report.compared["loss mask"] == trajectories
        # Each by its terms, and made again.
        assert report.compared["reward"] == 2 * trajectories
        # Each trajectory's, and of the tokens in and out of the loss of those that were trained on.
        assert report.compared["advantage"] == trajectories + 2 * GROUPS * SAMPLES
        compared = set(told[step - 1]) - {"policy/kl_coef"}
        assert report.compared["loss"] == len({k for k in compared if k.startswith("policy/")})
    assert ("policy/kl_reward" in told[0]) == (grpo is not BYPASSED)


# --- tampered with ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run whose step 2 is tampered with."""
    return trained(tmp_path_factory.mktemp("kept"), **KL_IN_REWARD)[0].config.run.dir


def tampered(kept, tmp_path, change) -> list[str]:
    """What a replay says after `change` was made of the header and the records of step 2."""
    head, *frames = FrameReader(Path(kept) / "trajectories" / "step_2.log")
    header = msgspec.msgpack.decode(head, type=Header)
    records = [msgspec.msgpack.decode(frame, type=Record) for frame in frames]
    header, records = change(header, records)
    (tmp_path / "trajectories").mkdir()
    with FrameWriter(tmp_path / "trajectories" / "step_2.log", level=3) as file:
        for part in (header, *records):
            file.append(part)
    return [str(mismatch) for mismatch in replay_step(tmp_path, 2).mismatches]


def with_values(record: Record, name: str, change) -> Record:
    """A record in which one list of its stream is changed."""
    (stream,) = record.streams
    packed = getattr(stream, name, None) or stream.values[name]
    array = packed.unpack().copy()
    change(array, np.flatnonzero(stream.loss_mask.unpack()))
    again = type(packed).of(array)
    if hasattr(stream, name):
        stream = msgspec.structs.replace(stream, **{name: again})
    else:
        stream = msgspec.structs.replace(stream, values=stream.values | {name: again})
    return msgspec.structs.replace(record, streams=[stream])


def test_nothing_tampered_with_is_nothing_told(kept, tmp_path):
    assert tampered(kept, tmp_path, lambda header, records: (header, records)) == []


def test_a_tampered_reward(kept, tmp_path):
    def change(header, records):
        paid = msgspec.structs.replace(
            records[4].trajectory, reward=9.0, reward_terms={"outcome": 9.0}
        )
        records[4] = msgspec.structs.replace(records[4], trajectory=paid)
        return header, records

    told = tampered(kept, tmp_path, change)
    assert "step 2: reward of t1 sample 1 is 0.5, stored is 9" in told
    # And it would have had other advantages.
    assert any(line.startswith("step 2: advantage of t1 sample 1") for line in told)


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("log_probs", "policy/loss"),
        ("old_log_probs", "policy/mismatch/kl"),
        ("ref_log_probs", "policy/kl_reward"),
        ("rollout_log_probs", "policy/kl_mismatch"),
    ],
)
def test_a_tampered_log_prob(kept, tmp_path, name, metric):
    def change(header, records):
        def more(array, sampled):
            array[sampled[-1]] += 0.01

        for i, record in enumerate(records):
            records[i] = with_values(record, name, more)
        return header, records

    told = tampered(kept, tmp_path, change)
    assert any(line.startswith(f"step 2: loss of {metric} is ") for line in told), told


def test_a_tampered_advantage_of_a_token(kept, tmp_path):
    def change(header, records):
        def more(array, sampled):
            array[sampled[1]] += np.float32(1e-4)

        records[7] = with_values(records[7], "advantages", more)
        return header, records

    (told,) = tampered(kept, tmp_path, change)
    assert told.startswith("step 2: advantage of t2 sample 1, token ")


def test_a_tampered_mask(kept, tmp_path):
    def change(header, records):
        def less(array, sampled):
            array[sampled[0]] = False

        records[0] = with_values(records[0], "loss_mask", less)
        return header, records

    told = tampered(kept, tmp_path, change)
    assert (
        told[0] == "step 2: loss mask of t0 sample 0, token 3 of stream 0 is True, stored is False"
    )


def test_a_tampered_metric_and_a_tampered_weight_of_the_kl(kept, tmp_path):
    def change(header, records):
        metrics = header.metrics | {"policy/entropy": header.metrics["policy/entropy"] + 2e-5}
        metrics["policy/kl_coef"] *= 1.5
        return msgspec.structs.replace(header, metrics=metrics), records

    told = tampered(kept, tmp_path, change)
    assert any("loss of policy/entropy" in line for line in told)
    assert any("advantage of t1 sample 0, token" in line for line in told)


def test_a_trajectory_said_to_be_left_out(kept, tmp_path):
    def change(header, records):
        records[3] = msgspec.structs.replace(records[3], dropped="it has no reward")
        return header, records

    told = tampered(kept, tmp_path, change)
    assert "step 2: reason left out of t1 sample 0 is '', stored is 'it has no reward'" in told


def test_the_command_says_how_it_went(kept, tmp_path, capsys):
    assert main([kept]) == 0
    assert capsys.readouterr().out.count("same") == STEPS
    assert main([str(tmp_path)]) == 1
    assert "has no stored steps (store.enabled, run.dir)" in capsys.readouterr().err
    assert main([kept, "--step", "9"]) == 1
    assert "step_9.log is not there; stored are 1 to 2" in capsys.readouterr().err
