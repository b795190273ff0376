"""Whole runs in this process, with an engine that can be made to sample wrongly: what guard rails do to weights,
checkpoints and data; which checkpoint is kept as the best; and what a stored step of such a run replays to."""

import json
import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from gate_cases import make_config, make_folder, serve_model

from tooljax import train as training
from tooljax.async_rollouts import AsyncRollouts
from tooljax.checkpoint import Checkpointer
from tooljax.config.schema import (
    AsyncConfig,
    CheckpointConfig,
    CurriculumConfig,
    DataConfig,
    EvaluateConfig,
    GateConfig,
    GrpoConfig,
    GuardConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrackConfig,
)
from tooljax.evaluate import limits, reward_weights, sampling
from tooljax.guards import GuardStop
from tooljax.policy import Policy, abstract_state, make_updater
from tooljax.replay import replay_step
from tooljax.rollouts import Sidecars
from tooljax.store import read_step
from tooljax.train import Run, train

REWARD = """
def count(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) % 7 / 7, "acc": 0.0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def served(folder):
    with serve_model(folder) as served:
        yield served


@contextmanager
def opened(served):
    """As a run that begins opens them: it numbers its weights after those that are served."""
    with Sidecars([served.url], token=None, timeout_s=60.0) as sidecars:
        yield sidecars


@pytest.fixture
def sidecars(served):
    with opened(served) as sidecars:
        yield sidecars


@pytest.fixture(scope="module")
def base(folder, served, tmp_path_factory):
    place = tmp_path_factory.mktemp("base")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Problem {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(8)
    ]
    (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # An untrained policy solves nothing, and rewards that are all equal teach nothing.
    (place / "reward.py").write_text(REWARD)
    served.sidecar.agent.scorer.reward = f"{place / 'reward.py'}:count"
    off: dict[str, Any] = {
        "max_truncated_frac": 0.0,
        "max_call_rate_fall": 0.0,
        "max_accuracy_fall": 0.0,
    }
    return make_config(
        folder,
        reward=RewardConfig(function=f"{place / 'reward.py'}:count"),
        run=RunConfig(dir=str(place / "run"), steps=3, progress="off"),
        data=DataConfig(train=(str(place / "train.jsonl"),), prompts_per_step=2),
        grpo=GrpoConfig(group_size=2, kl_coef=0.0, zero_variance="keep", scale_by_std=False),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
        track=TrackConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=1, keep=9),
        gate=GateConfig(every_pushes=0, prompts=2, max_tokens=8),
        guard=GuardConfig(max_mismatch_kl=0.0, **off),
    )


@pytest.fixture(scope="module")
def updater(base):
    policy = Policy.load(base.model.path, "float32")
    options: dict[str, Any] = {"total_updates": 3, "learning_rate": base.optimizer.learning_rate}
    return make_updater(base, policy, **options), policy


@pytest.fixture(scope="module", autouse=True)
def compiled_once(updater):
    """All runs here make the same updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_updater", lambda *_, **__: updater[0])
        yield


@pytest.fixture(scope="module")
def weights(updater):
    """Reads those of a run's checkpoint."""
    abstract = abstract_state(updater[0], updater[1].params)

    def read(config, step: int) -> list[np.ndarray]:
        with Checkpointer(f"{config.run.dir}/checkpoints", keep=9) as checkpoints:
            found = checkpoints.restore(abstract, step=step)
        assert found is not None
        return [np.asarray(leaf) for leaf in jax.tree.leaves(found[1].params)]

    return read


@pytest.fixture
def config(base, tmp_path):
    return replace(base, run=replace(base.run, dir=str(tmp_path / "run")))


@pytest.fixture(scope="module")
def unguarded(base, served):
    """A run without guard rails, whose evaluations say what is made up here; only the newest and the best are kept."""
    accuracies = iter([0.9, 0.1, 0.5, 0.2])  # of the base model, then of each step
    config = replace(
        base,
        evaluate=EvaluateConfig(every_steps=1),
        data=replace(base.data, eval=base.data.train),
        checkpoint=CheckpointConfig(every_steps=50, keep=1),
    )

    def told(*_):
        return SimpleNamespace(metrics={"eval/accuracy": next(accuracies)})

    with pytest.MonkeyPatch.context() as patch, opened(served) as sidecars:
        patch.setattr(training, "evaluate", told)
        patch.setattr(training, "keep", lambda *_, **__: None)  # it has no trajectories
        assert train(config, sidecars) == 3
    return config


def guarded(config, action: Any):
    """Samples of a wrong temperature are beyond the limit; those of the right one have about 1e-10. Every trajectory
    of this untrained policy runs into its token limit."""
    return replace(config, guard=replace(config.guard, action=action, max_mismatch_kl=1e-4))


@pytest.fixture
def samples_wrongly(served, sidecars, monkeypatch):
    """Call it with the steps whose rollouts are to be sampled at another temperature than is asked for."""
    engine = served.sidecar.agent.engine
    generate = type(engine).generate

    def in_steps(*steps: int) -> None:
        async def wrong(request):
            sampling = request.sampling
            if engine.policy_version in [sidecars.version_of(step - 1) for step in steps]:
                sampling = msgspec.structs.replace(sampling, temperature=1.0)
            return await generate(engine, replace(request, sampling=sampling))

        monkeypatch.setattr(engine, "generate", wrong)

    return in_steps


def rows(config) -> list[dict[str, float]]:
    with open(f"{config.run.dir}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all((a == b).all() for a, b in zip(one, other, strict=True))


def test_skip_leaves_the_update_out_and_goes_on(config, sidecars, samples_wrongly, weights):
    samples_wrongly(2)
    config = guarded(config, "skip")
    assert train(config, sidecars) == 3
    logged = rows(config)
    assert [row["guard/alarms"] for row in logged] == [0, 1, 0]
    assert [row["guard/skipped"] for row in logged] == [0, 1, 0]
    assert [row["optim/skipped"] for row in logged] == [0, 1, 0]
    assert logged[1]["policy/kl_mismatch"] > 1e-3
    one, two, three = (weights(config, step) for step in (1, 2, 3))
    assert same(one, two)
    assert not same(two, three)
    for step in (1, 2, 3):
        report = replay_step(config.run.dir, step)
        assert not report.mismatches
        assert report.compared["loss"] >= 5


def test_rollback_takes_the_weights_of_the_newest_checkpoint_and_the_data_goes_on(
    config, sidecars, samples_wrongly, weights
):
    samples_wrongly(4)
    config = guarded(config, "rollback")
    config = replace(
        config,
        run=replace(config.run, steps=4),
        checkpoint=CheckpointConfig(every_steps=2, keep=9),
    )
    assert train(config, sidecars) == 4
    assert [row["guard/rolled_back_steps"] for row in rows(config)] == [0, 0, 0, 2]
    assert same(weights(config, 2), weights(config, 4))
    # Eight tasks, two a step: all were taken, none twice.
    taken = [task for step in (1, 2, 3, 4) for task in read_step(config.run.dir, step).header.tasks]
    assert len(taken) == len(set(taken)) == 8


def test_stop_saves_nothing_of_what_went_wrong(
    config, served, sidecars, unguarded, samples_wrongly, weights
):
    samples_wrongly(2)
    config = guarded(config, "stop")
    with pytest.raises(
        GuardStop, match=r"policy/kl_mismatch=0.* The run stops: guard.action is stop"
    ):
        train(config, sidecars)
    assert [row["guard/alarms"] for row in rows(config)] == [0, 1]
    assert Checkpointer(f"{config.run.dir}/checkpoints").steps() == [1]
    # With that mended, it goes on from there, and ends where a run without guard rails does, bit for bit.
    samples_wrongly()
    with opened(served) as again:
        assert train(config, again) == 3
    assert [row["step"] for row in rows(config)] == [1, 2, 3]
    for step in (2, 3):
        assert same(weights(config, step), weights(unguarded, step))


def test_what_rollouts_show_leaves_the_batch_out_before_anything_is_computed(config, sidecars):
    config = replace(
        config,
        run=replace(config.run, steps=1),
        guard=GuardConfig(action="skip", max_truncated_frac=0.1),
    )
    assert train(config, sidecars) == 1
    (row,) = rows(config)
    assert row["rollout/truncated_frac"] > 0.1
    assert (row["guard/skipped"], row["optim/skipped"]) == (1, 1)
    assert "policy/loss" not in row
    report = replay_step(config.run.dir, 1)
    assert not report.mismatches
    assert list(report.skipped["loss"]) == [
        "no update was made, so there are no log-probs (guard/skipped)"
    ]


def test_a_guard_that_is_off_has_no_alarms(unguarded):
    assert [row.get("guard/alarms") for row in rows(unguarded)] == [None, 0, 0, 0]
    assert not any("guard/skipped" in row for row in rows(unguarded))


def test_the_best_checkpoint_is_kept_beside_the_newest(unguarded):
    with Checkpointer(f"{unguarded.run.dir}/checkpoints", keep=1) as checkpoints:
        assert checkpoints.best() == (2, "eval/accuracy", 0.5)
        assert checkpoints.steps() == [2, 3]


def test_a_best_metric_that_is_none_is_told_before_anything_is_loaded(config, sidecars):
    config = replace(config, evaluate=EvaluateConfig(best_metric="eval/acuracy"))
    with pytest.raises(ValueError, match="evaluate.best_metric='eval/acuracy' is no metric"):
        train(config, sidecars)


def test_a_curriculum_goes_on_where_it_was_saved(config, served, tmp_path):
    """Four steps are the first pass over 8 tasks; then they come by pools."""

    def run(dir: str, steps: int) -> tuple[list[list[str]], list[dict[str, float]]]:
        own = replace(
            config,
            curriculum=CurriculumConfig(kind="pools"),
            checkpoint=CheckpointConfig(every_steps=50),
            run=replace(config.run, dir=str(tmp_path / dir), steps=steps),
        )
        with opened(served) as sidecars:
            assert train(own, sidecars) == steps
        lines = (tmp_path / dir / "metrics.jsonl").read_text().splitlines()
        curriculum = [
            {name: value for name, value in json.loads(line).items() if "curriculum/" in name}
            for line in lines
        ]
        tasks = [list(read_step(own.run.dir, step + 1).header.tasks) for step in range(steps)]
        return tasks, curriculum

    tasks, metrics = run("whole", 5)
    run("parted", 3)
    assert run("parted", 5) == (tasks, metrics)
    assert len({task for step in tasks[:4] for task in step}) == 8
    unknown = [step["curriculum/pool/unknown/size"] for step in metrics]
    assert unknown == [6, 4, 2, 0, 0]
    # The reward function reports acc=0
    assert [step["curriculum/pool/hard/share"] for step in metrics] == [0, 0, 0, 0, 1]
    assert metrics[-1]["curriculum/pass_rate/mean"] == 0


# --- rollouts ahead of their step ---------------------------------------------------------------------------------


class AsItWas(AsyncRollouts):
    """Takes tasks, rolls them out, waits: the synchronous step, without anything ahead."""

    def take(self, step, on_progress):
        """See AsyncRollouts."""
        return self._sidecars.rollout(
            self._source.next(step, 0),
            samples=self._config.grpo.group_size,
            seed=(self._config.run.seed, step),
            sampling=sampling(self._config.sampling),
            limits=limits(self._config.limits),
            reward_weights=reward_weights(self._config.reward, step),
            step=step,
        )


def test_without_lag_a_run_is_the_synchronous_run_bit_for_bit(
    config, sidecars, unguarded, weights, monkeypatch
):
    monkeypatch.setattr(training, "AsyncRollouts", AsItWas)
    assert unguarded.async_.max_policy_lag == 0
    assert train(config, sidecars) == 3
    for step in (2, 3):  # those that it has kept
        assert same(weights(config, step), weights(unguarded, step))


def test_a_run_ahead_that_is_interrupted_goes_on_with_the_same_tasks(
    config, served, unguarded, monkeypatch
):
    config = replace(config, async_=AsyncConfig(max_policy_lag=1))
    store_step = Run.store_step

    def interrupted(self, step, *args):
        store_step(self, step, *args)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, opened(served) as sidecars:
        patch.setattr(Run, "store_step", interrupted)
        assert train(config, sidecars) == 1
    with opened(served) as sidecars:
        assert train(config, sidecars) == 3
    for step in (1, 2, 3):
        mine, theirs = (read_step(each.run.dir, step).header.tasks for each in (config, unguarded))
        assert list(mine) == list(theirs)
    assert [row["step"] for row in rows(config)] == [1, 2, 3]
    assert all(0 <= row["policy/lag/max"] <= 1 for row in rows(config))
    assert all(row["policy/lag/dropped_frac"] == 0 for row in rows(config))
