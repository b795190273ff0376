"""The contract of a tool: verl's BaseTool, method for method.

The sidecar calls `create` once for each trajectory that may use the tool, `execute` for each call, then `calc_reward`
and `release` once, also when the trajectory fails or is aborted. So state kept under the instance id lasts for the
trajectory and is seen by nobody else. In verl's profiles B and C (`rollout_sidecar.profiles`) an instance lasts for one
call only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from rollout_sidecar.errors import ToolError
from rollout_sidecar.tools.schemas import OpenAIFunctionToolSchema, read_schema


class ToolFailure(ToolError):
    """Raise it in `execute` for a call that failed. Its text, line breaks included, is what the policy is told; of any
    other exception it is told one line."""


@dataclass(kw_only=True)
class ToolResponse:
    """What a tool answers. Images and videos come as lists."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self):
        if self.text is not None and not isinstance(self.text, str):
            raise ValueError(f"text must be a string, got a {type(self.text).__name__}")
        for name, value in (("image", self.image), ("video", self.video)):
            if value is not None and not isinstance(value, list):
                raise ValueError(
                    f"{name} must be a list, got a {type(value).__name__} (one {name} is a list of one)"
                )

    def is_empty(self) -> bool:
        """There is nothing to tell the policy."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """There is text, and nothing else."""
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """A tool. Subclasses implement `execute`, and the other methods if they keep state."""

    idempotent: bool = False
    """A call may safely be made again after it failed: only such tools are retried."""

    stateless: bool = False
    """Its answers depend on a call's arguments alone, and calc_reward on nothing: a trajectory that has used it can go
    on in another sidecar. The entry's config may say so too (`stateless: true`)."""

    config_keys: tuple[str, ...] | None = None
    """The keys that the entry's config may have beside those of every tool (`config_keys.COMMON`): another one is an
    error. Holds for this class alone, not for subclasses; None: any."""

    path_keys: tuple[str, ...] = ()
    """Keys of the config that name a file: it is looked for beside the tool_config file, then from the working folder,
    and the tool is given where it is."""

    def __init__(self, config: dict[str, Any], tool_schema: Mapping[str, Any] | None):
        """Made once, when the sidecar starts.

        Args:
            config: the entry's `config` in the tool_config file.
            tool_schema: the entry's OpenAI function schema; None takes the class's own.
        """
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema = read_schema(
            tool_schema or self.get_openai_tool_schema(), type(self).__name__
        )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Mapping[str, Any]:
        """The schema shown to the policy. A class that has its own returns it here."""
        schema: Mapping[str, Any] | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema of its own: give the entry a tool_schema"
            )
        return schema

    async def startup(self) -> None:
        """Runs once in the sidecar's event loop before the first rollout: connect, warm up. Not part of verl's
        contract; a tool without it needs none. What it raises ends the start of the sidecar."""

    async def shutdown(self) -> None:
        """Runs once when the sidecar stops, after every instance was released."""

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Starts the tool for a trajectory; kwargs are the task's create_kwargs. A non-empty response is shown to the
        policy before its first turn."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Runs one call; returns the response, the tool's reward for it, and metrics."""
        raise NotImplementedError(f"{type(self).__name__} does not implement execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The tool's reward for the trajectory as a whole."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends the tool for a trajectory."""
