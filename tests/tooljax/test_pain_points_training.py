"""Known failures of multi-turn training, from trajectories to the batch: what a trainer must not get wrong."""

import numpy as np
import pytest
from served_sidecars import make_tasks, make_tokenizer, serve

from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import Limits, SamplingParams
from rollout_sidecar.tools.calculator import CalculatorTool
from tooljax.batch import TrainBatch, unpack
from tooljax.config import Config
from tooljax.config.schema import BatchConfig, GrpoConfig
from tooljax.rollouts import Sidecars
from tooljax.training_batch import make_batch

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_reward_reaches_the_sampled_tokens_of_a_trajectory_that_ends_in_an_observation(tokenizer):
    """Pain point 4: the last token is a tool's, and has loss mask 0."""
    call = get_format("hermes").render_call("calculator", {"expression": "1+1"})

    def script(request, turn: int) -> str:
        return f"#### {request.ordinal}\n{call}"  # the second of the two samples is right

    task = make_tasks(2)[1]
    with (
        serve(tokenizer, script, tools=[CalculatorTool({}, SCHEMA)]) as served,
        Sidecars([served[0].url], token=None, timeout_s=30.0) as sidecars,
    ):

        def rolled(room: int):
            return sidecars.rollout(
                [task],
                samples=2,
                seed=(0,),
                sampling=SamplingParams(),
                limits=Limits(max_turns=2, max_tokens_per_turn=128, max_trajectory_tokens=room),
            )

        free = rolled(4096)[0][0]
        groups = rolled(free.turns[1].start)  # room for the observation, and for nothing after it
    for trajectory in groups[0]:
        assert trajectory.status == "max_tokens"
        assert trajectory.messages[-1]["role"] == "tool"
        assert not trajectory.loss_mask[-1]
    assert [t.reward for t in groups[0]] == [0.0, 1.0]
    config = Config(
        grpo=GrpoConfig(group_size=2, scale_by_std=False),
        batch=BatchConfig(row_lengths=(512,), rows_per_microbatch=1),
    )
    batch, metrics, _ = make_batch(config, groups)
    assert isinstance(batch, TrainBatch)
    for trajectory, advantage, found in zip(
        groups[0], (-0.5, 0.5), unpack(batch.advantages, batch), strict=True
    ):
        np.testing.assert_array_equal(found, np.where(trajectory.loss_mask, advantage, 0.0))
    assert metrics["perf/loss_tokens"] == sum(sum(t.loss_mask) for t in groups[0]) > 0
