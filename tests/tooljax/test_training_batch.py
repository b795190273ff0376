"""What a step does between rollouts and update: which trajectories count, and for how much."""

import msgspec
import numpy as np
import pytest

from rollout_sidecar.protocol import Status, TokenStream, Trajectory
from tooljax.config import Config
from tooljax.config.schema import BatchConfig, GrpoConfig
from tooljax.training_batch import UNTRAINABLE, make_batch

BATCH = BatchConfig(row_lengths=(8, 16), rows_per_microbatch=1)


def trajectory(reward, *, sampled=2, status: Status = "completed", task=0, sample=0, scored=True):
    """Three prompt tokens, then `sampled` completion tokens and one observation token that is never trained on."""
    tokens = [5, 6, 7, *([9] * sampled), 8]
    return Trajectory(
        task_index=task,
        sample_index=sample,
        task_id=str(task),
        seed=0,
        status=status,
        token_ids=tokens,
        prompt_tokens=3,
        loss_mask=[False] * 3 + [True] * sampled + [False],
        rollout_log_probs=[0.0] * 3 + [-1.0] * sampled + [0.0],
        reward=reward,
        scored=scored,
    )


def config(**grpo):
    return Config(grpo=GrpoConfig(group_size=2, **grpo), batch=BATCH)


def test_advantages_reach_exactly_the_sampled_tokens():
    groups = [[trajectory(1.0), trajectory(0.0, sampled=1)]]
    batch, metrics, _ = make_batch(config(scale_by_std=False), groups)
    # rewards 1 and 0: mean 0.5, so advantages 0.5 and -0.5
    (row, start, _), (other_row, other_start, _) = batch.placements
    np.testing.assert_array_equal(batch.advantages[row, start : start + 6], [0, 0, 0, 0.5, 0.5, 0])
    np.testing.assert_array_equal(
        batch.advantages[other_row, other_start : other_start + 5], [0, 0, 0, -0.5, 0]
    )
    assert metrics["perf/loss_tokens"] == 3
    assert metrics["reward/zero_variance_group_frac"] == 0


def test_skipped_groups_leave_the_denominator():
    """Pain point 20: equal rewards, up to rounding, teach nothing and must not dilute the others."""
    groups = [
        [trajectory(0.1 + 0.2), trajectory(0.3)],
        [trajectory(1.0), trajectory(0.0)],
    ]
    batch, metrics, _ = make_batch(config(), groups)
    assert metrics["reward/zero_variance_group_frac"] == 0.5
    assert batch.loss_tokens == 4
    kept, _, _ = make_batch(config(zero_variance="keep"), groups)
    assert kept.loss_tokens == 8
    assert np.sum(kept.advantages[kept.loss_mask] == 0) == 4


def test_a_trajectory_that_the_policy_is_not_to_blame_for_counts_for_nothing():
    groups = [
        [trajectory(1.0), trajectory(0.0), trajectory(0.0, status="engine_error")],
        [trajectory(1.0), trajectory(0.0), trajectory(0.0, sampled=0, status="prompt_too_long")],
    ]
    batch, metrics, _ = make_batch(config(scale_by_std=False), groups)
    assert batch.loss_tokens == 8
    assert sorted(set(batch.advantages[batch.loss_mask])) == [-0.5, 0.5]
    np.testing.assert_allclose(metrics["rollout/untrainable_frac"], 2 / 6)


def test_a_reward_function_that_failed_is_not_taken_for_a_reward_of_0():
    unscored = trajectory(0.0, scored=False)
    batch, metrics, _ = make_batch(
        config(scale_by_std=False), [[trajectory(1.0), trajectory(0.0), unscored]]
    )
    assert sorted(set(batch.advantages[batch.loss_mask])) == [-0.5, 0.5]
    np.testing.assert_allclose(metrics["rollout/untrainable_frac"], 1 / 3)


@pytest.mark.parametrize("status", UNTRAINABLE)
def test_what_ended_by_a_fault_is_not_trained_on(status):
    groups = [[trajectory(1.0), trajectory(0.0), trajectory(1.0, status=status)]]
    batch, metrics, _ = make_batch(config(scale_by_std=False), groups)
    assert batch.loss_tokens == 4
    np.testing.assert_allclose(metrics["rollout/untrainable_frac"], 1 / 3)


def stream(tokens: list[int], sampled: int) -> TokenStream:
    """The last `sampled` tokens are the policy's."""
    given = len(tokens) - sampled
    return TokenStream(
        token_ids=tokens,
        prompt_tokens=given,
        loss_mask=[False] * given + [True] * sampled,
        rollout_log_probs=[0.0] * given + [-1.0] * sampled,
        version_spans=[],
    )


def test_a_trajectory_of_several_streams_counts_once_among_rewards_and_with_all_its_tokens():
    """Pain point 3: rewards 1 and 0 give advantages 0.5 and -0.5, however many streams the first one has."""
    forked = msgspec.structs.replace(trajectory(1.0), earlier_streams=[stream([5, 6, 9], 1)])
    batch, metrics, _ = make_batch(config(scale_by_std=False), [[forked, trajectory(0.0)]])
    assert len(batch.placements) == 3
    row, start, length = batch.placements[0]
    assert batch.tokens[row, start : start + length].tolist() == [5, 6, 9]
    assert sorted(batch.advantages[batch.loss_mask]) == [-0.5, -0.5, 0.5, 0.5, 0.5]
    assert metrics["perf/loss_tokens"] == 5
    assert metrics["rollout/untrainable_frac"] == 0


def test_what_was_sampled_before_a_fork_is_trained_on_though_nothing_came_after_it():
    silent = trajectory(1.0, sampled=0)
    forked = msgspec.structs.replace(silent, earlier_streams=[stream([5, 6, 9, 9], 2)])
    batch, _, _ = make_batch(config(scale_by_std=False), [[forked, trajectory(0.0)]])
    assert batch.loss_tokens == 4


def test_a_batch_with_nothing_to_learn_is_empty_not_an_error():
    batch, metrics, _ = make_batch(config(), [[trajectory(1.0), trajectory(1.0)]])
    assert batch.loss_tokens == 0
    assert metrics["perf/loss_tokens"] == 0
