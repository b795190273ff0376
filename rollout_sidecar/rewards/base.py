"""From a verl reward function's answer, float or dict, to one checked score."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout_sidecar.foreign import invoke
from rollout_sidecar.foreign_values import numbers, to_number

RewardFunction = Callable[..., Any]
"""verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict, or a
coroutine of that. A dict has "score"; its other numbers become metrics, and may differ from row to row."""


@dataclass(frozen=True)
class Score:
    """The reward of one trajectory."""

    reward: float
    terms: dict[str, float] = field(default_factory=dict)
    """Its parts, weighted: they add up to it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the function reported beside it, such as "acc". Values that are no finite numbers are left out, as functions
    written for verl fill keys that a row has no value for with None or NaN."""


async def compute(
    function: RewardFunction,
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Score:
    """Calls a reward function and checks its answer: ValueError for a score that is missing, NaN or infinite.

    It runs where it holds up no other trajectory, see `foreign.invoke`.
    """
    answer = await invoke(
        function,
        data_source=data_source,
        solution_str=solution_str,
        ground_truth=ground_truth,
        extra_info=extra_info,
        **kwargs,
    )
    return _read(answer, getattr(function, "__name__", str(function)))


def _read(answer: Any, name: str) -> Score:
    given = answer
    if isinstance(answer, dict):
        if "score" not in answer:
            keys = ", ".join(sorted(map(repr, answer)))
            raise ValueError(f'the reward function {name} returned keys [{keys}], but no "score"')
        given = answer["score"]
    reward = to_number(given)
    if reward is None:
        raise ValueError(
            f"the reward function {name} returned {answer!r}, expected a number or a dict"
        )
    if not math.isfinite(reward):
        raise ValueError(
            f"the reward function {name} returned score = {reward}, expected a finite number"
        )
    if isinstance(answer, dict):
        metrics = numbers({key: value for key, value in answer.items() if key != "score"})
    else:
        metrics = {"acc": reward}  # as verl does
    return Score(reward, {"outcome": reward}, metrics)
