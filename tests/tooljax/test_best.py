"""Which checkpoint is the best of a run."""

import math

import pytest

from tooljax.checkpoint import Best
from tooljax.config.schema import EvaluateConfig
from tooljax.evaluation.best import better, check_best_metric

NAME = "eval/accuracy"


def test_the_first_value_and_each_higher_one():
    config = EvaluateConfig()
    first = better(config, None, 2, {NAME: 0.5})
    assert first == Best(2, NAME, 0.5)
    assert better(config, first, 4, {NAME: 0.75}) == Best(4, NAME, 0.75)
    # As good is not better: the earlier one stays.
    assert better(config, first, 4, {NAME: 0.5}) is None
    assert better(config, first, 4, {NAME: 0.25}) is None


def test_less_may_be_better():
    config = EvaluateConfig(best_metric="eval/rollout/turns/mean", best_mode="min")
    best = Best(1, "eval/rollout/turns/mean", 3.0)
    assert better(config, best, 2, {"eval/rollout/turns/mean": 2.0}) == Best(
        2, "eval/rollout/turns/mean", 2.0
    )
    assert better(config, best, 2, {"eval/rollout/turns/mean": 4.0}) is None


@pytest.mark.parametrize("metrics", [{}, {NAME: math.nan}, {NAME: math.inf}])
def test_without_a_number_nothing_is_better(metrics):
    assert better(EvaluateConfig(), None, 1, metrics) is None


def test_off_or_by_another_metric():
    assert better(EvaluateConfig(best_metric=""), None, 1, {NAME: 1.0}) is None
    other = Best(1, "eval/reward/mean", 9.0)
    assert better(EvaluateConfig(), other, 2, {NAME: 0.1}) == Best(2, NAME, 0.1)


@pytest.mark.parametrize("name", ["eval/acuracy", "accuracy", "reward/mean"])
def test_a_metric_that_no_evaluation_gives_is_refused(name):
    with pytest.raises(ValueError, match=f"evaluate.best_metric='{name}' is no metric of evaluat"):
        check_best_metric(EvaluateConfig(best_metric=name))


@pytest.mark.parametrize("name", ["", NAME, "eval/reward/mean", "eval/pass_at_4"])
def test_what_an_evaluation_gives_is_taken(name):
    check_best_metric(EvaluateConfig(best_metric=name))
