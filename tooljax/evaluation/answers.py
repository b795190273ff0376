r"""The answer that a trajectory gave, as text that can be counted: what a majority is a majority of.

Read from the policy's last message: the last \boxed{...}, else the last <answer>...</answer>, else what follows the
last "####", else the last number, else the whole message. Numbers of equal value are one answer ("1,234.50" and
"$1234.5"), as are texts that differ only in case and spaces. Whether an answer is right, only the reward function says.
"""

import re
from fractions import Fraction

from rollout_sidecar.protocol import Trajectory

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####\s*([^\n]*)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")


def answer_of(trajectory: Trajectory) -> str | None:
    """The trajectory's answer in its plain form; None if it gave none: it never came to one, or said nothing."""
    if trajectory.status != "completed" or not trajectory.messages:
        return None
    last = trajectory.messages[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        return None
    return plain(extract(last["content"])) or None


def extract(text: str) -> str:
    """The part of a message that is its answer."""
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    for pattern in (_TAGGED, _HASHES, _NUMBER):
        if found := pattern.findall(text):
            return found[-1]
    return text


def plain(answer: str) -> str:
    """Equal for answers that are the same: numbers by value, texts without case, outer punctuation and spaces."""
    text = " ".join(answer.split()).casefold().strip(" .,;:")
    try:
        return str(Fraction(re.sub(r"[\s$,%]", "", text)))
    except (ValueError, ZeroDivisionError):
        return text


def _last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{...}, braces within it balanced; None without one that ends."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None
