"""A game: the policy guesses a whole number, and is told whether the secret one is higher or lower.

An example of a tool with state: each trajectory has a secret of its own and a number of guesses, and what is allowed
depends on what was done before. A task gives tools_kwargs.guess.create_kwargs: {"secret": 42, "max_guesses": 5}. A
guess beyond the last, or after the right one, is a failed call that costs nothing and tells nothing. The tool gives no
reward: who has found the number can say so, and the answer is scored.
"""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from rollout_sidecar.tools.base import BaseTool, ToolFailure, ToolResponse

MAX_GUESSES = 5

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says whether the secret number is higher or lower than this one, or correct.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "The number guessed."}},
            "required": ["number"],
        },
    },
}


@dataclass
class _Game:
    secret: int
    guesses_left: int
    found: bool = False


def hint(secret: int, number: int) -> str:
    """What is said of a guess: "correct", or where the secret is from there."""
    if number == secret:
        return "correct"
    return "higher" if secret > number else "lower"


class GuessNumberTool(BaseTool):
    """Keeps one game for each instance."""

    config_keys = ()

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """No games yet."""
        self._games: dict[str, _Game] = {}
        super().__init__(config, tool_schema)

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema of the file's entry, else the built-in one."""
        return getattr(self, "tool_schema", None) or SCHEMA

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Starts a game; `secret` and `max_guesses` come by themselves, or inside create_kwargs. ValueError if there is
        no secret."""
        instance_id = instance_id or str(uuid4())
        given = {**(kwargs.get("create_kwargs") or {}), **kwargs}
        if given.get("secret") is None:
            raise ValueError(
                "the task has no secret to guess; give tools_kwargs.guess.create_kwargs.secret"
            )
        left = given.get("max_guesses")
        self._games[instance_id] = _Game(given["secret"], MAX_GUESSES if left is None else left)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answers parameters["number"]. ToolFailure when the game is over."""
        game = self._games[instance_id]
        if game.found:
            raise ToolFailure("the number is found already: answer it")
        if game.guesses_left < 1:
            raise ToolFailure("no guesses are left: answer")
        number = int(parameters["number"])
        game.guesses_left -= 1
        game.found = number == game.secret
        return ToolResponse(text=hint(game.secret, number)), 0.0, {"found": float(game.found)}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forgets the game."""
        self._games.pop(instance_id, None)
