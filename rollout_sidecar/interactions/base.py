"""The contract of an interaction: verl's BaseInteraction, method for method.

An interaction plays the user: it answers the turns in which the policy calls no tool, until it ends the conversation.
The sidecar calls `start_interaction` once for each trajectory of a task that names it, `generate_response` for each
turn without a call, then `calculate_score` and `finalize_interaction` once, also when the trajectory fails or is
aborted (verl never calls the last two).
"""

from typing import Any
from uuid import uuid4

from rollout_sidecar.protocol import Message


class BaseInteraction:
    """An interaction. Subclasses implement `generate_response`, and the other methods if they keep state.

    Two more methods are called if they are there: `startup()` before the first rollout, `shutdown()` when the sidecar
    stops.
    """

    stateless: bool = False
    """Replies and scores depend on the messages alone: a trajectory with replies can go on in another sidecar. The
    entry's config may say so too (`stateless: true`)."""

    config_keys: tuple[str, ...] | None = None
    """The keys that the entry's config may have beside `stateless`: another one is an error. Holds for this class
    alone, not for subclasses; None: any."""

    def __init__(self, config: dict[str, Any]):
        """Made once, when the sidecar starts.

        Args:
            config: the entry's `config` in the interaction file, and the interaction's name under "name".
        """
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins a conversation; kwargs are the task's interaction_kwargs. Returns its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answers a turn.

        Args:
            messages: the whole conversation, the turn last; a copy.
            kwargs: the task's interaction_kwargs.

        Returns:
            Whether the conversation is over, the user's message, the score of the turn, and more about it (unread).
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement generate_response")

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The score of the conversation as a whole; reported as the metric interaction_score."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Ends the conversation."""
