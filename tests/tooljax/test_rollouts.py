"""Rollouts of several real sidecars: who gets which group, seeds, order, versions, interruption, and what breaks."""

import asyncio
import os
import signal
import threading
import time
from typing import Any

import jax.numpy as jnp
import msgspec
import pytest
from served_sidecars import Backwards, make_tasks, make_tokenizer, serve

from rollout_sidecar.client import SidecarError
from rollout_sidecar.protocol import Limits, SamplingParams, Trajectory, VersionSpan, derive_seed
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from tooljax.config import Config
from tooljax.config.schema import SidecarConfig, WeightsConfig
from tooljax.rollouts import Groups, InterruptedRollout, Sidecars, open_sidecars

LIMITS = Limits(max_tokens_per_turn=64)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def connect(served, **kwargs: Any) -> Sidecars:
    return Sidecars([one.url for one in served], token=kwargs.pop("token", None), timeout_s=30.0)


def roll(sidecars: Sidecars, tasks, *, samples: int = 1, seed=(0,), **kwargs: Any) -> Groups:
    return sidecars.rollout(
        tasks, samples=samples, seed=seed, sampling=SamplingParams(), limits=LIMITS, **kwargs
    )


def by_seed(request, turn: int) -> str:
    """An answer that only the seed decides."""
    return f"#### {request.seed % 10}"


# --- who does what ----------------------------------------------------------------------------------------------


def test_groups_go_whole_to_one_sidecar_and_come_back_in_order(tokenizer):
    seen = []
    with (
        serve(tokenizer, by_seed, count=2, engine=Backwards) as served,
        connect(served) as sidecars,
    ):
        groups = roll(
            sidecars,
            make_tasks(5),
            samples=3,
            seed=(7, 3),
            on_progress=lambda *done: seen.append(done),
        )
        prompts = [one.prompts() for one in served]
    # In turns: 0, 2 and 4 to the first, 1 and 3 to the second, all three samples of each.
    for mine, expected in zip(prompts, ([0, 2, 4], [1, 3]), strict=True):
        named = sorted(int(text.partition("Problem ")[2].partition("?")[0]) for text in mine)
        assert named == sorted(expected * 3)
    assert [[t.task_id for t in group] for group in groups] == [[f"t{i}"] * 3 for i in range(5)]
    assert [[t.task_index for t in group] for group in groups] == [[i] * 3 for i in range(5)]
    assert [[t.sample_index for t in group] for group in groups] == [[0, 1, 2]] * 5
    assert [[t.seed for t in group] for group in groups] == [
        [derive_seed(7, 3, i, s) for s in range(3)] for i in range(5)
    ]
    assert seen == [(n, 15) for n in range(1, 16)]


def test_what_comes_back_does_not_depend_on_the_number_of_sidecars_or_on_timing(tokenizer):
    def made(**kwargs: Any) -> list[list[dict[str, Any]]]:
        with serve(tokenizer, by_seed, **kwargs) as served, connect(served) as sidecars:
            groups = roll(sidecars, make_tasks(4), samples=2, seed=(1,))
        return [[without_clock(trajectory) for trajectory in group] for group in groups]

    alone = made(count=1)
    assert made(count=3, engine=Backwards) == alone
    assert made(count=5) == alone  # one of them has nothing to do
    answers = {trajectory["messages"][-1]["content"] for group in alone for trajectory in group}
    assert len(answers) > 2  # the seeds reach the engine


def without_clock(trajectory: Trajectory) -> dict[str, Any]:
    record = msgspec.to_builtins(trajectory)
    for turn in record["turns"]:
        del turn["generate_s"]
    return {key: value for key, value in record.items() if key not in ("total_s", "tool_s")}


def test_sampling_and_limits_reach_the_engine(tokenizer):
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=7)
    with serve(tokenizer, ["#### 12345"]) as served, connect(served) as sidecars:
        ((trajectory,),) = sidecars.rollout(
            make_tasks(1),
            samples=1,
            seed=(0,),
            sampling=sampling,
            limits=Limits(max_tokens_per_turn=3),
        )
        assert served[0].engine.requests[0].sampling == sampling
    assert trajectory.status == "max_tokens"
    assert sum(trajectory.loss_mask) == 3


def test_requests_one_after_the_other_are_different_requests(tokenizer):
    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        first, second = (roll(sidecars, make_tasks(2), seed=(step,)) for step in (0, 1))
    assert [t.seed for (t,) in first] == [derive_seed(0, i, 0) for i in range(2)]
    assert [t.seed for (t,) in second] == [derive_seed(1, i, 0) for i in range(2)]


def test_a_token_is_read_from_its_file(tokenizer, tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    with serve(tokenizer, by_seed, token="secret") as served:
        config = Config(sidecar=SidecarConfig(urls=(served[0].url,), token_file=str(file)))
        with open_sidecars(config) as sidecars:
            assert len(roll(sidecars, make_tasks(1))) == 1
        with (
            pytest.raises(SidecarError, match=r"401 unauthorized.*set sidecar.token_file"),
            open_sidecars(Config(sidecar=SidecarConfig(urls=(served[0].url,)))),
        ):
            pass


# --- versions ---------------------------------------------------------------------------------------------------


def push(sidecars: Sidecars, step: int):
    tensors = [("a", jnp.arange(6, dtype=jnp.float32)), ("b", jnp.full((2, 2), step, jnp.float32))]
    return sidecars.push(tensors, step=step, weights=WeightsConfig(part_bytes=1024, timeout_s=10.0))


def test_versions_begin_above_whatever_a_sidecar_serves_and_grow_with_the_steps(tokenizer):
    with serve(tokenizer, by_seed, count=2, versions=(7, 3)) as served:

        def serving() -> list[int]:
            return [one.engine.policy_version for one in served]

        with connect(served) as sidecars:
            # Nothing was pushed yet: an evaluation takes what there is, training does not.
            assert [info.policy_version for info in sidecars.info()] == [7, 3]
            assert len(roll(sidecars, make_tasks(1))) == 1
            with pytest.raises(SidecarError, match="version 7 is being served.*push the weights"):
                roll(sidecars, make_tasks(1), step=0)
            push(sidecars, 0)
            assert serving() == [8, 8]
            assert served[0].engine.loaded == ["a", "b"]
            ((trajectory,),) = roll(sidecars, make_tasks(1), step=0)
            assert [span.policy_version for span in trajectory.version_spans] == [8]
            assert [sidecars.policy_lag(trajectory, step) for step in (0, 1, 5)] == [0, 1, 5]
            # Of the oldest token, wherever it stands.
            spans = [VersionSpan(start=v, end=v + 1, policy_version=v) for v in (10, 9, 11)]
            mixed = msgspec.structs.replace(trajectory, version_spans=spans)
            assert sidecars.policy_lag(mixed, 5) == 4
            push(sidecars, 1)
            assert serving() == [9, 9]
            with pytest.raises(SidecarError, match="min_policy_version=10"):
                roll(sidecars, make_tasks(1), step=2)
        # A run that goes on at step 1, with sidecars that outlived the first.
        with connect(served) as sidecars:
            push(sidecars, 1)
            assert serving() == [11, 11]
            ((trajectory,),) = roll(sidecars, make_tasks(1), step=1)
            assert sidecars.policy_lag(trajectory, 1) == 0


def test_a_trajectory_without_sampled_tokens_has_no_lag(tokenizer):
    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        ((trajectory,),) = sidecars.rollout(
            make_tasks(1),
            samples=1,
            seed=(0,),
            sampling=SamplingParams(),
            limits=Limits(max_prompt_tokens=1),
        )
        assert trajectory.status == "prompt_too_long"
        assert sidecars.policy_lag(trajectory, 3) == 0


# --- interruption -----------------------------------------------------------------------------------------------


class Waiting(BaseTool):
    """Answers after a minute; counts who made and who released it."""

    def __init__(self):
        super().__init__(
            {},
            {
                "type": "function",
                "function": {
                    "name": "wait",
                    "description": "Waits.",
                    "parameters": {"type": "object", "properties": {}, "required": []},
                },
            },
        )
        self.created = self.released = 0
        self.calls = threading.Semaphore(0)

    async def create(self, instance_id=None, **kwargs):
        self.created += 1
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls.release()
        await asyncio.sleep(60)

    async def release(self, instance_id, **kwargs):
        self.released += 1


CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'


def when_called(tool: Waiting, times: int, act) -> threading.Thread:
    """Acts in another thread once the tool is being called that often."""

    def wait() -> None:
        if all(tool.calls.acquire(timeout=20) for _ in range(times)):
            act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_rollout_on_every_sidecar_and_a_second_one_the_process(tokenizer, number):
    tool = Waiting()
    before = signal.getsignal(number)
    with serve(tokenizer, [CALL], count=2, tools=[tool]) as served:
        with connect(served) as sidecars:
            killer = when_called(tool, 4, lambda: os.kill(os.getpid(), number))
            started = time.monotonic()
            with pytest.raises(InterruptedRollout):
                roll(sidecars, make_tasks(2), samples=2)
            assert time.monotonic() - started < 10  # not the tool's minute
            killer.join()
            assert sidecars.stop_requested
            # Already released, not only asked to be: another run may use the sidecars at once.
            assert (tool.created, tool.released) == (4, 4)
            # Nothing new begins, but the weights can still be sent.
            with pytest.raises(InterruptedRollout):
                roll(sidecars, make_tasks(1))
            assert tool.created == 4
            push(sidecars, 0)
            for each in (signal.SIGINT, signal.SIGTERM):
                assert signal.getsignal(each) is signal.SIG_DFL
        assert signal.getsignal(number) == before


def test_a_signal_between_rollouts_is_remembered(tokenizer):
    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        assert not sidecars.stop_requested
        os.kill(os.getpid(), signal.SIGINT)
        assert sidecars.stop_requested
        with pytest.raises(InterruptedRollout):
            roll(sidecars, make_tasks(1))
        assert served[0].engine.requests == []


# --- what breaks ------------------------------------------------------------------------------------------------


def test_a_sidecar_that_is_down_is_named_and_nothing_stays_open(tokenizer, unused_tcp_port):
    down = f"http://127.0.0.1:{unused_tcp_port}"
    with serve(tokenizer, by_seed) as served:
        sidecars = Sidecars([served[0].url, down], token=None, timeout_s=1.0)
        with (
            pytest.raises(SidecarError, match=f"{down} (cannot be reached|did not finish)"),
            sidecars,
        ):
            pass


def test_a_sidecar_that_stops_leaves_its_work_to_the_others(tokenizer):
    with (
        serve(tokenizer, by_seed, count=2, engine=Backwards) as served,
        connect(served) as sidecars,
    ):
        stopping = threading.Thread(target=lambda: served[1].do(served[1].sidecar.stop()))
        stopping.start()
        groups = roll(sidecars, make_tasks(4), samples=2)
        stopping.join()
        assert [[t.status for t in group] for group in groups] == [["completed"] * 2] * 4
        assert not sidecars.fleet.replicas[1].live


def test_a_request_that_no_sidecar_would_take_is_an_error_at_once(tokenizer):
    with serve(tokenizer, by_seed, count=2) as served, connect(served) as sidecars:
        empty = msgspec.structs.replace(make_tasks(1)[0], messages=[])
        with pytest.raises(SidecarError, match=r"400 invalid_request.*'t0' has no messages"):
            roll(sidecars, [empty])
        assert len(sidecars.fleet.live) == 2


def test_no_sidecar_is_an_error_that_says_what_to_set():
    with pytest.raises(ValueError, match=r"set sidecar\.urls"):
        Sidecars([], token=None, timeout_s=1.0)


# --- what does not fit ------------------------------------------------------------------------------------------


def test_a_sidecar_of_another_model_or_with_too_short_contexts_is_refused(tokenizer):
    with serve(tokenizer, by_seed) as served, connect(served) as sidecars:
        (info,) = sidecars.info()
        sidecars.check_fit(vocab_hash=info.vocab_hash, max_trajectory_tokens=info.max_model_tokens)
        with pytest.raises(ValueError, match=rf"{served[0].url} serves .* with another vocabulary"):
            sidecars.check_fit(vocab_hash="0" * 32, max_trajectory_tokens=1)
        longer = info.max_model_tokens + 1
        with pytest.raises(ValueError, match=rf"limits.max_trajectory_tokens={longer}: lower that"):
            sidecars.check_fit(vocab_hash=info.vocab_hash, max_trajectory_tokens=longer)


def test_a_file_that_is_not_there_is_named():
    sidecar = SidecarConfig(urls=("http://127.0.0.1:9",), token_file="/no/such/token")
    with pytest.raises(
        ValueError, match=r"sidecar.token_file='/no/such/token' cannot be read: No such file"
    ):
        with open_sidecars(Config(sidecar=sidecar)):
            pass
    sidecar = SidecarConfig(urls=("https://127.0.0.1:9",), ca_file="/no/such/ca")
    with pytest.raises(ValueError, match=r"sidecar.ca_file='/no/such/ca' cannot be used \(No such"):
        with open_sidecars(Config(sidecar=sidecar)):
            pass
