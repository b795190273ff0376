"""The answer reward of GSM8K: the number after the last "####" equals the ground truth.

Numbers are compared by value: "1,234.50", "$1234.5" and "1234.5." are equal. Differs from verl's: fractions are read
("3/4"), and what is not one number ("12 * 3", "4,5") is no answer rather than its first digits.
"""

import re
from fractions import Fraction
from typing import Any

_NUMBER = r"[-+]?\$?\s?[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?"
# What may not follow: the rest of a longer number, or an operator.
_ANSWER = re.compile(rf"####\s*({_NUMBER})(?![\d/^*+]|[.,]\d|[eE][-+]?\d|\s*[-+*/^=]\s*\d)")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_reward: float = 0.0,
    **kwargs: Any,
) -> dict[str, float]:
    """1 for the right answer, `format_reward` for a wrong one in the right form, 0 without "#### <number>".

    `solution_str` should be the policy's own text: with tool results in it, a tool could write the answer.
    """
    truth = _value(str(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    answers = _ANSWER.findall(solution_str)
    answer = _value(answers[-1]) if answers else None
    correct = answer == truth
    score = 1.0 if correct else format_reward if answer is not None else 0.0
    return {"score": score, "acc": float(correct), "answered": float(answer is not None)}


def _value(text: str) -> Fraction | None:
    """The value of a number as people write it; None if it is none."""
    text = re.sub(r"[\s$,]", "", text).rstrip(".")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
