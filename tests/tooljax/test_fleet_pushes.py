"""Weights and several sidecars: who must have them for a push to succeed, and what becomes of those that have not."""

import threading
import time

import pytest
from fleet_cases import connect, push, replicas, roll
from served_sidecars import make_tasks, make_tokenizer

from rollout_sidecar.client import SidecarError
from rollout_sidecar.engines.scripted import ScriptedEngine
from tooljax.weights.push import PushError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr("rollout_sidecar.connection.RETRIES", 1)


class Refusing(ScriptedEngine):
    """Can be told to refuse weights."""

    refuses = False

    async def load_weights(self, tensors, policy_version, changed=None):
        if self.refuses:
            raise ValueError("the head does not fit")
        await super().load_weights(tensors, policy_version, changed)


def versions(served) -> list[int]:
    return [one.engine.policy_version for one in served]


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_dead_sidecar_fails_no_push_and_is_caught_up_before_it_is_used(tokenizer, mode):
    """Pain point 22."""
    with replicas(tokenizer, ["#### 1"], count=3) as served, connect(served) as sidecars:
        push(sidecars, 0, mode)
        served[1].kill()
        report = push(sidecars, 1, mode)
        assert report.version == 2
        assert [one.live for one in sidecars.fleet.replicas] == [True, False, True]
        assert "cannot be reached" in sidecars.fleet.replicas[1].why
        assert [versions(served)[i] for i in (0, 2)] == [2, 2]
        served[1].start()
        assert versions(served) == [2, 0, 2]
        # The next push reaches it too: it lost the base of a delta, and gets everything.
        report = push(sidecars, 2, mode)
        assert versions(served) == [3, 3, 3]
        assert report.full_resends == (mode == "delta")
        assert len(sidecars.fleet.live) == 3
        assert len({one.sidecar.weights.content_hash for one in served}) == 1


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_one_that_comes_back_between_pushes_gets_the_last_one_again(tokenizer, mode):
    def slowly(request, turn):
        return "#### 1"

    with (
        replicas(tokenizer, slowly, count=2, delays=[0.2, 0.0]) as served,
        connect(served) as sidecars,
    ):
        push(sidecars, 0, mode)
        push(sidecars, 1, mode)
        served[1].kill()
        threading.Timer(0.2, served[1].start).start()
        deadline = time.monotonic() + 15
        while not (len(sidecars.fleet.live) == 2 and served[1].engine.requests):
            groups = roll(sidecars, make_tasks(4), samples=1, step=1)
            spans = [s.policy_version for g in groups for t in g for s in t.version_spans]
            assert spans == [2] * 4
            assert time.monotonic() < deadline
        assert versions(served) == [2, 2]
        hashes = [one.sidecar.weights.content_hash for one in served]
        assert hashes[0] == hashes[1] != ""


def test_a_sidecar_that_refuses_the_weights_fails_the_push_and_is_named(tokenizer):
    with (
        replicas(tokenizer, ["#### 1"], count=2, engine=Refusing) as served,
        connect(served) as sidecars,
    ):
        served[1].engine.refuses = True  # type: ignore[attr-defined]
        with pytest.raises(
            PushError, match="reached 1 of 2 sidecars: .*the head does not"
        ) as caught:
            push(sidecars, 0)
        assert served[1].url in str(caught.value)
        assert sidecars.fleet.version is None


def test_with_nobody_there_a_push_waits_and_then_fails_with_the_reasons(tokenizer):
    with (
        replicas(tokenizer, ["#### 1"], count=2) as served,
        connect(served, down_timeout_s=0.5) as sidecars,
    ):
        push(sidecars, 0)
        for one in served:
            one.kill()
        with pytest.raises(PushError, match=r"no sidecar could be used for 0\.5 s") as caught:
            push(sidecars, 1)
        assert all(one.url in str(caught.value) for one in served)
        # The same push, repeated when they are back, is the first thing that they get.
        for one in served:
            one.start()
        assert push(sidecars, 1).version == 2
        assert versions(served) == [2, 2]


def test_a_push_waits_for_the_only_sidecar(tokenizer):
    with replicas(tokenizer, ["#### 1"], count=1) as served, connect(served) as sidecars:
        push(sidecars, 0, "delta")
        served[0].kill()
        threading.Timer(1.0, served[0].start).start()
        report = push(sidecars, 1, "delta")
        assert (report.version, report.full_resends, versions(served)) == (2, 1, [2])


def test_an_evaluation_is_not_made_with_what_a_restarted_sidecar_was_loaded_with(tokenizer):
    with replicas(tokenizer, ["#### 1"], count=1) as served, connect(served) as sidecars:
        push(sidecars, 0)
        push(sidecars, 1)
        served[0].kill()
        threading.Timer(0.3, served[0].start).start()
        ((trajectory,),) = roll(sidecars, make_tasks(1), samples=1)
        assert [span.policy_version for span in trajectory.version_spans] == [2]


@pytest.mark.parametrize("version", [0, 4])
def test_without_a_push_a_restarted_sidecar_must_serve_what_it_did(tokenizer, version):
    with replicas(tokenizer, ["#### 1"], count=1) as served:
        served[0].engine.policy_version = version  # 4: an earlier run has pushed weights
        with connect(served, down_timeout_s=1.0) as sidecars:
            served[0].kill()
            served[0].start()
            if version:
                with pytest.raises(SidecarError, match="was started again with other weights"):
                    roll(sidecars, make_tasks(1), samples=1)
            else:  # it serves what it was loaded with, as before
                ((trajectory,),) = roll(sidecars, make_tasks(1), samples=1)
                assert trajectory.status == "completed"


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("in_flight", ["continue", "finish"])
def test_what_becomes_of_trajectories_under_way_is_told_with_every_push(tokenizer, in_flight, mode):
    with replicas(tokenizer, ["#### 1"], count=1) as served:
        begin, seen = served[0].sidecar.weights.begin, []

        def noted(version, manifest):
            seen.append((version, manifest.in_flight))
            return begin(version, manifest)

        served[0].sidecar.weights.begin = noted  # type: ignore[method-assign]
        with connect(served, in_flight=in_flight) as sidecars:
            push(sidecars, 0, mode)
            push(sidecars, 1, mode)
    assert seen == [(1, in_flight), (2, in_flight)]
