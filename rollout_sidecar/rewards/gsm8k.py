"""The answer reward of GSM8K: the number after the last "####" equals the ground truth.

Numbers are compared by value: "1,234.50", "$1234.5" and "1234.5." are equal. Differs from verl's: fractions are read
("3/4"), what is not one number ("12 * 3", "4,5") is no answer rather than its first digits, and the whole text is read.
`verl_identical` gives verl's reading and comparison.
"""

import re
from fractions import Fraction
from typing import Any, Literal

_NUMBER = r"[-+]?\$?\s?[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?"
# What may not follow: the rest of a longer number, or an operator.
_STRICT = re.compile(rf"####\s*({_NUMBER})(?![\d/^*+]|[.,]\d|[eE][-+]?\d|\s*[-+*/^=]\s*\d)")
# A sign right after a digit is an operator: the last number of "10-3" is 3.
_FLEXIBLE = re.compile(rf"(?<![\d.])({_NUMBER})")

_VERL_CHARACTERS = 300
"""verl looks no further back than this from the end."""
_VERL_STRICT = re.compile(r"#### (-?[\d.,]+)")
_VERL_FLEXIBLE = re.compile(r"(-?[\d.,]+)")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
    verl_identical: bool = False,
) -> dict[str, float]:
    """`score` for the right answer, `format_score` for a wrong one in the right form, 0 without an answer.

    Args:
        method: "strict" reads "#### <number>", "flexible" the last number of the text.
        verl_identical: read and compare as verl does: the last 300 characters, without commas and dollar signs, as text
            ("42.0" is not "42"). What it reads is `solution_str` all the same: see reward.text for that.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f'method={method!r} must be "strict" or "flexible"')
    if verl_identical:
        answer = _verl_answer(solution_str, method)
        correct = answer is not None and answer == str(ground_truth)
    else:
        truth = _value(str(ground_truth))
        if truth is None:
            raise ValueError(f"the ground truth {ground_truth!r} is not a number")
        found = (_STRICT if method == "strict" else _FLEXIBLE).findall(solution_str)
        answer = _value(found[-1]) if found else None
        correct = answer == truth
    reward = score if correct else format_score if answer is not None else 0.0
    return {"score": reward, "acc": float(correct), "answered": float(answer is not None)}


def _value(text: str) -> Fraction | None:
    """The value of a number as people write it; None if it is none."""
    text = re.sub(r"[\s$,]", "", text).rstrip(".")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _verl_answer(text: str, method: str) -> str | None:
    text = text[-_VERL_CHARACTERS:]
    if method == "strict":
        found = _VERL_STRICT.findall(text)
        return found[-1].replace(",", "").replace("$", "") if found else None
    return next(
        (number for number in reversed(_VERL_FLEXIBLE.findall(text)) if number != "."), None
    )
