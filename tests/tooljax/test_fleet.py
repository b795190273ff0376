"""Several sidecars, some of which fail: every trajectory comes once, with the tokens that it would have had anyway."""

import threading
import time

import pytest
from fleet_cases import (
    SEED,
    TURNS,
    Sum,
    connect,
    essences,
    push,
    replicas,
    roll,
    several_turns,
)
from served_sidecars import make_tasks, make_tokenizer

from rollout_sidecar.client import SidecarError
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.protocol import derive_seed
from tooljax.rollouts import Sidecars

TASKS, SAMPLES = 4, 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def undisturbed(tokenizer):
    """What one sidecar makes that nobody disturbs."""
    script = several_turns(TASKS, SAMPLES)
    with replicas(tokenizer, script, count=1) as served, connect(served) as sidecars:
        return essences(roll(sidecars, make_tasks(TASKS), samples=SAMPLES))


def test_the_undisturbed_run_uses_the_tool_in_every_turn(undisturbed):
    for i, group in enumerate(undisturbed):
        for s, trajectory in enumerate(group):
            calls = [call for turn in trajectory["turns"] for call in turn["calls"]]
            results = [str(100 * turn + 10 * i + s + 1) for turn in range(TURNS - 1)]
            assert [call["result"] for call in calls] == results
            assert trajectory["seed"] == derive_seed(*SEED, i, s)


@pytest.mark.parametrize("count", [2, 3])
def test_tokens_do_not_depend_on_the_number_of_replicas(tokenizer, undisturbed, count):
    script = several_turns(TASKS, SAMPLES)
    with (
        replicas(tokenizer, script, count=count, delays=[0.0, 0.01, 0.02]) as served,
        connect(served) as sidecars,
    ):
        assert essences(roll(sidecars, make_tasks(TASKS), samples=SAMPLES)) == undisturbed
        assert all(one.engine.requests for one in served)
        assert sidecars.metrics() == {
            "fleet/live": count,
            "fleet/capacity": 256 * count,  # what a sidecar takes unless told otherwise
            "fleet/resumed": 0,
            "fleet/restarted": 0,
        }


@pytest.mark.parametrize("after", [1, 4, 7, 12, 17, 22])
def test_a_replica_killed_between_turns_costs_no_trajectory_and_no_turn(
    tokenizer, undisturbed, after
):
    script = several_turns(TASKS, SAMPLES)
    seen = []
    with (
        replicas(tokenizer, script, count=2, delays=[0.01, 0.01]) as served,
        connect(served) as sidecars,
    ):
        victim, other = served
        victim.on_generate = lambda n: victim.kill_here() if n == after else None
        groups = roll(
            sidecars, make_tasks(TASKS), samples=SAMPLES, on_progress=lambda *n: seen.append(n)
        )
        assert essences(groups) == undisturbed
        again = sidecars.fleet.resumed + sidecars.fleet.restarted
        assert [one.live for one in sidecars.fleet.replicas] == [False, True]
        generated = len(other.engine.requests)
    assert seen == [(n, TASKS * SAMPLES) for n in range(1, TASKS * SAMPLES + 1)]  # none twice
    assert 1 <= again <= 6
    # What the other made: its own 6 trajectories, and of the victim's only turns that had not been reported.
    assert generated <= 2 * 6 * TURNS
    if after > 2 * 6:  # what its trajectories had done in their first turn had arrived
        assert sidecars.fleet.resumed > 0
        assert generated < 2 * 6 * TURNS


def test_a_tool_that_keeps_state_is_started_again_from_the_prompt(tokenizer):
    script = several_turns(2, 2)
    with replicas(tokenizer, script, count=1, tool=Sum) as served, connect(served) as sidecars:
        undisturbed = essences(roll(sidecars, make_tasks(2), samples=2))
    with (
        replicas(tokenizer, script, count=2, tool=Sum, delays=[0.02, 0.02]) as served,
        connect(served) as sidecars,
    ):
        victim = served[0]
        victim.on_generate = lambda n: victim.kill_here() if n == 6 else None
        assert essences(roll(sidecars, make_tasks(2), samples=2)) == undisturbed
        assert (sidecars.fleet.resumed, sidecars.fleet.restarted) == (0, 2)
        assert served[1].sidecar.agent.leases.live == 0


def test_a_replica_that_is_killed_and_started_again_serves_the_weights_before_it_is_used(
    tokenizer, undisturbed
):
    """Pain point 22."""
    script = several_turns(TASKS, SAMPLES)
    with (
        replicas(tokenizer, script, count=2, delays=[0.03, 0.03]) as served,
        connect(served) as sidecars,
    ):
        push(sidecars, 0)
        victim = served[0]

        def kill_and_start(count: int) -> None:
            if count == 8 and victim.engine.policy_version == 1:
                victim.kill_here()
                threading.Timer(0.05, victim.start).start()

        victim.on_generate = kill_and_start
        groups = roll(sidecars, make_tasks(TASKS), samples=SAMPLES, step=0)
        deadline = time.monotonic() + 10
        while victim.engine.policy_version == 0 and time.monotonic() < deadline:
            roll(sidecars, make_tasks(1), samples=1, step=0)
        assert [one.engine.policy_version for one in served] == [1, 1]
        # Nothing was ever generated there with the weights that it came back with.
        assert victim.sidecar.weights.content_hash == served[1].sidecar.weights.content_hash
        spans = [s for g in groups for t in g for s in t.version_spans]
        assert {span.policy_version for span in spans} == {1}
        assert sum(s.end - s.start for s in spans) == sum(
            sum(t.loss_mask) for g in groups for t in g
        )
    tokens = [[trajectory["token_ids"] for trajectory in group] for group in undisturbed]
    assert [[t.token_ids for t in group] for group in groups] == tokens


def test_the_only_sidecar_may_come_back(tokenizer, undisturbed):
    script = several_turns(TASKS, SAMPLES)
    with replicas(tokenizer, script, count=1, delays=[0.02]) as served, connect(served) as sidecars:
        push(sidecars, 0)
        (victim,) = served

        def kill_and_start(count: int) -> None:
            if count == 30:  # in the third turn: the first ones have been told of
                victim.on_generate = lambda n: None
                victim.kill_here()
                threading.Timer(0.3, victim.start).start()

        victim.on_generate = kill_and_start
        groups = roll(sidecars, make_tasks(TASKS), samples=SAMPLES, step=0)
        assert sidecars.fleet.resumed + sidecars.fleet.restarted == TASKS * SAMPLES
        assert sidecars.fleet.resumed > 0
    tokens = [[trajectory["token_ids"] for trajectory in group] for group in undisturbed]
    assert [[t.token_ids for t in group] for group in groups] == tokens


def test_with_no_sidecar_left_the_run_ends_with_every_reason(tokenizer):
    script = several_turns(2, 2)
    with (
        replicas(tokenizer, script, count=2, delays=[0.02, 0.02]) as served,
        connect(served, down_timeout_s=0.5) as sidecars,
    ):
        for one in served:
            one.on_generate = lambda n, one=one: one.kill_here() if n == 2 else None
        started = time.monotonic()
        with pytest.raises(SidecarError, match=r"no sidecar could be used for 0\.5 s") as caught:
            roll(sidecars, make_tasks(2), samples=2)
        assert time.monotonic() - started < 20
        assert all(one.url in str(caught.value) for one in served)


def test_two_urls_of_one_sidecar_are_refused(tokenizer):
    with replicas(tokenizer, ["#### 1"], count=1) as served:
        named = [served[0].url, served[0].url.replace("127.0.0.1", "localhost")]
        with (
            pytest.raises(ValueError, match=f"{named[0]} and {named[1]} are the same sidecar"),
            Sidecars(named, token=None, timeout_s=5.0),
        ):
            pass


class Faulty(ScriptedEngine):
    """Fails for good at the third turn."""

    async def generate(self, request):
        if len(self.requests) >= 3:
            self.fault = "the device is gone"
            raise RuntimeError("no device")
        return await super().generate(request)


def test_an_engine_that_fails_has_its_trajectories_made_elsewhere(tokenizer, undisturbed):
    script = several_turns(TASKS, SAMPLES)
    with replicas(tokenizer, script, count=2, delays=[0.01, 0.01]) as served:
        ill = served[0].engine
        ill.__class__ = Faulty
        del ill.generate
        with connect(served) as sidecars:
            assert essences(roll(sidecars, make_tasks(TASKS), samples=SAMPLES)) == undisturbed
            assert not sidecars.fleet.replicas[0].live
            assert "the device is gone" in sidecars.fleet.replicas[0].why
