"""The reward of question answering with search: what stands in the last <answer>…</answer> against the known answers.

Three measures, after SQuAD's normalisation (arXiv:1606.05250, section 6.1: no punctuation and no articles; lower case
and single spaces): exact match; sub-match, where a known answer's words stand in a row in the answer; F1 over
words. Each is the best over the known answers. Search-R1's (arXiv:2503.09516) reward is the exact match.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    measure: Literal["em", "sub_em", "f1"] = "em",
    score: float = 1.0,
    format_score: float = 0.0,
) -> dict[str, float]:
    """`score` times the measure; `format_score` for an answer of which nothing is right; 0 without an answer.

    Args:
        ground_truth: an answer, a list of answers, or {"target": one of both}. ValueError if there is none.
    """
    if measure not in ("em", "sub_em", "f1"):
        raise ValueError(f'measure={measure!r} must be "em", "sub_em" or "f1"')
    known = _known_answers(ground_truth)
    found = _ANSWER.findall(solution_str)
    if not found:
        return {"score": 0.0, "acc": 0.0, "sub_em": 0.0, "f1": 0.0, "answered": 0.0}
    answer = normalise(found[-1])
    values = {
        "em": max(float(answer == truth) for truth in known),
        "sub_em": max(float(f" {truth} " in f" {answer} ") for truth in known),
        "f1": max(f1(answer, truth) for truth in known),
    }
    value = values[measure]
    return {
        "score": score * value if value else format_score,
        "acc": values["em"],
        "sub_em": values["sub_em"],
        "f1": values["f1"],
        "answered": 1.0,
    }


def normalise(text: str) -> str:
    """SQuAD's normalisation: lower case, then punctuation, articles and extra spaces removed."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over the words of two normalised texts, each word as often as it occurs."""
    answered, true = answer.split(), truth.split()
    common = sum((Counter(answered) & Counter(true)).values())
    return 2 * common / (len(answered) + len(true)) if common else 0.0


def _known_answers(ground_truth: Any) -> list[str]:
    """The known answers, normalised; those of which nothing is left would be in every answer."""
    truths = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if isinstance(truths, str | int | float):
        truths = [truths]
    if isinstance(truths, Iterable):
        known = [normalise(str(truth)) for truth in truths if truth is not None]
        if known := [truth for truth in known if truth]:
            return known
    raise ValueError(
        f"the ground truth {ground_truth!r:.200} holds no answer; expected a text, a list of texts, or"
        ' {"target": a list of texts}'
    )
