"""From a verl reward function's answer, float or dict, to one checked score."""

import asyncio
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    """What the function reported beside it, such as "acc". Values that are no finite numbers are left out."""


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

    A plain function runs in a thread, so that a slow one does not hold up other trajectories.
    """
    arguments = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
        **kwargs,
    }
    if inspect.iscoroutinefunction(function):
        answer = await function(**arguments)
    else:
        answer = await asyncio.to_thread(function, **arguments)
        if inspect.isawaitable(answer):
            answer = await answer
    return _read(answer, getattr(function, "__name__", str(function)))


def _read(answer: Any, name: str) -> Score:
    if isinstance(answer, dict):
        if "score" not in answer:
            raise ValueError(
                f'the reward function {name} returned keys {sorted(answer)}, but no "score"'
            )
        reward = _number(answer["score"])
        metrics = {key: _number(value) for key, value in answer.items() if key != "score"}
    else:
        reward = _number(answer)
        metrics = {"acc": reward}  # as verl does
    if reward is None:
        raise ValueError(
            f"the reward function {name} returned {answer!r}, expected a number or a dict"
        )
    if not math.isfinite(reward):
        raise ValueError(
            f"the reward function {name} returned score = {reward}, expected a finite number"
        )
    # Functions written for verl fill keys that a row has no value for with None or NaN.
    numbers = {
        key: value for key, value in metrics.items() if value is not None and math.isfinite(value)
    }
    return Score(reward, {"outcome": reward}, numbers)


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):  # NumPy scalars
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float)) else None
