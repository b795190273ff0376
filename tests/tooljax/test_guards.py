"""Guard rails: each rule with the fault that it is for injected into what a step logs, and what each action does."""

import json
import logging
import math

import pytest

from tooljax.config import load_config
from tooljax.config.schema import GuardConfig
from tooljax.guards import Guard, GuardStop
from tooljax.metrics import check_names

HEALTHY = {
    "policy/kl_mismatch": 1e-4,
    "policy/entropy": 1.0,
    "optim/grad_norm": 0.5,
    "rollout/truncated_frac": 0.1,
    "tools/use_rate": 0.8,
    "rollout/accuracy": 0.5,
    "reward/mean": 0.5,
}

LIMITS = {"min_entropy": 0.2, "max_entropy": 3.0, "max_grad_norm": 10.0}


def step(guard: Guard, number: int, **faults: float) -> tuple[str, bool]:
    """One step of the loop: why its batch is left out, and whether to roll back."""
    metrics = HEALTHY | {name.replace("__", "/"): value for name, value in faults.items()}
    why = guard.before_update(number, metrics)
    return why, guard.after_update(number, {} if why else metrics)


def make(action: str = "skip", **fields) -> Guard:
    return Guard(GuardConfig(action=action, **(LIMITS | fields)))  # type: ignore[arg-type]


# --- the rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "value", "sentence"),
    [
        (
            "policy/kl_mismatch",
            0.3,
            "guard: policy/kl_mismatch=0.3 at step 7 is above guard.max_mismatch_kl=0.1: engine and trainer disagree",
        ),
        (
            "policy/entropy",
            0.05,
            "guard: policy/entropy=0.05 at step 7 is below guard.min_entropy=0.2: the policy no longer explores",
        ),
        (
            "policy/entropy",
            5.0,
            "guard: policy/entropy=5 at step 7 is above guard.max_entropy=3: the policy falls apart into noise",
        ),
        (
            "optim/grad_norm",
            250.0,
            "guard: optim/grad_norm=250 at step 7 is above guard.max_grad_norm=10: look at policy/ratio_max",
        ),
        (
            "optim/grad_norm",
            math.nan,
            "guard: optim/grad_norm=nan at step 7 is above guard.max_grad_norm=10: look at policy/ratio_max",
        ),
    ],
)
def test_what_an_update_shows(fault, value, sentence, caplog):
    guard = make()
    assert step(guard, 6) == ("", False)
    assert guard.metrics() == {"guard/alarms": 0.0, "guard/skipped": 0.0}
    assert not caplog.records
    assert step(guard, 7, **{fault.replace("/", "__"): value}) == ("", False)
    assert guard.metrics() == {"guard/alarms": 1.0, "guard/skipped": 1.0}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(sentence)
    # The updater itself leaves such an update out.
    low, high = guard.update_limits()[fault]
    assert not low <= value <= high
    assert low <= HEALTHY[fault] <= high


def test_truncation_is_known_before_the_update():
    guard = make()
    why, _ = step(guard, 1, rollout__truncated_frac=0.75)
    assert why == "guard: rollout/truncated_frac"
    assert guard.metrics() == {"guard/alarms": 1.0, "guard/skipped": 1.0}
    assert step(guard, 2) == ("", False)


def test_a_policy_that_stops_calling_tools(caplog):
    guard = make(window=4)
    for number in range(4):
        assert step(guard, number) == ("", False)
    # Down by less than half of the 0.8 that it was at
    assert step(guard, 5, tools__use_rate=0.41)[0] == ""
    assert step(guard, 6, tools__use_rate=0.39)[0] == "guard: tools/use_rate"
    assert (
        caplog.records[-1]
        .getMessage()
        .startswith(
            "guard: tools/use_rate=0.39 at step 6 is below the 0.8 that it was at by more than "
            "guard.max_call_rate_fall=0.5 of that: the policy stops calling tools"
        )
    )
    # What has collapsed does not become the level to compare with.
    for number in range(7, 20):
        assert step(guard, number, tools__use_rate=0.1)[0] == "guard: tools/use_rate"


def test_a_task_that_takes_no_tools_has_no_collapse():
    guard = make(window=4)
    for number, rate in enumerate([0.09] * 4 + [0.0] * 8):
        assert step(guard, number, tools__use_rate=rate)[0] == ""


def test_reward_that_rises_while_accuracy_falls(caplog):
    guard = make(window=8)
    hacked = [
        {"reward__mean": 0.5 + 0.05 * i, "rollout__accuracy": 0.6 - 0.05 * i} for i in range(8)
    ]
    found = [step(guard, number, **faults)[0] for number, faults in enumerate(hacked)]
    # Means of halves: accuracy 0.525 and 0.325, reward 0.575 and 0.775
    assert found == [""] * 7 + ["guard: rollout/accuracy"]
    assert (
        caplog.records[-1]
        .getMessage()
        .startswith(
            "guard: rollout/accuracy=0.325 at step 7 is lower by 0.2 than before, more than "
            "guard.max_accuracy_fall=0.1, while reward/mean rose by 0.2: the reward is earned by something else"
        )
    )


@pytest.mark.parametrize(
    ("reward", "accuracy"),
    [(+0.05, +0.05), (-0.05, -0.05), (0.0, -0.05), (+0.05, -0.005)],
    ids=["both rise", "both fall", "reward stays", "accuracy falls by little"],
)
def test_trends_that_are_no_hacking(reward, accuracy):
    guard = make(window=8)
    for i in range(12):
        faults = {"reward__mean": 0.5 + reward * i, "rollout__accuracy": 0.6 + accuracy * i}
        assert step(guard, i, **faults)[0] == ""


def test_noise_is_no_hacking():
    """Differences of halves within two standard errors: +-0.3 around the same mean, up in one and down in the other."""
    guard = make(window=8)
    for i in range(40):
        sign = (-1) ** (i // 2)
        faults = {"reward__mean": 0.5 - 0.3 * sign, "rollout__accuracy": 0.5 + 0.3 * sign}
        assert step(guard, i, **faults)[0] == ""


def test_hacking_seen_by_evaluations_is_acted_on_in_the_next_step():
    guard = make()
    for number, accuracy in enumerate([0.7, 0.7, 0.5, 0.5]):
        # Two steps between two evaluations; training accuracy says nothing, as where it is not reported.
        for sub in range(2):
            metrics = {**HEALTHY, "reward/mean": 0.5 + 0.1 * number}
            del metrics["rollout/accuracy"]
            assert guard.before_update(2 * number + sub, metrics) == ""
            guard.after_update(2 * number + sub, metrics)
        guard.after_evaluation(2 * number + 1, {"eval/accuracy": accuracy})
    assert guard.metrics() == {"guard/alarms": 1.0, "guard/skipped": 0.0}
    assert step(guard, 8)[0] == "guard: eval/accuracy"
    assert guard.metrics()["guard/skipped"] == 1
    assert step(guard, 9)[0] == ""


@pytest.mark.parametrize(
    "field",
    ["max_mismatch_kl", "min_entropy", "max_entropy", "max_grad_norm", "max_truncated_frac"]
    + ["max_call_rate_fall", "max_accuracy_fall"],
)
def test_a_limit_of_0_is_none(field):
    guard = make("skip", window=4, **{field: 0.0})
    faults = {
        "max_mismatch_kl": {"policy__kl_mismatch": 9.0},
        "min_entropy": {"policy__entropy": 0.0},
        "max_entropy": {"policy__entropy": 99.0},
        "max_grad_norm": {"optim__grad_norm": 1e9},
        "max_truncated_frac": {"rollout__truncated_frac": 1.0},
    }
    if field in faults:
        assert step(guard, 0, **faults[field]) == ("", False)
        assert guard.metrics()["guard/alarms"] == 0
        return
    for i in range(12):
        fall = {"tools__use_rate": 0.8 if i < 6 else 0.0}
        if field == "max_accuracy_fall":
            fall = {"reward__mean": 0.05 * i, "rollout__accuracy": 0.9 - 0.05 * i}
        assert step(guard, i, **fall)[0] == ""


def test_a_metric_that_a_step_lacks_is_no_alarm():
    guard = make()
    assert guard.before_update(1, {}) == ""
    assert not guard.after_update(1, {})
    assert guard.metrics()["guard/alarms"] == 0


# --- what is done -------------------------------------------------------------------------------------------------


def test_warn_says_so_once_and_changes_nothing(caplog):
    guard = make("warn")
    assert guard.update_limits() == {}
    for number in range(3):
        assert step(guard, number, optim__grad_norm=50.0) == ("", False)
        guard.require()
        assert guard.metrics() == {"guard/alarms": 1.0}
    assert len(caplog.records) == 1
    step(guard, 3)
    step(guard, 4, optim__grad_norm=50.0)
    assert len(caplog.records) == 2


def test_skip_stops_after_max_actions_in_a_row():
    guard = make("skip", max_actions=2)
    for number in (1, 2):
        step(guard, number, optim__grad_norm=50.0)
        guard.require()
    step(guard, 3)  # a healthy step begins the count anew
    for number in (4, 5):
        step(guard, number, rollout__truncated_frac=0.9)
        guard.require()
    step(guard, 6, optim__grad_norm=50.0)
    with pytest.raises(
        GuardStop,
        match=r"^guard: optim/grad_norm=50 at step 6 .* The run stops: 3 steps in a row were left out, more than "
        r"guard.max_actions=2. Nothing was saved since; started again, it goes on from the newest checkpoint$",
    ):
        guard.require()


@pytest.mark.parametrize("fault", ["optim__grad_norm", "rollout__truncated_frac"])
def test_rollback_asks_for_the_newest_checkpoint_and_says_how_far_it_went(fault):
    guard = make("rollback", max_actions=1)
    assert step(guard, 1) == ("", False)
    assert step(guard, 2, **{fault: 99.0})[1]
    guard.rolled_back(2)
    assert guard.metrics() == {
        "guard/alarms": 1.0,
        "guard/skipped": 1.0,
        "guard/rolled_back_steps": 2.0,
    }
    guard.require()
    assert step(guard, 3) == ("", False)
    assert guard.metrics()["guard/rolled_back_steps"] == 0
    # Once more, and then again at once: that is no way out.
    assert step(guard, 4, **{fault: 99.0})[1]
    assert not step(guard, 5, **{fault: 99.0})[1]
    with pytest.raises(GuardStop, match="2 steps in a row were left out"):
        guard.require()


def test_a_rollback_begins_trends_anew():
    guard = make("rollback", window=4)
    for i in range(3):
        step(guard, i, reward__mean=0.2 * i, rollout__accuracy=0.9 - 0.2 * i)
    guard.rolled_back(1)
    for i in range(3, 6):
        assert step(guard, i, reward__mean=0.2 * i, rollout__accuracy=0.9 - 0.2 * i)[0] == ""


def test_stop_ends_the_run_at_the_first_alarm():
    guard = make("stop")
    step(guard, 1)
    guard.require()
    why, back = step(guard, 2, rollout__truncated_frac=0.9)
    assert why == "guard: rollout/truncated_frac"
    assert not back
    with pytest.raises(GuardStop, match="The run stops: guard.action is stop"):
        guard.require()


def test_limits_are_only_for_what_has_one():
    assert Guard(GuardConfig(action="skip")).update_limits() == {
        "policy/kl_mismatch": (-math.inf, 0.1)
    }
    only = Guard(GuardConfig(action="stop", max_mismatch_kl=0.0, min_entropy=0.5))
    assert only.update_limits() == {"policy/entropy": (0.5, math.inf)}


def test_a_resumed_guard_goes_on_as_if_nothing_had_happened(caplog):
    """Whatever the step after which it was saved, late alarms of an evaluation included."""

    def life(resume_after: int) -> list[tuple[str, bool, dict[str, float]]]:
        guard, seen = make("rollback", window=4, max_actions=9), []
        for i in range(14):
            faults = {"reward__mean": 0.05 * i, "tools__use_rate": 0.8 if i < 9 else 0.2}
            seen.append((*step(guard, i, **faults), guard.metrics()))
            guard.after_evaluation(i, {"eval/accuracy": 0.9 - 0.1 * i})
            if i == resume_after:
                kept = json.loads(json.dumps(guard.state()))
                guard = make("rollback", window=4, max_actions=9)
                guard.restore(kept)
        return seen

    straight = life(-1)
    assert sum("eval/accuracy" in why for why, _, _ in straight) > 2
    assert sum("tools/use_rate" in why for why, _, _ in straight) > 2
    for resume_after in range(13):
        assert life(resume_after) == straight


def test_its_metrics_are_registered():
    check_names(make("rollback").metrics())


def test_the_section_is_read_and_checked():
    config = load_config([], ["guard.action=rollback", "guard.max_grad_norm=5"])
    assert (config.guard.action, config.guard.max_grad_norm) == ("rollback", 5.0)
    with pytest.raises(ValueError, match="guard.min_entropy=2 is not below guard.max_entropy=1"):
        load_config([], ["guard.min_entropy=2", "guard.max_entropy=1"])
