"""A user who knows the answer: it says whether the last turn has it, and asks to try again.

As documented for verl's Gsm8kInteraction: the kwargs of a task hold `ground_truth`; a turn with the right number after
"####" ends the conversation with the score 1, any other is answered and scores 0. Numbers are compared as the gsm8k
reward does.
"""

from typing import Any

from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.protocol import Message
from rollout_sidecar.rewards.gsm8k import compute_score

CORRECT = "Your response is correct!"
INCORRECT = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Judges answers to GSM8K problems."""

    config_keys = ()

    def __init__(self, config: dict[str, Any]):
        """Has no settings."""
        super().__init__(config)
        self._truths: dict[str, Any] = {}
        self._scores: dict[str, float] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        """Keeps the answer. ValueError if the task has none."""
        if ground_truth is None:
            raise ValueError("interaction_kwargs has no ground_truth")
        started = await super().start_interaction(instance_id)
        self._truths[started], self._scores[started] = ground_truth, 0.0
        return started

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Judges the last assistant message."""
        answers = [str(m.get("content") or "") for m in messages if m.get("role") == "assistant"]
        said = answers[-1] if answers else ""
        judged = compute_score("openai/gsm8k", said, self._truths[instance_id])
        correct = judged["acc"] == 1.0
        self._scores[instance_id] = float(correct)
        return correct, CORRECT if correct else INCORRECT, float(correct), {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """1 if the last answer was right."""
        return self._scores.get(instance_id or "", 0.0)

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Forgets the conversation."""
        self._truths.pop(instance_id or "", None)
        self._scores.pop(instance_id or "", None)
