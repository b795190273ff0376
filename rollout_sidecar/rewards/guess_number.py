"""The reward of the guessing game: the answer is the secret number, and the policy guessed it with the tool.

An answer that was never guessed is one guess more than the game allows, right or not.
"""

import re
from typing import Any

from rollout_sidecar.rewards import gsm8k

_GUESS = re.compile(r'"number"\s*:\s*"?([-+]?\d+)')


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 for a number found and answered, else 0. `solution_str` is what the policy wrote, its calls as JSON."""
    given = gsm8k.compute_score(data_source, solution_str, ground_truth, extra_info)
    guesses = _GUESS.findall(solution_str)
    found = float(int(ground_truth) in map(int, guesses))
    score = found * given["acc"]
    return {**given, "score": score, "acc": score, "found": found, "guesses": float(len(guesses))}
