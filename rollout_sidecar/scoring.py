"""The reward of one trajectory: reward = outcome + Σ weight · term, each term named and logged.

The outcome is what the reward function says. Beside it, with the weights that the request gives: "tool/<name>" (rewards
that tools return), "turn" (scores that an interaction gives), "valid_call", "invalid_call" (share of calls that could
not be executed) and "overlong". A term with weight 0 is left out.

A reward that cannot be made (the function raises, times out, returns NaN or no score) is no reward of 0: the trajectory
is unscored, says why, and is trained on by nobody.

Differs from verl, where rewards of tools and turns are computed and then dropped: here they are added with a weight,
and a weight of 0 with rewards that are not 0 is warned about.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_sidecar.errors import RewardError, RolloutError, boundary
from rollout_sidecar.foreign import bounded
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import RewardWeights, Task, Turn
from rollout_sidecar.rewards.base import Score, compute
from rollout_sidecar.rewards.registry import accepted_kwargs, get_reward

_INVALID = ("parse_error", "unknown_tool", "bad_arguments")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """What scoring leaves on a trajectory."""

    terms: dict[str, float] = field(default_factory=dict)
    """They add up to the reward."""
    metrics: dict[str, float] = field(default_factory=dict)
    scored: bool = True
    """False: there is no reward; `error` says why, and terms and metrics are empty."""
    error: str = ""


@dataclass(kw_only=True)
class Scorer:
    """How rewards are made."""

    reward: str = ""
    """A built-in name, or path/to/file.py:function. Empty: chosen by each task's data_source."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of that function. Chosen by data_source, a function gets those that it takes."""
    text: Literal["policy", "all"] = "policy"
    """What the function reads as solution_str: what the policy wrote, or everything after the prompt."""
    _warned: set[str] = field(default_factory=set)
    _weighted: set[str] = field(default_factory=set)

    async def score(
        self,
        task: Task,
        *,
        policy_text: str,
        all_text: str,
        turns: Sequence[Turn],
        tool_rewards: Mapping[str, float],
        weights: RewardWeights | None,
        response_tokens: int,
        max_response_tokens: int,
        timeout_s: float,
        metrics: Metrics,
    ) -> Scored:
        """Calls the reward function, then adds the weighted terms. Never raises but CancelledError.

        Args:
            policy_text: the turns as the policy wrote them, one line break between two, without end-of-turn tokens.
            all_text: everything after the prompt, observations included, without special tokens: verl's solution_str.
                Read only if `text` says so.
            tool_rewards: what calc_reward gave, by tool. Rewards of single calls are read from `turns`.
            weights: None for the outcome alone, as evaluations want it.
            response_tokens: tokens after the prompt, observations included.
            max_response_tokens: the most that there may be: the limit of the trajectory less its prompt.
            timeout_s: deadline of the reward function.
        """
        solution = policy_text if self.text == "policy" else all_text
        try:
            with boundary(RewardError):
                outcome = self._outcome(task, solution, turns, tool_rewards)
                score = await bounded(outcome, timeout_s)
            terms = {
                **score.terms,
                **self._tool_terms(turns, tool_rewards, weights),
                **self._turn_term(task, turns, weights),
                **_call_terms(turns, weights),
                **_overlong_term(response_tokens, max_response_tokens, weights),
            }
            _check_finite(terms)
        except RolloutError as error:  # also one that the function raised itself, whatever its kind
            metrics.count("reward_errors_total")
            _log.warning("no reward for task %r: %s", task.task_id, error)
            return Scored(scored=False, error=f"reward: {error}")
        return Scored(terms, {**score.metrics, **_unweighted(turns, tool_rewards)})

    async def _outcome(
        self, task: Task, solution: str, turns: Sequence[Turn], tool_rewards: Mapping[str, float]
    ) -> Score:
        function = get_reward(self.reward, task.data_source)
        scores = _turn_scores(turns)
        return await compute(
            function,
            data_source=task.data_source,
            solution_str=solution,
            ground_truth=task.ground_truth,
            extra_info={
                **task.extra_info,
                # As verl counts: assistant turns, what answered them, and the prompt.
                "num_turns": len(turns)
                + sum(bool(turn.calls) or turn.reply is not None for turn in turns)
                + 1,
                # Three of its names for the same: up to 0.6.1 the first, later the other two.
                "rollout_reward_scores": {**tool_rewards, "user_turn_rewards": scores},
                "tool_rewards": [call.reward for turn in turns for call in turn.calls],
                "turn_scores": scores,
            },
            **accepted_kwargs(self.reward, function, self.reward_kwargs),
        )

    def _tool_terms(
        self,
        turns: Sequence[Turn],
        tool_rewards: Mapping[str, float],
        weights: RewardWeights | None,
    ) -> dict[str, float]:
        if weights is None:
            return {}
        rewards = _sum_rewards(turns, tool_rewards)
        for name, reward in rewards.items():
            self._warn_if_ignored(f"tool {name!r} returned the reward", reward, weights, "tool")
        if not weights.tool:
            return {}
        return {f"tool/{name}": weights.tool * reward for name, reward in rewards.items()}

    def _turn_term(
        self, task: Task, turns: Sequence[Turn], weights: RewardWeights | None
    ) -> dict[str, float]:
        if weights is None:
            return {}
        scores = _turn_scores(turns)
        for score in scores:
            who = f"interaction {task.interaction!r} gave a turn the score"
            self._warn_if_ignored(who, score, weights, "turn")
        return {"turn": weights.turn * _merged(scores, weights.turn_merge)} if weights.turn else {}

    def _warn_if_ignored(
        self, who: str, value: float, weights: RewardWeights, kind: Literal["tool", "turn"]
    ) -> None:
        """Once for each `who`; not where the weight was more than 0 before, and was annealed."""
        if getattr(weights, kind):
            self._weighted.add(kind)
        if not value or kind in self._weighted or who in self._warned:
            return
        self._warned.add(who)
        _log.warning(
            "%s %g, which is ignored because its weight is 0 (set reward.%s)", who, value, kind
        )


def overlong_penalty(response_tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft over-long punishment, from 0 down to -1 (arXiv:2503.14476, eq. 13).

    0 up to max - buffer tokens, then falling linearly, -1 at max and beyond. A buffer longer than max counts as max.

    Args:
        response_tokens: |y| there: tokens after the prompt, observations included.
        max_response_tokens: L_max there: the trajectory limit less the prompt.
        buffer_tokens: L_cache there. 0 punishes only what is longer than max.
    """
    if response_tokens > max_response_tokens:
        return -1.0
    buffer_tokens = min(buffer_tokens, max_response_tokens)
    excess = response_tokens - (max_response_tokens - buffer_tokens)
    return -excess / buffer_tokens if excess > 0 else 0.0


def _call_terms(turns: Sequence[Turn], weights: RewardWeights | None) -> dict[str, float]:
    statuses = [call.status for turn in turns for call in turn.calls]
    terms = {}
    if weights is not None and weights.valid_call:
        terms["valid_call"] = weights.valid_call * ("ok" in statuses)
    if weights is not None and weights.invalid_call:
        invalid = sum(status in _INVALID for status in statuses)
        terms["invalid_call"] = weights.invalid_call * (invalid / max(len(statuses), 1))
    return terms


def _overlong_term(
    response_tokens: int, max_response_tokens: int, weights: RewardWeights | None
) -> dict[str, float]:
    if weights is None or not weights.overlong:
        return {}
    penalty = overlong_penalty(response_tokens, max_response_tokens, weights.overlong_buffer_tokens)
    return {"overlong": weights.overlong * penalty}


def _sum_rewards(turns: Sequence[Turn], tool_rewards: Mapping[str, float]) -> dict[str, float]:
    """By tool: the rewards of its calls, and the one for the trajectory as a whole."""
    total = dict(tool_rewards)
    for turn in turns:
        for call in turn.calls:
            if call.status == "ok":
                total[call.name] = total.get(call.name, 0.0) + call.reward
    return total


def _turn_scores(turns: Sequence[Turn]) -> list[float]:
    return [turn.reply.score for turn in turns if turn.reply is not None]


def _merged(scores: Sequence[float], rule: Literal["sum", "mean", "last", "max"]) -> float:
    """One score of several; 0 if there is none."""
    if not scores:
        return 0.0
    if rule == "last":
        return scores[-1]
    if rule == "max":
        return max(scores)
    return sum(scores) / (len(scores) if rule == "mean" else 1)


def _unweighted(turns: Sequence[Turn], tool_rewards: Mapping[str, float]) -> dict[str, float]:
    """What tools and interaction gave, before weights: it is reported even if it counts for nothing."""
    rewards = _sum_rewards(turns, tool_rewards)
    metrics = {f"tool_reward/{name}": reward for name, reward in rewards.items() if reward}
    if scores := _turn_scores(turns):
        metrics["turn_score"] = sum(scores)
    return metrics


def _check_finite(terms: Mapping[str, float]) -> None:
    for name, value in terms.items():
        if not math.isfinite(value):
            raise RewardError(f"the term {name} is {value}, expected a finite number")
