"""Context policies in whole trajectories, with a template that drops earlier thinking when a user replies."""

import pytest
from sidecar_cases import make_agent, make_request, make_task

from rollout_sidecar.agent import run_rollout
from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.protocol import Limits, TokenStream, Trajectory
from tooljax.metrics import rollout_metrics


class Asking(BaseInteraction):
    """Asks again so many times."""

    def __init__(self, times: int):
        super().__init__({})
        self.left = times

    async def generate_response(self, instance_id, messages, **kwargs):
        self.left -= 1
        return self.left < 0, "Are you sure?", 0.0, {}


async def converse(tokenizer, policy: str, script: list[str], **limits) -> Trajectory:
    """A trajectory whose template opens the thinking of each turn, and drops it once another question comes."""
    agent = make_agent(tokenizer, script)
    agent.context_policy = policy
    agent.interactions = {"user": Asking(len(script) - 1)}
    request = make_request(
        make_task(interaction="user"), limits=Limits(max_tokens_per_turn=1024, **limits)
    )
    trajectory = await run_rollout(agent, request.tasks[0], request.rollouts[0], request)
    assert agent.leases.live == 0
    return trajectory


def streams(trajectory: Trajectory) -> list[TokenStream | Trajectory]:
    return [*trajectory.earlier_streams, trajectory]


def sampled(tokenizer, stream: TokenStream | Trajectory) -> str:
    pairs = zip(stream.token_ids, stream.loss_mask, strict=True)
    return tokenizer.decode([id for id, mask in pairs if mask])


TURNS = ["one</think>#### 3", "two</think>#### 4", "three</think>#### 2"]


async def test_keep_goes_on_in_one_stream(think_tokenizer):
    trajectory = await converse(think_tokenizer, "keep", TURNS)
    assert (trajectory.status, trajectory.earlier_streams) == ("completed", [])
    assert [turn.stream for turn in trajectory.turns] == [0, 0, 0]
    assert think_tokenizer.decode(trajectory.token_ids).count("</think>") == 3


async def test_fork_begins_a_stream_with_what_the_template_shows_then(think_tokenizer):
    """Pain point 3."""
    trajectory = await converse(think_tokenizer, "fork", TURNS)
    assert (trajectory.status, trajectory.reward) == ("completed", 1.0)
    made = streams(trajectory)
    assert [turn.stream for turn in trajectory.turns] == [0, 1, 2]
    # Every sampled token is in exactly one stream with mask True, where its turn says.
    assert [sampled(think_tokenizer, stream) for stream in made] == [
        f"{t}<|im_end|>" for t in TURNS
    ]
    for turn in trajectory.turns:
        stream = made[turn.stream]
        assert [i for i, mask in enumerate(stream.loss_mask) if mask] == [
            *range(turn.start, turn.end)
        ]
        assert [(s.start, s.end) for s in stream.version_spans] == [(turn.start, turn.end)]
        assert len(stream.rollout_log_probs) == len(stream.token_ids)
    # The thinking of earlier turns is in no later context.
    contexts = [think_tokenizer.decode(s.token_ids[: s.prompt_tokens]) for s in made]
    assert ["one" in context for context in contexts] == [False] * 3
    assert "#### 3<|im_end|>\n<|im_start|>user\nAre you sure?" in contexts[1]
    metrics = rollout_metrics([trajectory])
    assert metrics["rollout/forks_per_trajectory"] == 2
    assert metrics["rollout/completion_tokens/mean"] == sum(
        t.end - t.start for t in trajectory.turns
    )


async def test_the_room_after_a_fork_is_that_of_the_new_context(think_tokenizer):
    """The context gets shorter by what the template drops: a limit that the old one would pass is kept."""
    thought = "x" * 200
    script = [f"{thought}</think>#### 3", "y</think>#### 2"]
    free = await converse(think_tokenizer, "fork", script)
    first, second = streams(free)
    longest = max(len(first.token_ids), len(second.token_ids))
    exact = await converse(think_tokenizer, "fork", script, max_trajectory_tokens=longest)
    assert (exact.status, len(exact.turns)) == ("completed", 2)
    kept = await converse(think_tokenizer, "keep", script, max_trajectory_tokens=longest)
    assert (kept.status, len(kept.turns)) == ("max_tokens", 1)


async def test_reject_ends_the_trajectory_with_what_was_sampled(think_tokenizer):
    trajectory = await converse(think_tokenizer, "reject", TURNS)
    assert trajectory.status == "context_rewritten"
    assert trajectory.error
    assert sampled(think_tokenizer, trajectory) == f"{TURNS[0]}<|im_end|>"
    assert trajectory.loss_mask[-1]
    assert trajectory.earlier_streams == []


@pytest.mark.parametrize("policy", ["keep", "fork", "reject"])
async def test_a_template_that_only_appends_knows_no_difference(tiny_tokenizer, policy):
    script = ["#### 3", "#### 2"]
    trajectory = await converse(tiny_tokenizer, policy, script)
    assert (trajectory.status, trajectory.earlier_streams) == ("completed", [])
    kept = await converse(tiny_tokenizer, "keep", script)
    assert trajectory.token_ids == kept.token_ids
