"""A reward function as users of verl write it: the answer's score, and a little more for having called a tool."""
# pyright: reportMissingImports=false

from typing import Any

from verl.utils.reward_score import gsm8k


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    bonus: float = 0.1,
    **kwargs,
) -> float:
    score = gsm8k.compute_score(
        solution_str, ground_truth, method="strict", format_score=0.1, score=1.0
    )
    return score + bonus if "<tool_call>" in solution_str else score
