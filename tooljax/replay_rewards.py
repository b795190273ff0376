"""Rewards of stored trajectories, made again with the sidecar's own code: its reward functions, its weighted terms."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

from rollout_sidecar.metrics import Metrics
from rollout_sidecar.profiles import get_profile
from rollout_sidecar.protocol import RewardWeights, Task, Trajectory
from rollout_sidecar.scoring import Scored, Scorer
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.config import Config

TIMEOUT_S = 60.0
"""For one reward function."""


class NotRepeatable(Exception):
    """The reward cannot be made again here; the sentence says why."""


@dataclass
class RewardReplay:
    """Scores trajectories as the sidecar of a run did."""

    config: Config
    tokenizer_folder: Path
    """Where the run keeps the files of its tokenizer."""
    _tokenizer: ChatTokenizer | None = None
    _metrics: Metrics = field(default_factory=Metrics)

    def reward(self, trajectory: Trajectory, task: Task | None, weights: RewardWeights) -> float:
        """The reward, made twice. Raises NotRepeatable."""
        if not trajectory.scored:
            raise NotRepeatable("it had no reward")
        if task is None:
            raise NotRepeatable("its task is not stored")
        if self.config.sidecar.urls:
            raise NotRepeatable("remote sidecars made the rewards, with settings of their own")
        if trajectory.status == "aborted" or not trajectory.turns:
            raise NotRepeatable("nothing was sampled")
        first, second = (asyncio.run(self._score(trajectory, task, weights)) for _ in range(2))
        if first != second:
            raise NotRepeatable("the reward function answers differently each time")
        if not first.scored:
            raise NotRepeatable(f"the reward function failed here: {first.error}")
        return sum(first.terms.values())

    async def _score(self, trajectory: Trajectory, task: Task, weights: RewardWeights) -> Scored:
        settings = self.config.reward
        profile = get_profile(self.config.sidecar.profile)
        text = settings.text or profile.solution_text
        scorer = Scorer(
            reward=settings.function,
            reward_kwargs=json.loads(settings.function_kwargs or "{}"),
            text=text,
        )
        return await scorer.score(
            task,
            policy_text=policy_text(trajectory),
            all_text=self._all_text(trajectory) if text == "all" else "",
            turns=trajectory.turns,
            tool_rewards=_trajectory_rewards(trajectory),
            weights=weights,
            response_tokens=len(trajectory.token_ids) - trajectory.prompt_tokens,
            max_response_tokens=(
                self.config.limits.max_trajectory_tokens - trajectory.prompt_tokens
            ),
            timeout_s=TIMEOUT_S,
            metrics=self._metrics,
        )

    def _all_text(self, trajectory: Trajectory) -> str:
        if trajectory.earlier_streams:
            raise NotRepeatable("its context was rewritten, and reward.text is all")
        if self._tokenizer is None:
            try:
                self._tokenizer = ChatTokenizer.from_folder(self.tokenizer_folder)
            except ValueError as error:
                raise NotRepeatable(str(error)) from error
        return self._tokenizer.decode(
            trajectory.token_ids[trajectory.prompt_tokens :], skip_special=True
        )


def policy_text(trajectory: Trajectory) -> str:
    """What the policy wrote, one line break between turns: what reward functions read unless reward.text is all."""
    if not trajectory.turns:
        return ""
    said = [m.get("content") or "" for m in trajectory.messages if m.get("role") == "assistant"]
    return "\n".join(said[-len(trajectory.turns) :])


def _trajectory_rewards(trajectory: Trajectory) -> dict[str, float]:
    """What calc_reward of each tool gave: all that the tool gave, which is a metric, less what it gave to calls."""
    prefix = "tool_reward/"
    rewards = {
        name.removeprefix(prefix): value
        for name, value in trajectory.metrics.items()
        if name.startswith(prefix)
    }
    for call in (call for turn in trajectory.turns for call in turn.calls):
        if call.name in rewards and call.status == "ok":
            rewards[call.name] -= call.reward
    return rewards
