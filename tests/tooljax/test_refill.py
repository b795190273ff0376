"""Groups of equal rewards: left out, kept, or replaced by sampling more prompts (DAPO's dynamic sampling)."""

from dataclasses import replace

import msgspec
import pytest
from training_batch_cases import config, make_batch, trajectory

from tooljax.config import Config
from tooljax.rollouts import Groups
from tooljax.training_batch import SURPLUS, ZERO_VARIANCE, refilled

FLAT, TEACHES = (1.0, 1.0), (1.0, 0.0)


def refilling(batches: int = 3, prompts: int = 2, **grpo) -> Config:
    made = config(zero_variance="refill", refill_max_batches=batches, scale_by_std=False, **grpo)
    return replace(made, data=replace(made.data, prompts_per_step=prompts))


def groups(*rewards: tuple[float, ...]) -> Groups:
    return [
        [trajectory(reward, task=i, sample=j) for j, reward in enumerate(group)]
        for i, group in enumerate(rewards)
    ]


class Sampler:
    """Gives the batches of a list, and notes which it was asked for."""

    def __init__(self, *batches: Groups):
        self.batches = batches
        self.asked: list[int] = []

    def __call__(self, number: int) -> Groups:
        self.asked.append(number)
        return self.batches[number]


def test_groups_that_teach_nothing_are_replaced_and_what_is_beyond_a_batch_is_left_out():
    sample = Sampler(groups(FLAT, TEACHES), groups(TEACHES, TEACHES), groups(TEACHES, TEACHES))
    found = refilled(refilling(), sample)
    assert sample.asked == [0, 1]
    assert [t.task_index for group in found for t in group] == [0, 0, 1, 1, 2, 2, 3, 3]
    batch, metrics, credit = make_batch(refilling(), found)
    assert credit.dropped == [[ZERO_VARIANCE] * 2, ["", ""], ["", ""], [SURPLUS] * 2]
    assert credit.advantages.tolist() == [[0, 0], [0.5, -0.5], [0.5, -0.5], [0, 0]]
    # Two trajectories of two tokens in each of the two groups
    assert metrics["perf/loss_tokens"] == batch.loss_tokens == 8
    assert metrics["rollout/refill_batches"] == 2
    assert metrics["reward/zero_variance_group_frac"] == 0.25


def test_a_step_whose_first_batch_teaches_asks_for_no_more():
    sample = Sampler(groups(TEACHES, TEACHES))
    assert refilled(refilling(), sample) == groups(TEACHES, TEACHES)
    assert sample.asked == [0]


def test_refilling_is_bounded_and_what_is_there_then_is_trained_on():
    sample = Sampler(groups(FLAT, FLAT), groups(FLAT, FLAT), groups(TEACHES, FLAT))
    found = refilled(refilling(), sample)
    assert sample.asked == [0, 1, 2]
    batch, metrics, _ = make_batch(refilling(), found)
    assert batch.loss_tokens == 4
    assert metrics["rollout/refill_batches"] == 3


def test_nothing_that_teaches_within_the_bound_is_an_empty_batch():
    sample = Sampler(groups(FLAT, FLAT), groups(FLAT, FLAT))
    batch, _, _ = make_batch(refilling(2), refilled(refilling(2), sample))
    assert sample.asked == [0, 1]
    assert batch.loss_tokens == 0


@pytest.mark.parametrize("how", ["skip", "keep"])
def test_without_refill_a_step_is_one_batch(how):
    sample = Sampler(groups(FLAT, FLAT))
    made = config(zero_variance=how)
    batch, metrics, credit = make_batch(made, refilled(made, sample))
    assert sample.asked == [0]
    assert "rollout/refill_batches" not in metrics
    assert batch.loss_tokens == (8 if how == "keep" else 0)
    assert credit.dropped == [["" if how == "keep" else ZERO_VARIANCE] * 2] * 2
    assert not credit.advantages.any()


def test_a_group_without_two_members_that_count_teaches_nothing_whatever_its_rewards():
    one = groups(TEACHES, TEACHES)
    one[0][1] = msgspec.structs.replace(one[0][1], scored=False)
    sample = Sampler(one, groups(TEACHES, FLAT))
    _, _, credit = make_batch(refilling(), refilled(refilling(), sample))
    assert sample.asked == [0, 1]
    assert credit.dropped[0] == [ZERO_VARIANCE, "it has no reward"]
    assert credit.dropped[1:3] == [["", ""]] * 2


def test_gdpo_refills_what_is_flat_in_every_reward():
    def told(*pairs: tuple[float, float]) -> Groups:
        made = groups(tuple(0.0 for _ in pairs))
        values = [{"acc": acc, "style": style} for acc, style in pairs]
        return [
            [
                msgspec.structs.replace(t, metrics=of_one)
                for t, of_one in zip(made[0], values, strict=True)
            ]
        ]

    made = refilling(prompts=1, adv_estimator="gdpo", reward_keys=("acc", "style"))
    sample = Sampler(told((1, 0.5), (1, 0.5)), told((1, 0.5), (1, 0.7)))
    found = refilled(made, sample)
    assert sample.asked == [0, 1]
    assert make_batch(made, found)[2].dropped == [[ZERO_VARIANCE] * 2, ["", ""]]
