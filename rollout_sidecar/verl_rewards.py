"""verl's helper functions, with its signatures, for users' rewards and tools that import them (`verl_names`)."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_NUMBER = r"-?\$?[\d.,]*\d[\d.,]*"
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)


def rollout_trace_op(function: F) -> F:
    """Leaves the function as it is: trajectories hold every call with its arguments, result and time."""
    return function


def gsm8k_extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> str | None:
    """The last number after "####" ("strict"), or simply the last number ("flexible"), without commas and "$"."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} must be strict or flexible")
    found = (_STRICT if method == "strict" else _FLEXIBLE).findall(solution_str)
    return re.sub(r"[$,]", "", found[-1]).rstrip(".") if found else None


def gsm8k_compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for another one, 0 for none.

    Differs from verl's: numbers are compared by value (18.00 is 18), and the whole text is searched, not only its end.
    """
    answer = gsm8k_extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if _same(answer, str(ground_truth)) else format_score


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The built-in reward of that data_source. ValueError if there is none."""
    from rollout_sidecar.rewards.registry import get_reward  # which loads users' files itself

    return get_reward("", data_source)(
        data_source=data_source,
        solution_str=solution_str,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def _same(answer: str, truth: str) -> bool:
    truth = re.sub(r"[\s$,]", "", truth).rstrip(".")
    try:
        return Fraction(answer) == Fraction(truth)
    except (ValueError, ZeroDivisionError):
        return answer == truth
