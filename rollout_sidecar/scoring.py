"""The reward of one trajectory: what the reward function says, plus what tools and shaping add, each a named term.

Differs from verl, where rewards of tools are computed and then dropped: here they are added with a weight, and a
weight of 0 with rewards that are not 0 is warned about.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout_sidecar.errors import DeadlineError, RewardError, boundary
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import Task, Turn
from rollout_sidecar.rewards.base import Score, compute
from rollout_sidecar.rewards.registry import get_reward
from rollout_sidecar.tool_session import ToolSession, bounded

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """What scoring leaves on a trajectory."""

    terms: dict[str, float] = field(default_factory=dict)
    """They add up to the reward."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(kw_only=True)
class Scorer:
    """How rewards are made."""

    reward: str = ""
    """A built-in name, or path/to/file.py:function. Empty: chosen by each task's data_source."""
    tool_reward_weight: float = 0.0
    valid_call_reward: float = 0.0
    """Added once to a trajectory that made a successful tool call."""
    _warned: bool = False

    async def score(
        self,
        task: Task,
        solution: str,
        turns: Sequence[Turn],
        session: ToolSession,
        *,
        timeout_s: float,
        metrics: Metrics,
    ) -> Scored:
        """Tool rewards, then the reward. A reward function that fails leaves no terms: the reward is 0.

        Args:
            solution: what the policy wrote, without what tools answered.
            timeout_s: deadline of the reward function.
        """
        final = await session.rewards()
        try:
            with boundary(RewardError):
                score = await bounded(self._outcome(task, solution, turns, final), timeout_s)
        except (RewardError, DeadlineError) as error:
            metrics.count("reward_errors_total")
            _log.warning("no reward for task %r: %s", task.task_id, error)
            return Scored(metrics={"reward_error": 1.0}, error=f"reward: {error}")
        terms, tool_metrics = self._shaping(turns, _sum_rewards(turns, final))
        return Scored({**score.terms, **terms}, {**score.metrics, **tool_metrics})

    async def _outcome(
        self, task: Task, solution: str, turns: Sequence[Turn], tool_rewards: Mapping[str, float]
    ) -> Score:
        rounds = sum(bool(turn.calls) for turn in turns)
        return await compute(
            get_reward(self.reward, task.data_source),
            data_source=task.data_source,
            solution_str=solution,
            ground_truth=task.ground_truth,
            extra_info={
                **task.extra_info,
                # As verl counts: assistant turns, tool rounds, and the prompt.
                "num_turns": len(turns) + rounds + 1,
                "rollout_reward_scores": dict(tool_rewards),
            },
        )

    def _shaping(
        self, turns: Sequence[Turn], tool_rewards: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The weighted terms beside the outcome, and the unweighted tool rewards as metrics."""
        terms, metrics = {}, {}
        for name, reward in tool_rewards.items():
            if reward:
                metrics[f"tool_reward/{name}"] = reward
                self._warn_if_ignored(name, reward)
            if self.tool_reward_weight:
                terms[f"tool/{name}"] = self.tool_reward_weight * reward
        if self.valid_call_reward:
            succeeded = any(call.status == "ok" for turn in turns for call in turn.calls)
            terms["valid_call"] = self.valid_call_reward * succeeded
        return terms, metrics

    def _warn_if_ignored(self, name: str, reward: float) -> None:
        if self.tool_reward_weight or self._warned:
            return
        self._warned = True
        _log.warning(
            "tool %r returned the reward %g, which is ignored because tool_reward_weight is 0"
            " (set sidecar.tool_reward_weight)",
            name,
            reward,
        )


def _sum_rewards(turns: Sequence[Turn], final: Mapping[str, float]) -> dict[str, float]:
    """By tool: the rewards of its calls, and the one for the trajectory as a whole."""
    total = dict(final)
    for turn in turns:
        for call in turn.calls:
            if call.name in total:
                total[call.name] += call.reward
    return total
