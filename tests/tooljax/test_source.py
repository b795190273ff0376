"""Batches: whole, without repeats, in an order that a saved position continues exactly."""

import json

import pytest

from rollout_sidecar.protocol import Task
from tooljax.data.source import TaskSource


def tasks(count):
    return [
        Task(task_id=f"t:{i}", messages=[{"role": "user", "content": str(i)}]) for i in range(count)
    ]


def source(count=7, prompts_per_step=3, seed=0, shuffle=True):
    return TaskSource(tasks(count), prompts_per_step=prompts_per_step, seed=seed, shuffle=shuffle)


def steps(source, count):
    """The task numbers of the next batches."""
    return [[int(task.task_id[2:]) for task in source.next()] for _ in range(count)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("saved_after", [0, 1, 5])
def test_a_restored_source_goes_on_exactly(shuffle, saved_after):
    straight = steps(source(shuffle=shuffle), 10)
    first = source(shuffle=shuffle)
    before = steps(first, saved_after)
    state = json.loads(json.dumps(first.state()))
    second = source(shuffle=shuffle)
    steps(second, 2)  # a position of its own, which restoring replaces
    second.restore(state)
    assert before + steps(second, 10 - saved_after) == straight


def test_every_epoch_holds_each_row_at_most_once_and_is_shuffled_anew():
    # 7 rows, 3 a step: an epoch is 2 steps and leaves 1 row over
    batches = steps(source(), 40)
    epochs = [batches[i] + batches[i + 1] for i in range(0, 40, 2)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20
    left_over = {(set(range(7)) - set(epoch)).pop() for epoch in epochs}
    assert len(left_over) > 3  # not always the same


def test_an_epoch_without_remainder_holds_every_row():
    batches = steps(source(count=6), 20)
    for i in range(0, 20, 2):
        assert sorted(batches[i] + batches[i + 1]) == [0, 1, 2, 3, 4, 5]


def test_without_shuffling_rows_keep_the_order_of_the_file_and_none_is_skipped():
    assert steps(source(count=4, shuffle=False), 4) == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3]]


def test_seeds_give_different_orders_and_the_same_seed_the_same():
    orders = {str(steps(source(count=20, seed=seed), 6)) for seed in (0, 1, 2, 2**40)}
    assert len(orders) == 4
    assert str(steps(source(count=20, seed=1), 6)) in orders


def test_a_seed_is_not_another_one_an_epoch_later():
    of_zero = steps(source(count=20, prompts_per_step=20, seed=0), 5)
    of_one = steps(source(count=20, prompts_per_step=20, seed=1), 5)
    assert not {str(batch) for batch in of_zero} & {str(batch) for batch in of_one}


@pytest.mark.parametrize(
    ("shuffle", "epochs"),
    # after 0, 1, 2, ... steps of 3 out of 7: whole batches, or rows / 7
    [(True, [0, 0, 1, 1, 2, 2]), (False, [0, 0, 0, 1, 1, 2])],
)
def test_epochs_are_counted(shuffle, epochs):
    counting, seen = source(shuffle=shuffle), []
    for _ in epochs:
        seen.append(counting.epoch())
        counting.next()
    assert seen == epochs


def test_the_fingerprint_tells_rows_and_order_apart():
    changed = tasks(7)
    changed[3].messages[0]["content"] = "x"
    sources = [
        source(),
        source(count=8),
        source(prompts_per_step=2),
        source(seed=1),
        source(shuffle=False),
        TaskSource(changed, prompts_per_step=3, seed=0, shuffle=True),
        TaskSource(tasks(7)[::-1], prompts_per_step=3, seed=0, shuffle=True),
    ]
    assert len({s.fingerprint for s in sources}) == len(sources)
    assert source().fingerprint == source().fingerprint
    assert len(source().fingerprint) == 32  # xxh3-128, hexadecimal


def test_the_fingerprint_does_not_depend_on_the_order_of_fields():
    one = Task(
        task_id="t", messages=[{"role": "user", "content": "x"}], extra_info={"a": 1, "b": 2}
    )
    two = Task(
        task_id="t", messages=[{"content": "x", "role": "user"}], extra_info={"b": 2, "a": 1}
    )
    first, second = (TaskSource([t], prompts_per_step=1, seed=0, shuffle=True) for t in (one, two))
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("other", "change"),
    [
        ({"count": 9}, "same settings, other contents or order of rows"),
        ({"seed": 4}, "seed 0 then, 4 now"),
        (
            {"prompts_per_step": 2, "shuffle": False},
            "data.prompts_per_step 3 then, 2 now; shuffle True then, False now",
        ),
    ],
)
def test_a_position_in_other_data_is_refused(other, change):
    saved, now = source(), source(**other)
    steps(saved, 2)
    with pytest.raises(ValueError, match="the tasks have changed") as caught:
        now.restore(saved.state())
    rows = other.get("count", 7)
    assert str(caught.value) == (
        "the tasks have changed since the position was saved after 2 steps: fingerprint "
        f"{saved.fingerprint} of 7 tasks then, {now.fingerprint} of {rows} now ({change}). Going on would skip or "
        "repeat tasks: put data.train and the settings back, or start a new run in another run.dir"
    )
    assert now.state()["step"] == 0


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"step": -1, "fingerprint": "x"}])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match=r"is not a saved position of tasks"):
        source().restore(state)


@pytest.mark.parametrize("prompts_per_step", [0, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_that_would_hold_a_task_twice_is_refused(prompts_per_step, shuffle):
    message = (
        rf"data\.prompts_per_step={prompts_per_step} does not fit 7 tasks: a step holds each at most once; "
        r"set it to between 1 and 7, or add to data\.train"
    )
    with pytest.raises(ValueError, match=message):
        source(prompts_per_step=prompts_per_step, shuffle=shuffle)


def test_no_tasks():
    with pytest.raises(ValueError, match=r"there are no tasks; name their files in data\.train"):
        source(count=0)
