"""The local Python sandbox as a tool.

    config:
      type: native
      wall_s: 10            # and the other fields of SandboxOptions; absent ones have its defaults
      stateful: false       # true: variables stay from call to call of a trajectory, until release
      max_concurrency: 64   # and the other keys of the tool's gate

The policy gives `code` and, if the schema names it, `stdin`. It is answered with stdout, stderr and, in brackets, the
limit that was reached. A program that fails is an answer, not a failed call; only a broken sandbox is one.
"""

from dataclasses import fields
from typing import Any

from rollout_sidecar.tools.base import BaseTool, ToolResponse
from rollout_sidecar.tools.config_keys import COMMON
from rollout_sidecar.tools.python_sandbox.errors import WorkerLostError
from rollout_sidecar.tools.python_sandbox.options import SandboxOptions
from rollout_sidecar.tools.python_sandbox.sandbox import PythonSandbox, shared_sandbox

CALL_MARGIN_S = 30.0
"""What a call may take beyond its time limit, for the wait for a worker: the gate must not cut off the answer that says
that the program ran too long."""


def schema(*, stateful: bool, last_value: bool) -> dict[str, Any]:
    """The tool as the policy sees it."""
    seen = "Print what you want to see" + (", or end with an expression." if last_value else ".")
    memory = " Variables and files stay for the next call." if stateful else ""
    return {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": f"Runs Python code and returns what it prints.{memory}",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": f"The code. {seen}"}},
                "required": ["code"],
            },
        },
    }


class PythonSandboxTool(BaseTool):
    """Runs the policy's Python; see the package for what is walled off."""

    config_keys = ("stateful", *(field.name for field in fields(SandboxOptions)))

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """ValueError names a key that is unknown, or a value that is none."""
        own = {key: value for key, value in config.items() if key not in COMMON}
        stateful = own.pop("stateful", None)
        if stateful not in (None, True, False):
            raise ValueError(f"stateful must be true or false, got {stateful!r}")
        self._stateful = bool(stateful)
        self._options = SandboxOptions.from_config(own)
        super().__init__({"timeout_s": self._options.wall_s + CALL_MARGIN_S, **config}, tool_schema)

    @property
    def _sandbox(self) -> PythonSandbox:
        return shared_sandbox(self._options)

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema of the file's entry, else one that fits the config."""
        given = getattr(self, "tool_schema", None)
        return given or schema(stateful=self._stateful, last_value=self._options.last_value)

    async def startup(self) -> None:
        """Warms the pool. SandboxUnavailableError says what this machine lacks."""
        await self._sandbox.start()

    async def shutdown(self) -> None:
        """Ends the pool, if no other tool uses it."""
        await self._sandbox.close()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Runs parameters["code"]. WorkerLostError if the sandbox broke.

        A task's execute_kwargs may give `stdin` and `timeout_s`.
        """
        result = await self._sandbox.run(
            str(parameters.get("code") or ""),
            stdin=str(kwargs.get("stdin") or parameters.get("stdin") or ""),
            session=instance_id if self._stateful else "",
            timeout_s=kwargs.get("timeout_s"),
        )
        if result.status == "lost":
            raise WorkerLostError(result.reason)
        metrics = {
            "execution_s": result.run_s,
            "sandbox_queue_s": result.queue_s,
            "failed": float(result.status != "ok"),
            "timed_out": float(result.status == "timeout"),
            "outcome": result.status,
        }
        return ToolResponse(text=result.text()), 0.0, metrics

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends the trajectory's session."""
        await self._sandbox.end_session(instance_id)
