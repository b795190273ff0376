"""Runs code that the policy writes on a Sandbox Fusion server. Reads verl's stock config unchanged:

    config:
      type: native
      sandbox_fusion_url: http://127.0.0.1:8080   # "/run_code" is added if there is no path
      num_workers: 10                  # calls at once, read by the tool's gate
      enable_global_rate_limit: true
      rate_limit: 10
      default_timeout: 30              # seconds that a program may run; the policy may ask for less, not for more
      default_language: python
      memory_limit_mb: 1024

Further keys: compile_timeout (default_timeout), headers (values may hold ${VARIABLE}), timeout_s (of a call as a whole:
both limits and 10 s), idempotent (false: a program is sent again only if it certainly did not run).

The policy may give what the schema names: code, language, stdin, timeout, files ({path: text}), fetch_files ([path]).
A task's execute_kwargs may give the same except code, and compile_timeout and memory_limit_mb; contents of files may
then also be bytes or {"base64": ...}.

Differs from verl: a program that fails is answered with all it wrote and with the reason (verl: "no stdout here"), one
that writes nothing with a sentence saying so. `enable_global_rate_limit: false` works.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from rollout_sidecar.tools.base import BaseTool, ToolFailure, ToolResponse
from rollout_sidecar.tools.http import (
    HttpClient,
    checked_url,
    expand_environment,
    positive_seconds,
)
from rollout_sidecar.tools.sandbox_fusion_client import (
    ATTEMPTS,
    HTTP_MARGIN_S,
    RunResult,
    run_code,
)

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs a program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {
                    "type": "string",
                    "description": "The program. Print what you want to see.",
                }
            },
            "required": ["code"],
        },
    },
}


class SandboxFusionTool(BaseTool):
    """Each call runs in a folder of its own on the server."""

    stateless = True
    config_keys = (
        "sandbox_fusion_url",
        "compile_timeout",
        "default_language",
        "memory_limit_mb",
        "headers",
    )

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """ValueError for an address or a limit that is none."""
        self._url = checked_url(config.get("sandbox_fusion_url"), "sandbox_fusion_url")
        self._run_timeout_s = positive_seconds(config, "default_timeout", default=30.0)
        self._compile_timeout_s = positive_seconds(
            config, "compile_timeout", default=self._run_timeout_s
        )
        self._language = str(config.get("default_language") or "python")
        self._memory_limit_mb = _memory(config.get("memory_limit_mb"), 1024)
        # A tool declared idempotent is tried again by its gate.
        self._attempts = 1 if config.get("idempotent") else ATTEMPTS
        headers, secrets = expand_environment(config.get("headers") or {}, "headers")
        self._http = HttpClient(headers=headers, secrets=secrets)
        # default_timeout is the program's: without this the gate would take it for the call's, and cut off the answer
        # that says that the program ran too long.
        call_s = self._compile_timeout_s + self._run_timeout_s + HTTP_MARGIN_S
        super().__init__({"timeout_s": call_s, **config}, tool_schema)

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema of the file's entry, else the built-in one."""
        return getattr(self, "tool_schema", None) or SCHEMA

    async def startup(self) -> None:
        """Opens the connection pool. The server may start later."""
        await self._http.open()

    async def shutdown(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Runs parameters["code"]. HttpFailure if the server did not run it."""
        given = {**kwargs, **{k: v for k, v in parameters.items() if v is not None}}
        limit_s = positive_seconds(kwargs, "timeout", default=self._run_timeout_s)
        fetch = [
            *map(str, _list(kwargs.get("fetch_files"), "fetch_files")),
            *map(_inside, _list(parameters.get("fetch_files"), "fetch_files")),
        ]
        result = await run_code(
            self._url,
            str(parameters.get("code") or ""),
            language=str(given.get("language") or self._language),
            stdin=None if given.get("stdin") is None else str(given["stdin"]),
            compile_timeout_s=positive_seconds(
                kwargs, "compile_timeout", default=self._compile_timeout_s
            ),
            run_timeout_s=min(limit_s, positive_seconds(parameters, "timeout", default=limit_s)),
            memory_limit_mb=_memory(kwargs.get("memory_limit_mb"), self._memory_limit_mb),
            files=_files(kwargs.get("files"), parameters.get("files")),
            fetch_files=fetch,
            attempts=self._attempts,
            http=self._http,
        )
        metrics = {
            "execution_s": result.run_s,
            "compile_s": result.compile_s,
            "failed": float(result.outcome != "ok"),
            "timed_out": float(result.outcome in ("timeout", "compile_timeout")),
            "outcome": result.outcome,
        }
        return ToolResponse(text=describe_result(result, fetch)), 0.0, metrics


def describe_result(result: RunResult, wanted_files: list[str] | None = None) -> str:
    """What the policy is told: what the program wrote, then why it failed, then the files that were asked for."""
    # A program that works is answered with its output as it was written, and nothing else.
    output = result.stdout + result.stderr
    parts = [output.rstrip("\n"), result.reason] if result.reason else [output]
    for path in wanted_files or ():
        parts.append(f"--- {path} ---\n{_shown(result.files.get(path))}")
    text = "\n".join(part for part in parts if part)
    return text or "The program finished without output."


def _shown(content: bytes | None) -> str:
    if content is None:
        return "(there is no such file)"
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return f"({len(content)} bytes that are not text)"


def _files(of_task: Any, of_policy: Any) -> dict[str, Any]:
    for files in (of_task, of_policy):
        if files is not None and not isinstance(files, Mapping):
            raise ToolFailure("files must be an object of path and content")
    # Absent fields of a table of records are None, at every level.
    task_files = {path: content for path, content in (of_task or {}).items() if content is not None}
    return {**task_files, **{_inside(path): content for path, content in (of_policy or {}).items()}}


def _inside(path: Any) -> str:
    """A path of the policy's. The server would follow it anywhere."""
    parsed = PurePosixPath(str(path))
    if not str(path).strip() or parsed.is_absolute() or ".." in parsed.parts:
        raise ToolFailure(f"the path {path!r} must be relative, and inside the work folder")
    return str(path)


def _list(value: Any, name: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise ToolFailure(f"{name} must be a list of paths, got {value!r:.80}")
    return list(value)


def _memory(value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < -1 or value == 0:
        raise ValueError(f"memory_limit_mb is {value!r}, expected megabytes, or -1 for no limit")
    return value
