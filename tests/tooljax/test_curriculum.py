"""Which tasks a step takes: all in turn, by difficulty, by stages; and what a resumed run needs for that."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from curriculum_cases import (
    advance,
    assert_interruption_takes_nothing,
    assert_resumes_exactly,
    group,
    make_config,
    make_tasks,
    saved,
)

from tooljax.config import ConfigError, load_config
from tooljax.config.curriculum import Clause, CurriculumConfig, Stage, parse_stage
from tooljax.curriculum.base import Seen, pass_rate
from tooljax.curriculum.pools import Pools
from tooljax.curriculum.source import open_source
from tooljax.curriculum.stages import StagePlan
from tooljax.data.source import TaskSource
from tooljax.metrics import describe

POOLS: dict[str, Any] = {"kind": "pools"}
STAGES = ("0: extra_info.level <= 1", "4: all", "8: file == 'high'")


def pools(count: int = 6, per_step: int = 2, **own: Any) -> Pools:
    settings = CurriculumConfig(kind="pools", **{"revisit_passes": 0.0, **own})
    plan = StagePlan(make_tasks(count, files=("a",)), (), per_step=per_step)
    return Pools(plan, tasks=count, per_step=per_step, seed=0, settings=settings)


def known(made: Pools, rates: Sequence[float | None], last: list[int] | None = None) -> Pools:
    """Every task was drawn, the first one longest ago, and has this pass rate."""
    places = list(range(len(rates)))
    made.restore(
        {"tasks": places, "last": last or places, "pass_rates": rates, "step": -1, "drawn": []}
    )
    return made


def told(made: Pools, tasks: list[int], rates: list[float | None], step: int = 0) -> Any:
    return made.observe(Seen(step, tasks, rates, [], np.zeros(0)))


# --- uniform -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_by_default_it_is_what_it_was(shuffle):
    tasks, config = make_tasks(), make_config(seed=3, shuffle=shuffle)
    plain = TaskSource(tasks, prompts_per_step=5, seed=3, shuffle=shuffle)
    source = open_source(config, tasks)
    one_stage = open_source(make_config(seed=3, shuffle=shuffle, stages=("0: all",)), tasks)
    for step in range(11):
        assert source.state() == plain.state()
        expected = plain.next()
        assert source.next(step, 0) == one_stage.next(step, 0) == expected
        assert source.observe(step, [], np.zeros(0)) == {}


# --- pools: worked cases -----------------------------------------------------------------------------------------

RATES: list[float | None] = [1.0, 0.8, 0.79, 0.2, 0.19, 0.0]
"""Two tasks in each pool: bounds 0.8 and 0.2 are of the pool above."""


@pytest.mark.parametrize(
    ("weights", "chosen"),
    [((1.0, 0.0, 0.0), [0, 1]), ((0.0, 1.0, 0.0), [2, 3]), ((0.0, 0.0, 1.0), [4, 5])],
)
def test_a_step_is_drawn_from_the_pools_that_have_a_weight(weights, chosen):
    assert known(pools(weights=weights), RATES).next(9, 0) == chosen


def test_what_was_not_drawn_for_longest_comes_first_in_a_pool():
    last = [7, 3, 5, 1, 4, 2]
    made = known(pools(per_step=3, weights=(0.0, 1.0, 0.0)), [0.5] * 6, last)
    assert made.next(8, 0) == [3, 5, 1]
    assert made.next(9, 0) == [4, 2, 0]


def test_a_pool_that_is_too_small_is_filled_up_with_what_waited_longest():
    assert known(pools(per_step=4, weights=(0.0, 1.0, 0.0)), RATES).next(9, 0) == [2, 3, 0, 1]


def test_later_batches_of_a_step_take_others_as_long_as_there_are_any():
    made = known(pools(weights=(0.0, 1.0, 0.0)), RATES)
    # 2 and 3 are medium; then what waited longest; then all were there, and 2 and 3 come again
    assert [made.next(9, batch) for batch in range(4)] == [[2, 3], [0, 1], [4, 5], [2, 3]]


def test_tasks_move_between_pools_with_their_running_pass_rate():
    made = known(pools(weights=(0.0, 1.0, 0.0), decay=0.5), RATES)
    # 2: 0.5 * 0.79 + 0.5 * 1 = 0.895, easy. 4: 0.5 * 0.19 + 0.5 * 0.25 = 0.22, medium. 5: 0.5 * 0 + 0.5 * 0.25, hard
    metrics = told(made, [2, 4, 5], [1.0, 0.25, 0.25])
    assert made.state()["pass_rates"] == pytest.approx([1.0, 0.8, 0.895, 0.2, 0.22, 0.125])
    assert metrics == {
        **{"curriculum/pool/easy/size": 3.0, "curriculum/pool/easy/share": 0.0},
        **{"curriculum/pool/medium/size": 2.0, "curriculum/pool/medium/share": 1 / 3},
        **{"curriculum/pool/hard/size": 1.0, "curriculum/pool/hard/share": 2 / 3},
        **{"curriculum/pool/unknown/size": 0.0, "curriculum/pool/unknown/share": 0.0},
        "curriculum/pass_rate/mean": pytest.approx((1.0 + 0.8 + 0.895 + 0.2 + 0.22 + 0.125) / 6),
    }
    assert all(describe(name) for name in metrics)
    assert made.next(9, 0) == [3, 4]


def test_tasks_that_were_never_drawn_come_first_and_their_first_rate_is_what_was_measured():
    made = pools(weights=(0.0, 1.0, 0.0))
    seen = []
    for step in range(3):
        seen += (chosen := made.next(step, 0))
        metrics = told(made, chosen, [0.25, None], step)
        assert metrics["curriculum/pool/unknown/share"] == 1.0
    assert sorted(seen) == list(range(6))
    assert metrics["curriculum/pool/unknown/size"] == 3.0
    assert sorted(made.state()["pass_rates"], key=str) == [0.25] * 3 + [None] * 3


def test_a_task_that_nothing_was_measured_of_is_drawn_as_a_hard_one():
    made = known(pools(weights=(0.0, 0.0, 1.0)), [0.5, None, 0.5, 0.5, 0.1, 0.5])
    assert made.next(9, 0) == [1, 4]


def test_exploring_takes_its_share_of_a_step():
    made = pools(count=8, per_step=4, explore=0.5, weights=(1.0, 1.0, 1.0))
    made.restore(
        {"tasks": [0, 1, 2], "last": [0, 1, 2], "pass_rates": [0.5] * 3, "step": 2, "drawn": []}
    )
    chosen = made.next(3, 0)
    assert set(chosen[:2]) < {3, 4, 5, 6, 7}
    assert chosen[2:] == [0, 1]


def test_tasks_are_measured_again_after_so_many_passes_also_in_a_pool_without_weight():
    # A pass is 6 / 2 = 3 steps, so after 6 steps a task is due
    made = known(pools(weights=(0.0, 1.0, 0.0), revisit_passes=2.0), RATES)
    assert made.next(5, 0) == [2, 3]
    made = known(pools(weights=(0.0, 1.0, 0.0), revisit_passes=2.0), RATES)
    assert made.next(6, 0) == [0, 2]
    made = known(pools(weights=(0.0, 1.0, 0.0), revisit_passes=2.0), RATES)
    assert made.next(7, 0) == [0, 1]


# --- pools: what always holds ------------------------------------------------------------------------------------


def test_shares_of_a_step_are_those_of_the_weights():
    made = pools(count=90, per_step=20, weights=(1.0, 2.0, 1.0))
    rates = [1.0, 0.5, 0.0] * 30
    known(made, rates, [0] * 90)
    counts, draws = np.zeros(3), 0
    for step in range(1, 101):
        for i in made.next(step, 0):
            counts[[1.0, 0.5, 0.0].index(rates[i])] += 1
            draws += 1
    expected = np.array([0.25, 0.5, 0.25])
    deviation = np.sqrt(draws * expected * (1 - expected))
    assert draws == 2000
    assert (abs(counts - draws * expected) < 3 * deviation).all()
    assert (counts != draws * expected).any()  # drawn, not counted out


@pytest.mark.parametrize("explore", [1.0, 0.4])
def test_every_task_is_seen_within_bounded_steps(explore):
    tasks = make_tasks(18)
    config = make_config(kind="pools", weights=(0.0, 1.0, 0.0), revisit_passes=2.0, explore=explore)
    source, last, waits = open_source(config, tasks), {t.task_id: -1 for t in tasks}, []
    for step in range(80):
        chosen = advance(source, step)
        assert len(set(chosen)) == 5
        for name in chosen:
            waits.append(step - last[name])
            last[name] = step
    first = math.ceil(36 / math.ceil(explore * 5))
    bound = max(first, math.ceil(2 * 36 / 5) + first)
    assert max(waits) <= bound
    assert 80 - min(last.values()) <= bound


def test_draws_follow_from_seed_step_and_batch():
    def first(seed: int, step: int, batch: int) -> list[int]:
        made = pools(count=40, per_step=10)
        made._seed = seed
        return made.next(step, batch)

    assert first(0, 3, 1) == first(0, 3, 1)
    others = [first(1, 3, 1), first(0, 4, 1), first(0, 3, 2)]
    assert first(0, 3, 1) not in others
    assert len({str(order) for order in others}) == 3


# --- pass rates --------------------------------------------------------------------------------------------------


def test_a_pass_rate_counts_what_says_something_about_the_policy():
    task = make_tasks(1)[0]
    assert pass_rate(group(task, 3)) == 0.75
    failed = group(task, 4, samples=4, status="engine_error")
    assert pass_rate(group(task, 1, samples=2) + failed) == 0.5
    assert pass_rate(failed) is None


def test_what_a_group_is_compared_with_is_not_counted():
    source = open_source(make_config(**POOLS), make_tasks())
    tasks = source.next(0, 0)
    groups = [[*group(task, 2), *group(task, 1, samples=1)] for task in tasks]
    source.observe(0, groups, np.zeros((5, 5)))
    assert saved(source)["curriculum"]["state"]["pass_rates"] == [0.5] * 5


# --- stages ------------------------------------------------------------------------------------------------------


def test_stages_take_the_tasks_that_meet_their_condition():
    source = open_source(make_config(stages=STAGES), make_tasks())
    levels = [{name.split(":")[0] for name in advance(source, step)} for step in range(12)]
    assert levels[:4] == [{"low"}] * 4
    assert {"low", "high"} in levels[4:8]
    assert levels[8:] == [{"high"}] * 4


def test_a_stage_goes_through_its_tasks_before_one_comes_again():
    source = open_source(make_config(per_step=4, stages=STAGES[:1]), make_tasks())
    passes = [sorted(name for _ in range(3) for name in advance(source, step)) for step in (0, 1)]
    assert passes == [sorted(f"low:{i}" for i in range(12))] * 2


def test_stages_limit_pools_and_say_which_one_it_is():
    source = open_source(make_config(stages=STAGES, **POOLS), make_tasks())
    for step in range(12):
        tasks = source.next(step, 0)
        metrics = source.observe(step, [group(t, 2) for t in tasks], np.zeros((5, 4)))
        assert metrics["curriculum/stage"] == (step >= 4) + (step >= 8)
        if step < 4 or step >= 8:
            assert {t.extra_info["level"] for t in tasks} == {1 if step < 4 else 2}
            assert sum(metrics[f"curriculum/pool/{n}/size"] for n in ("unknown", "medium")) == 12


def test_conditions_are_read():
    assert parse_stage("7: a.b in (1, 'x: and') and file != \"y\"") == Stage(
        7,
        (Clause("a.b", "in", (1, "x: and")), Clause("file", "!=", "y")),
        "7: a.b in (1, 'x: and') and file != \"y\"",
    )
    tasks = make_tasks(3)
    cases = {
        "extra_info.level < 2": 3,
        "extra_info.level >= 2 and extra_info.index != 0": 2,
        "data_source in ('high', 'none')": 3,
        "ground_truth == '1'": 2,
        "extra_info.index > -1": 6,
    }
    for condition, count in cases.items():
        assert len(StagePlan(tasks, [f"0: {condition}"], per_step=1).members[0]) == count


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (("0: level <= 1",), "asks for level; a condition can ask for extra_info, data_source"),
        (("0: extra_info.grade <= 1",), "asks for extra_info.grade, which task low:0 has not"),
        (("0: extra_info.level <= 'x'",), "compares extra_info.level with 'x', but task low:0 has"),
        (("0: extra_info.index < 2",), "4 of 24 tasks meet '0: extra_info.index < 2', fewer than"),
    ],
)
def test_a_stage_that_does_not_fit_the_data_is_told(stages, message):
    with pytest.raises(ValueError, match=message):
        open_source(make_config(stages=stages), make_tasks())


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stages=('5: all',)", r"begin at steps \[5\]; the first must begin at 0"),
        ("stages=('0: all', '0: all')", "each later than the one before"),
        ("stages=('all',)", "is no 'first step: condition'; write for example"),
        ("stages=('0: a or b',)", "whose condition cannot be read: it is 'all', or"),
        ("stages=('0: a <= __import__',)", "whose condition cannot be read"),
        ("stages=('0: a in 3',)", "whose condition cannot be read"),
        ("stages=('0: (',)", "whose condition cannot be read"),
        ("weights=(1.0, 1.0)", "must be a number from 0 on for each of easy, medium, hard"),
        ("weights=(0.0, 0.0, 0.0)", "draws from no pool; give one of easy, medium, hard a weight"),
        ("hard_below=0.8", "hard_below=0.8 must be below curriculum.easy_above=0.8"),
        ("revisit_passes=0.5", "set it to 1 or more, or to 0 for never"),
        ("class_path=x.py", "name a sampler together; set both, or neither"),
        ("explore=0", "explore"),
    ],
)
def test_settings_that_cannot_be_are_told(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config((), [f"curriculum.{setting}"])


def test_a_sampler_chooses_alone():
    own = ["curriculum.class_path=x.py", "curriculum.class_name=X", "curriculum.kind=pools"]
    with pytest.raises(ConfigError, match="chooses every task itself, so there can be no"):
        load_config((), own)


# --- going on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "batches"),
    [
        (POOLS, 1),
        ({**POOLS, "stages": STAGES}, 2),  # as grpo.zero_variance = "refill" takes them
        ({"stages": STAGES}, 1),
    ],
)
def test_a_resumed_run_goes_on_exactly(own, batches):
    assert_resumes_exactly(make_config(**own), make_tasks(), batches=batches)


@pytest.mark.parametrize("own", [POOLS, {"stages": STAGES}, {}])
def test_an_interruption_takes_nothing(own):
    assert_interruption_takes_nothing(make_config(**own), make_tasks())


def test_changed_data_is_named():
    source = open_source(make_config(**POOLS), make_tasks())
    advance(source, 0)
    state, changed = saved(source), make_tasks()
    changed[13].messages[0]["content"] = "other"
    cases = {
        "low had 12 tasks and has 11": make_tasks()[1:],
        "high has other contents, or another order": changed,
        "high is gone; top is new": make_tasks(files=("low", "top")),
    }
    for message, tasks in cases.items():
        with pytest.raises(ValueError, match=f"data.train has changed .*: {message}. What is kn"):
            open_source(make_config(**POOLS), tasks).restore(state)
    with pytest.raises(ValueError, match="data.prompts_per_step 5 then, 6 now"):
        open_source(make_config(per_step=6, **POOLS), make_tasks()).restore(state)


def test_another_curriculum_cannot_go_on():
    source, config = open_source(make_config(**POOLS), make_tasks()), make_config(stages=STAGES)
    with pytest.raises(
        ValueError, match="saved with curriculum 'pools', and the config asks for 'u"
    ):
        open_source(make_config(), make_tasks()).restore(saved(source))
    with pytest.raises(
        ValueError, match="saved with curriculum 'uniform', and the config asks for"
    ):
        source.restore(saved(open_source(make_config(), make_tasks())))
    staged = open_source(config, make_tasks())
    advance(staged, 4)
    later = (*STAGES[:2], "9: all")
    open_source(make_config(stages=later), make_tasks()).restore(saved(staged))
    with pytest.raises(ValueError, match="curriculum.stages were .* saved in stage 1, and are"):
        open_source(make_config(stages=("0: all", "4: all")), make_tasks()).restore(saved(staged))
