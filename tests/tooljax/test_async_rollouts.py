"""Rollouts ahead of their step: how old tokens may be, what a checkpoint holds, oversampling, and what breaks."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import msgspec
import pytest
from served_sidecars import make_tasks, make_tokenizer, serve
from training_batch_cases import trajectory

from rollout_sidecar.client import SidecarError
from rollout_sidecar.engines.base import GenerateRequest, GenerateResult
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.protocol import derive_seed
from tooljax.async_rollouts import AsyncRollouts
from tooljax.config import Config, ConfigError, load_config
from tooljax.config.schema import (
    AsyncConfig,
    DataConfig,
    GrpoConfig,
    LimitsConfig,
    RunConfig,
    WeightsConfig,
)
from tooljax.curriculum.source import open_source
from tooljax.evaluate import limits, reward_weights, sampling
from tooljax.rollouts import InterruptedRollout, Rollout, Sidecars
from tooljax.training_batch import sampled

TASKS = make_tasks(12)
STEPS = 6
NOBODY = lambda *_: None  # noqa: E731


class Gated(ScriptedEngine):
    """Answers a prompt of a slow task only when it is let."""

    slow: tuple[str, ...] = ()

    def __init__(self, tokenizer, script, **kwargs: Any):
        super().__init__(tokenizer, script, **kwargs)
        self.decode = tokenizer.decode
        self.ended: set[str] = set()
        self.let = False
        self.waiting = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        text = self.decode(request.token_ids)
        if any(name in text for name in self.slow):
            self.waiting += 1
            while not self.let and request.trajectory_id not in self.ended:
                await asyncio.sleep(0.01)
        return await super().generate(request)

    async def abort(self, trajectory_id: str) -> None:
        self.ended.add(trajectory_id)
        await super().abort(trajectory_id)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def settings(lag: int = 0, oversampling: float = 1.0, **data: Any) -> Config:
    return Config(
        run=RunConfig(steps=STEPS),
        data=DataConfig(prompts_per_step=2, **data),
        grpo=GrpoConfig(group_size=2),
        limits=LimitsConfig(max_tokens_per_turn=64),
        async_=AsyncConfig(max_policy_lag=lag, oversampling=oversampling),
    )


def opened(config: Config, sidecars: Sidecars) -> AsyncRollouts:
    return AsyncRollouts(config, sidecars, open_source(config, TASKS))


def connect(served, **kwargs: Any) -> Sidecars:
    urls = [one.url for one in served]
    return Sidecars(urls, token=None, timeout_s=30.0, down_timeout_s=0.5, **kwargs)


def push(sidecars: Sidecars, step: int) -> None:
    tensors = [("a", jnp.full((4,), step, jnp.float32))]
    sidecars.push(tensors, step=step, weights=WeightsConfig(part_bytes=1024, timeout_s=10.0))


def by_seed(request, turn: int) -> str:
    return f"#### {request.seed % 10}"


def ids(groups) -> list[str]:
    return [group[0].task_id for group in groups]


def lags(sidecars: Sidecars, groups, step: int) -> set[int]:
    return {sidecars.policy_lag(t, step) for group in groups for t in group}


# --- which tasks, and how old -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_token_is_older_than_the_bound_and_tasks_and_seeds_are_those_of_their_step(
    tokenizer, lag
):
    with serve(tokenizer, by_seed, count=2) as served, connect(served) as sidecars:
        rollouts = opened(settings(lag), sidecars)
        taken, seen = [], []
        for step in range(STEPS):
            push(sidecars, step)
            groups = rollouts.take(step, NOBODY)
            for asked in rollouts._asked.values():  # during a long update, what was started ends
                asked.take()
            taken.append(ids(groups))
            seen.append(lags(sidecars, groups, step))
            assert {t.status for group in groups for t in group} == {"completed"}
            seeds = [[t.seed for t in group] for group in groups]
            assert seeds == [[derive_seed(0, step, i, s) for s in range(2)] for i in range(2)]
    source = open_source(settings(), TASKS)
    assert taken == [[task.task_id for task in source.next()] for _ in range(STEPS)]
    # The first are started with the first weights; then each is ended long before its turn.
    assert seen == [{min(step, lag)} for step in range(STEPS)]


def test_rollouts_go_on_under_weights_that_are_pushed_meanwhile(tokenizer):
    class Slow(Gated):
        slow = ("Problem",)

    with serve(tokenizer, ["#### 1"], engine=Slow) as served, connect(served) as sidecars:
        engine: Any = served[0].engine
        engine.slow = ("Problem 2?", "Problem 3?")
        rollouts = opened(settings(1, shuffle=False), sidecars)
        push(sidecars, 0)
        rollouts.take(0, NOBODY)
        push(sidecars, 1)  # while those of step 1 have not one token
        engine.let = True
        assert lags(sidecars, rollouts.take(1, NOBODY), 1) == {0}


def test_what_a_sidecar_reports_to_be_too_old_teaches_nothing(tokenizer, monkeypatch):
    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        rollouts = opened(settings(1), sidecars)
        push(sidecars, 0)
        monkeypatch.setattr(
            sidecars, "policy_lag", lambda trajectory, step: 2 * trajectory.sample_index
        )
        groups = rollouts.take(0, NOBODY)
    assert [[t.status for t in group] for group in groups] == [["completed", "aborted"]] * 2
    assert groups[0][1].error == "a token of it is 2 steps old, more than async.max_policy_lag=1"


def test_without_lag_a_step_is_what_a_plain_rollout_gives(tokenizer):
    config = settings()
    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        push(sidecars, 0)
        groups = opened(config, sidecars).take(0, NOBODY)
        assert not sidecars._open
        plain = sidecars.rollout(
            open_source(config, TASKS).next(),
            samples=2,
            seed=(0, 0),
            sampling=sampling(config.sampling),
            limits=limits(config.limits),
            reward_weights=reward_weights(config.reward, 0),
        )
    assert [[essence(t) for t in group] for group in groups] == [
        [essence(t) for t in group] for group in plain
    ]


def essence(trajectory) -> dict[str, Any]:
    record = msgspec.to_builtins(trajectory)
    for turn in record["turns"]:
        del turn["generate_s"], turn["cached_tokens"]
    return {key: value for key, value in record.items() if key not in ("total_s", "tool_s")}


# --- positions ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_position_of_the_first_step_that_was_not_trained_on(tokenizer):
    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        rollouts = opened(settings(2), sidecars)
        push(sidecars, 0)
        rollouts.take(0, NOBODY)
        saved = rollouts.state()
        push(sidecars, 1)
        push(sidecars, 2)
        expected = [ids(rollouts.take(step, NOBODY)) for step in (1, 2)]
        again = opened(settings(2), sidecars)
        again.restore(saved)
        assert [ids(again.take(step, NOBODY)) for step in (1, 2)] == expected
        again.give_up()
        rollouts.give_up()
        assert rollouts.state()["step"] == again.state()["step"] == 3


def test_interrupted_all_that_was_started_is_still_to_come_and_aborted(tokenizer):
    class Slow(Gated):
        slow = tuple(f"Problem {i}?" for i in range(12))

    with serve(tokenizer, ["#### 1"], engine=Slow) as served, connect(served) as sidecars:
        rollouts = opened(settings(1), sidecars)
        before = rollouts.state()
        push(sidecars, 0)

        engine: Any = served[0].engine

        def interrupt() -> None:
            deadline = time.monotonic() + 20
            while engine.waiting < 8 and time.monotonic() < deadline:
                time.sleep(0.01)
            sidecars.stop_requested = True
            for call in list(sidecars._open):
                call.cancel()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(InterruptedRollout):
            rollouts.take(0, NOBODY)
        thread.join()
        assert engine.waiting == 8  # of two steps
        assert rollouts.state() == before
        assert not sidecars._open


# --- what breaks --------------------------------------------------------------------------------------------------


def test_sidecars_that_die_meanwhile_are_an_error_at_the_next_take(tokenizer):
    class Slow(Gated):
        slow = tuple(f"Problem {i}?" for i in range(12))

    with serve(tokenizer, ["#### 1"], engine=Slow) as served, connect(served) as sidecars:
        sidecars.fleet.period_s = 0.1
        rollouts = opened(settings(1, shuffle=False), sidecars)
        push(sidecars, 0)
        engine: Any = served[0].engine
        engine.slow = ("Problem 2?", "Problem 3?")
        rollouts.take(0, NOBODY)  # its own tasks are answered, the next step's are not
        push(sidecars, 1)
        served[0].do(served[0].sidecar.stop())
        started = time.monotonic()
        with pytest.raises(SidecarError, match="no sidecar could be used for 0.5 s"):
            rollouts.take(1, NOBODY)
        assert time.monotonic() - started < 20
    assert not sidecars._open or all(call.done() for call in sidecars._open)


# --- oversampling -------------------------------------------------------------------------------------------------


def test_the_first_complete_groups_are_taken_in_their_order_and_the_others_are_aborted(tokenizer):
    class Slow(Gated):
        slow = ("Problem 1?",)

    config = settings(oversampling=1.5, shuffle=False)
    with serve(tokenizer, ["#### 1"], engine=Slow) as served, connect(served) as sidecars:
        rollouts = opened(config, sidecars)
        push(sidecars, 0)
        groups = rollouts.take(0, NOBODY)
        assert ids(groups) == ["t0", "t2"]
        assert [[t.task_index for t in group] for group in groups] == [[0, 0], [1, 1]]
        assert groups[1][0].seed == derive_seed(0, 0, 2, 0)
        # Those of the next step are the next three, whatever came of the first.
        push(sidecars, 1)
        assert ids(rollouts.take(1, NOBODY)) == ["t3", "t4"]


def test_too_few_tasks_for_oversampling_are_told():
    with pytest.raises(
        ValueError, match=r"oversampling=8 times data.prompts_per_step=2 are 16 tasks .* has 12"
    ):
        open_source(settings(oversampling=8.0), TASKS)


# --- several batches of a step ------------------------------------------------------------------------------------


class Made(Rollout):
    """One that has ended."""

    def __init__(self, groups):
        self.groups = groups

    def take(self):
        return self.groups

    def give_up(self):
        pass


def test_each_batch_of_a_refill_has_seeds_of_its_own_and_interrupted_all_its_tasks_come_again(
    tokenizer, monkeypatch
):
    config = settings()
    config = replace(config, grpo=replace(config.grpo, zero_variance="refill"))
    asked = []

    def start(tasks, *, seed, **options):
        asked.append((tuple(task.task_id for task in tasks), seed))
        if len(asked) == 3:
            raise InterruptedRollout
        return Made([[trajectory(0.0, task=i, sample=j) for j in range(2)] for i in range(2)])

    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        monkeypatch.setattr(sidecars, "start", start)
        rollouts = opened(config, sidecars)
        before = rollouts.state()
        with pytest.raises(InterruptedRollout):
            rollouts.take(5, NOBODY)
        assert [seed for _, seed in asked] == [(0, 5), (0, 5, 1), (0, 5, 2)]
        assert len({tasks for tasks, _ in asked}) == 3
        assert rollouts.state() == before
        # Taken up again, they are the same.
        groups = rollouts.take(5, NOBODY)
    assert asked[3:] == [*asked[:3], (asked[6][0], (0, 5, 3))]
    assert [group[0].task_index for group in groups] == list(range(8))


def test_remax_asks_for_a_greedy_trajectory_of_each_prompt(tokenizer, monkeypatch):
    config = settings()
    config = replace(config, grpo=replace(config.grpo, adv_estimator="remax"))
    asked = []

    def start(tasks, *, samples, seed, sampling, **options):
        asked.append(([task.task_id for task in tasks], samples, seed, sampling.temperature))
        return Made([[trajectory(1.0, task=i) for _ in range(samples)] for i in range(2)])

    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        monkeypatch.setattr(sidecars, "start", start)
        groups = opened(config, sidecars).take(5, NOBODY)
    (tasks, *samples), (again, *greedy) = asked
    assert tasks == again
    assert samples == [2, (0, 5), config.sampling.temperature]
    assert greedy == [1, (0, 5), 0.0]
    assert [[t.sample_index for t in group] for group in groups] == [[0, 0, 2]] * 2
    assert len(sampled(config.grpo, groups)) == 4


# --- the config ---------------------------------------------------------------------------------------------------


def test_both_settings_are_read_from_files_and_the_command_line(tmp_path):
    (tmp_path / "a.gin").write_text("async.max_policy_lag = 2\nasync.oversampling = 1.25\n")
    config = load_config([tmp_path / "a.gin"], ["async.max_policy_lag=1"])
    assert config.async_ == AsyncConfig(max_policy_lag=1, oversampling=1.25)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["sidecar.share_gpu=True"], r"async.max_policy_lag=1 samples while the trainer updates"),
        (["curriculum.kind=pools"], r"by which curriculum.kind chooses; set async.max_policy_lag"),
        (["grpo.zero_variance=refill"], r"async.max_policy_lag=1 cannot go with .*'refill'"),
        (
            ["async.oversampling=1.5", "grpo.adv_estimator=remax"],
            r"async.oversampling=1.5 aborts groups, and grpo.adv_estimator='remax'",
        ),
        (
            ["async.oversampling=1.5", "async.max_policy_lag=0", "curriculum.kind=pools"],
            r"async.oversampling=1.5 takes tasks before .* set async.oversampling = 1.0",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config([], ["async.max_policy_lag=1", *wrong])


def test_the_default_is_the_synchronous_run():
    assert replace(Config()).async_ == AsyncConfig(0, 1.0)
