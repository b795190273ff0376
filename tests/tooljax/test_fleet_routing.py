"""Who gets which group, and what happens where a replica is slow, stuck or broken. Nothing goes on for ever."""

import asyncio
import time
from collections import Counter

import pytest
from fleet_cases import SEED, connect, essences, push, replicas, roll, several_turns
from served_sidecars import make_tasks, make_tokenizer

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import Info, Task, derive_seed
from tooljax.fleet import replica as replica_module
from tooljax.fleet.fleet import Fleet
from tooljax.fleet.groups import Group, Piece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def requests(served) -> list[Counter[str]]:
    """By replica: how many trajectories each of its requests had."""
    return [
        Counter(request.trajectory_id.rpartition(":")[0] for request in first_turns(one))
        for one in served
    ]


def first_turns(one):
    seen = {request.trajectory_id: request for request in reversed(one.engine.requests)}
    return list(seen.values())


def prompts(served) -> list[list[str]]:
    """By replica: the prompts that it read, one a trajectory."""
    return [
        sorted(one.sidecar.agent.tokenizer.decode(r.token_ids) for r in first_turns(one))
        for one in served
    ]


# --- who gets what ----------------------------------------------------------------------------------------------


def fleet(*capacities: int) -> Fleet:
    """Replicas that nobody can ask."""

    clients = [SidecarClient("http://127.0.0.1:9") for _ in capacities]
    made = Fleet(clients, timeout_s=1, down_timeout_s=1)
    for one, capacity in zip(made.replicas, capacities, strict=True):
        one.accept(
            Info(
                protocol_version=1,
                model="",
                vocab_size=1,
                vocab_hash="",
                engine="",
                policy_version=0,
                tool_format="",
                tools=[],
                max_model_tokens=1,
                max_concurrent=capacity,
            )
        )
    return made


def group(index: int, samples: int) -> Group:
    return Group(index, Task(task_id=f"t{index}", messages=[]), range(samples))


def hand_out(made: Fleet, groups: int, samples: int) -> list[int | None]:
    """Which replica gets which group, if nothing ever ends."""
    given = []
    for i in range(groups):
        chosen = made.choose(samples, None)
        given.append(None if chosen is None else made.replicas.index(chosen))
        if chosen is not None:
            Piece(f"{i}", [group(i, samples)], chosen)
    return given


def test_the_least_busy_in_parts_of_its_capacity_comes_next():
    # Loads after each: 4/8 4/16; 4/8 8/16 (a tie: the first); 8/8 8/16 ...
    assert hand_out(fleet(8, 16), 8, 4) == [1, 0, 1, 1, 0, 1, None, None]
    assert hand_out(fleet(8, 8, 8), 5, 4) == [0, 1, 2, 0, 1]


def test_a_group_larger_than_any_replica_goes_to_one_of_them():
    assert hand_out(fleet(4, 4), 3, 8) == [0, 1, None]


async def test_who_has_the_prefix_is_preferred_unless_it_is_full_or_gone():
    made = fleet(8, 8)
    first, second = made.replicas
    assert made.choose(4, second) is second
    second.outstanding = 8
    assert made.choose(4, second) is first
    second.outstanding = 0
    second.lose("gone")
    assert made.choose(4, second) is first
    assert made.choose(4, None) is first


def test_a_piece_counts_what_is_outstanding_once():
    (one,) = fleet(8).replicas
    first = group(0, 3)
    piece = Piece("p", [first], one)
    assert one.outstanding == 3
    piece.settle(first, 1)
    piece.settle(first, 1)
    assert one.outstanding == 2
    assert piece.positions(first, [0, 2]) == [0, 2]
    piece.end()
    assert (one.outstanding, first.piece, first.home) == (0, None, one)


# --- in small pieces --------------------------------------------------------------------------------------------


def test_a_slow_replica_does_not_hold_the_batch(tokenizer):
    with (
        replicas(tokenizer, ["#### 1"], count=2, delays=[0.3, 0.01], max_concurrent=2) as served,
        connect(served) as sidecars,
    ):
        started = time.monotonic()
        roll(sidecars, make_tasks(12), samples=2)
        took = time.monotonic() - started
        slow, fast = (len(one) for one in prompts(served))
    assert slow + fast == 24
    assert slow <= 6  # a fixed split would give it 12, which take 6 * 0.3 s
    assert took < 1.5


def test_groups_stay_whole_and_small_ones_share_a_request(tokenizer):
    with (
        replicas(tokenizer, ["#### 1"], count=2, delays=[0.01, 0.01]) as served,
        connect(served) as sidecars,
    ):
        roll(sidecars, make_tasks(6), samples=8)
        assert all(count == 8 for each in requests(served) for count in each.values())
        for mine in prompts(served):
            assert set(Counter(mine).values()) == {8}
        for one in served:
            one.engine.requests.clear()
        roll(sidecars, make_tasks(64), samples=1)
        sizes = [count for each in requests(served) for count in each.values()]
        assert sorted(sizes) == [8] * 8
        for one in served:
            one.engine.requests.clear()
        # Too few for that: everybody has something to do.
        roll(sidecars, make_tasks(4), samples=1)
        assert [sum(each.values()) for each in requests(served)] == [2, 2]


# --- what goes wrong --------------------------------------------------------------------------------------------


def test_a_replica_that_is_stuck_is_left_out_and_its_work_is_done_elsewhere(tokenizer, monkeypatch):
    monkeypatch.setattr(replica_module, "HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr("tooljax.fleet.fleet.HEALTH_TIMEOUT_S", 0.3)
    script = several_turns(4, 2)
    with (
        replicas(tokenizer, script, count=1, delays=[0.05]) as (stuck,),
        replicas(tokenizer, script, count=1, delays=[0.05]) as (sound,),
        connect([stuck, sound]) as sidecars,
    ):
        undisturbed = essences(roll(sidecars, make_tasks(4), samples=2))
        before = len(sound.engine.requests)
        # Its whole process stands still: connections are open, and nothing comes.
        stuck.on_generate = lambda n: time.sleep(6) if n == 18 else None
        started = time.monotonic()
        assert essences(roll(sidecars, make_tasks(4), samples=2)) == undisturbed
        assert time.monotonic() - started < 5
        assert "gave no answer within 0.3 s" in sidecars.fleet.replicas[0].why
        assert len(sound.engine.requests) - before > 16
        # What it still ran is ended before it gets new work.
        deadline = time.monotonic() + 20
        while len(sidecars.fleet.live) < 2:
            roll(sidecars, make_tasks(1), samples=1)
            assert time.monotonic() < deadline
        assert sidecars.fleet.replicas[0].leftovers == set()


def test_an_engine_with_a_fault_gets_nothing_until_it_is_sound(tokenizer):
    with (
        replicas(tokenizer, ["#### 1"], count=2, delays=[0.0, 0.02]) as served,
        connect(served) as sidecars,
    ):
        served[0].engine.fault = "the device is gone; start it again"
        groups = roll(sidecars, make_tasks(4), samples=2)
        assert [t.status for g in groups for t in g] == ["completed"] * 8
        assert served[0].engine.requests == []
        why = sidecars.fleet.replicas[0].why
        assert "503" in why
        assert "the engine cannot generate: the device is gone; start it again" in why
        served[0].engine.fault = ""
        deadline = time.monotonic() + 10
        while not served[0].engine.requests:
            roll(sidecars, make_tasks(4), samples=2)
            assert time.monotonic() < deadline


def test_a_group_whose_requests_always_fail_is_given_up_and_the_others_are_made(tokenizer):
    bad = {derive_seed(derive_seed(*SEED, 1, s), 0) for s in range(2)}
    with replicas(tokenizer, ["#### 1"], count=2, delays=[0.01] * 2) as served:
        for one in served:
            generate = one.engine.generate

            async def poisoned(request, one=one, generate=generate):
                if (
                    request.seed in bad
                ):  # as a prompt would that ends the process: here, the request
                    asyncio.ensure_future(one.sidecar.rollouts.close())
                    await asyncio.sleep(1)
                return await generate(request)

            one.engine.generate = poisoned  # type: ignore[method-assign]
        with connect(served, period_s=0.02) as sidecars:
            groups = roll(sidecars, make_tasks(3), samples=2)
    assert [[t.status for t in g] for g in groups] == [
        ["completed"] * 2,
        ["engine_error"] * 2,
        ["completed"] * 2,
    ]
    assert groups[1][0].error.startswith("its sidecar failed 8 times in a row: http://127.0.0.1")
    assert [(t.task_id, t.sample_index, t.seed) for t in groups[1]] == [
        ("t1", s, derive_seed(*SEED, 1, s)) for s in range(2)
    ]


def test_a_rollout_that_asks_for_weights_that_were_never_pushed_fails_at_once(tokenizer):
    with replicas(tokenizer, ["#### 1"], count=2) as served, connect(served) as sidecars:
        push(sidecars, 0)
        with pytest.raises(SidecarError, match="min_policy_version=2; push the weights first"):
            roll(sidecars, make_tasks(1), samples=1, step=1)
        assert len(sidecars.fleet.live) == 2


async def test_a_replica_is_lost_once_and_says_why_first():
    (one,) = fleet(1).replicas
    one.lose("first")
    one.lose("second")
    assert (one.live, one.why) == (False, "first")
