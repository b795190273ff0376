"""Group quorum: a batch does not wait for the slowest trajectory of every group."""

import asyncio
import time
from typing import Any

import pytest
from served_sidecars import make_tasks, make_tokenizer, serve

from rollout_sidecar.client import SidecarError
from rollout_sidecar.protocol import Limits, SamplingParams, derive_seed
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from tooljax.config import Config
from tooljax.rollouts import Groups, Sidecars

LATE = '<tool_call>{"name": "wait", "arguments": {"s": 1}}</tool_call>'
CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'


class Waiting(BaseTool):
    """Never answers, unless it is told when; knows how many of its instances are open."""

    def __init__(self):
        function = {
            "name": "wait",
            "parameters": {"type": "object", "properties": {"s": {"type": "number"}}},
        }
        super().__init__({}, {"type": "function", "function": function})
        self.created = self.open = 0
        self.cut: set[str] = set()
        """Instances whose call was cut off."""
        self.may_close = True
        """Whether those can be closed."""

    async def create(self, instance_id=None, **kwargs):
        self.created += 1
        self.open += 1
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        try:
            await asyncio.sleep(parameters.get("s", 60))
        except asyncio.CancelledError:
            self.cut.add(instance_id)
            raise
        return ToolResponse(text="late"), 0.0, {}

    async def release(self, instance_id, **kwargs):
        while instance_id in self.cut and not self.may_close:
            await asyncio.sleep(0.01)
        self.open -= 1

    def all_closed(self) -> bool:
        """Soon."""
        end = time.monotonic() + 20
        while self.open and time.monotonic() < end:
            time.sleep(0.01)
        return not self.open


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def slow(*seeds: int):
    """A policy that calls the tool in the trajectories of these seeds, and answers at once in the others."""
    return lambda request, turn: (
        CALL if request.seed in {derive_seed(s, 0) for s in seeds} else "#### 1"
    )


def roll(sidecars: Sidecars, tasks: int, samples: int, **kwargs: Any) -> Groups:
    return sidecars.rollout(
        make_tasks(tasks),
        samples=samples,
        seed=(5,),
        sampling=SamplingParams(),
        limits=Limits(max_tokens_per_turn=80),
        **kwargs,
    )


def statuses(groups: Groups) -> list[list[str]]:
    return [[trajectory.status for trajectory in group] for group in groups]


def seed(task: int, sample: int) -> int:
    return derive_seed(5, task, sample)


@pytest.mark.parametrize("count", [1, 2])
def test_stragglers_of_a_group_with_a_quorum_are_aborted_and_the_rest_is_in_order(tokenizer, count):
    tool = Waiting()
    script = slow(seed(0, 1), seed(2, 0), seed(2, 3))
    seen = []
    with (
        serve(tokenizer, script, count=count, tools=[tool]) as served,
        Sidecars([one.url for one in served], token=None, timeout_s=30.0) as sidecars,
    ):
        started = time.monotonic()
        groups = roll(
            sidecars,
            3,
            4,
            quorum=0.5,
            straggler_timeout_s=1.0,
            on_progress=lambda *done: seen.append(done),
        )
        took = time.monotonic() - started
        # Released: the sidecars are as if nothing had happened.
        assert tool.created == 12
        assert tool.all_closed()
        again = roll(sidecars, 1, 1, quorum=0.5)
    assert 1.0 <= took < 10
    done, lost = "completed", "aborted"
    assert statuses(groups) == [[done, lost, done, done], [done] * 4, [lost, done, done, lost]]
    assert [[t.task_id for t in group] for group in groups] == [[f"t{i}"] * 4 for i in range(3)]
    assert [[t.seed for t in g] for g in groups] == [
        [seed(i, s) for s in range(4)] for i in range(3)
    ]
    late = groups[2][3]
    assert (late.task_index, late.sample_index, late.token_ids, late.turns) == (2, 3, [], [])
    assert late.error.startswith("still under way when its group had a quorum")
    assert seen == [(n, 12) for n in range(1, 10)]
    assert statuses(again) == [[done]]


@pytest.mark.parametrize(
    ("tasks", "samples", "options", "count"),
    [
        (2, 1, {"wanted": 1}, 1),
        (1, 2, {"quorum": 0.5}, 1),
        # Beside the group whose straggler is aborted, another one of the same request goes on.
        (8, 3, {"quorum": 0.5, "straggler_timeout_s": 0.2}, 23),
    ],
)
def test_nobody_waits_until_the_tools_of_what_was_aborted_are_released(
    tokenizer, tasks, samples, options, count
):
    """A sandbox may take seconds to end, and a step has no need of it."""
    tool = Waiting()
    tool.may_close = False
    late = {derive_seed(seed(1, sample), 0) for sample in range(2)} if samples == 3 else set()

    def script(request, turn: int) -> str:
        return LATE if request.seed in late else slow(seed(0, 0))(request, turn)

    with (
        serve(tokenizer, script, tools=[tool]) as served,
        Sidecars([served[0].url], token=None, timeout_s=8.0) as sidecars,
    ):
        for _ in range(2):  # nor does what comes next
            groups = roll(sidecars, tasks, samples, **options)
            done = [t.status for group in groups for t in group if t.status != "aborted"]
            assert done == ["completed"] * count
        assert tool.open == 2
        tool.may_close = True
    assert tool.open == 0  # the fleet is closed when that is done


def test_without_a_quorum_nobody_is_aborted(tokenizer):
    tool = Waiting()
    # 3 of 4 wait: 1 is not 0.5 * 4.
    script = slow(seed(0, 0), seed(0, 1), seed(0, 2))
    with (
        serve(tokenizer, script, tools=[tool]) as served,
        Sidecars([served[0].url], token=None, timeout_s=1.0) as sidecars,
        pytest.raises(SidecarError, match="did not finish within 1 s"),
    ):
        roll(sidecars, 1, 4, quorum=0.5, straggler_timeout_s=0.0)


def test_stragglers_that_come_in_time_count(tokenizer):
    with (
        serve(tokenizer, ["#### 1"], delay_s=0.1) as served,
        Sidecars([served[0].url], token=None, timeout_s=30.0) as sidecars,
    ):
        groups = roll(sidecars, 2, 4, quorum=0.25, straggler_timeout_s=10.0)
    assert statuses(groups) == [["completed"] * 4] * 2


def test_the_share_is_taken_as_written(tokenizer):
    """0.7 * 10 is 7.000000000000001 in floating point."""
    tool = Waiting()
    script = slow(*(seed(0, s) for s in range(3)))
    with (
        serve(tokenizer, script, tools=[tool]) as served,
        Sidecars([served[0].url], token=None, timeout_s=10.0) as sidecars,
    ):
        groups = roll(sidecars, 1, 10, quorum=0.7)
    assert statuses(groups) == [["aborted"] * 3 + ["completed"] * 7]


def test_by_default_every_trajectory_is_waited_for():
    assert Config().sidecar.quorum == 1.0
