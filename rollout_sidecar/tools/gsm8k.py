"""verl's demonstration tool: the policy submits an answer to a GSM8K problem and is told its score.

Each submission that does not raise the score costs 0.05, the first included; the tool's reward for the trajectory is
the score of the last submission. A task gives the truth in tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth.

The score is rewards/gsm8k.py's, flexible: the last number in the answer, compared by value. `verl_identical: true` in
the config compares as verl does, as text. Differs from verl: without a ground truth a submission is a failed call,
rather than a wrong answer.
"""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from rollout_sidecar.rewards import gsm8k
from rollout_sidecar.tools.base import BaseTool, ToolFailure, ToolResponse

NOT_IMPROVED = -0.05
_MARK = "#### "

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Scores an answer to the problem: 1.0 if it is right, 0.0 if not.",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "description": "The answer to the problem, a number"}
            },
            "required": ["answer"],
        },
    },
}


@dataclass
class _Submissions:
    truth: Any
    answer: str = ""
    score: float = 0.0


class Gsm8kTool(BaseTool):
    """Keeps the last answer and its score for each instance."""

    config_keys = ("verl_identical",)

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """No instances yet."""
        self._verl_identical = bool(config.get("verl_identical", False))
        self._instances: dict[str, _Submissions] = {}
        super().__init__(config, tool_schema)

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema of the file's entry, else the built-in one."""
        return getattr(self, "tool_schema", None) or SCHEMA

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """`ground_truth` comes by itself, or inside create_kwargs."""
        instance_id = instance_id or str(uuid4())
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._instances[instance_id] = _Submissions(ground_truth)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Scores parameters["answer"]. ToolFailure if the task has no ground truth."""
        state = self._instances[instance_id]
        if state.truth is None:
            raise ToolFailure(
                "this problem has no ground_truth in its create_kwargs, so answers to it cannot be scored"
            )
        answer = str(parameters.get("answer", ""))
        state.answer = answer if answer.startswith(_MARK) else _MARK + answer
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state.score else NOT_IMPROVED
        state.score = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last answer; 0 before the first."""
        state = self._instances[instance_id]
        if not state.answer:
            return 0.0
        scored = gsm8k.compute_score(
            "", state.answer, state.truth, method="flexible", verl_identical=self._verl_identical
        )
        return scored["score"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forgets the instance."""
        self._instances.pop(instance_id, None)
