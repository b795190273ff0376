"""Client of a Sandbox Fusion server (github.com/bytedance/SandboxFusion), which runs programs in many languages.

    POST {url}/run_code
    {"code", "language", "stdin": text or null, "compile_timeout": s, "run_timeout": s, "memory_limit_MB": -1 is none,
     "files": {path: base64}, "fetch_files": [path]}
    -> {"status": "Success" | "Failed" | "SandboxError", "message",
        "compile_result" and "run_result": null or {"status": "Finished" | "Error" | "TimeLimitExceeded",
                                                    "execution_time", "return_code", "stdout", "stderr"},
        "files": {path: base64}}

A program that does not compile, raises or runs too long is a result, whose `reason` says so. Only what the program
cannot help is an exception: the server is away, overloaded, or answers SandboxError.

Differs from verl's client: a request is sent again only while the server has certainly not run it (connection refused,
429, 503), within the same deadline. verl repeats on 504, where a gateway gave up on a program that may still be
running; the tool's `idempotent: true` lets its gate repeat those as well.

`/run_jupyter` is not used: the server starts a new kernel for every request, so cells keep no state between calls.
"""

import asyncio
import base64
import binascii
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.http import HttpClient, HttpFailure, with_default_path

HTTP_MARGIN_S = 10.0
"""The server may take this much longer than the two limits together: start-up, and queueing in it."""

ATTEMPTS = 3
_FIRST_DELAY_S = 0.5
_MAX_MESSAGE = 1000
# The server reads a program's pipes when it has ended, so one that fills them waits until its time is up. Seen with
# commit 469de08: 100,000 characters pass, of 1,000,000 came 219,264 and the time limit.
_MUCH_OUTPUT = 200_000

FileContent = str | bytes | Mapping[str, str]
"""Text, bytes, or {"base64": ...}."""

Outcome = Literal[
    "ok", "error", "killed", "timeout", "compile_error", "compile_timeout", "output_limit"
]


@dataclass(frozen=True)
class RunResult:
    """What became of a program."""

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    return_code: int | None = None
    run_s: float = 0.0
    compile_s: float = 0.0
    reason: str = ""
    """A sentence for the policy, "" if ok."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Those asked for that exist."""
    attempts: int = 1


async def run_code(
    url: str,
    code: str,
    *,
    language: str = "python",
    stdin: str | None = None,
    compile_timeout_s: float = 30.0,
    run_timeout_s: float = 30.0,
    memory_limit_mb: int = 1024,
    files: Mapping[str, FileContent] | None = None,
    fetch_files: Iterable[str] = (),
    attempts: int = ATTEMPTS,
    http: HttpClient | None = None,
) -> RunResult:
    """Runs a program and says what became of it.

    Args:
        url: of the server; "/run_code" is added if it has no path of its own.
        memory_limit_mb: -1 sets none.
        files: put into the work folder first, by path.
        fetch_files: paths to bring back.
        attempts: how often a request is sent while the server turns it away.
        http: a client to share between calls; None makes one for this call.

    HttpFailure if the server did not run it. Answers within the two limits and HTTP_MARGIN_S, retries included.
    """
    request = {
        "compile_timeout": compile_timeout_s,
        "run_timeout": run_timeout_s,
        "code": code,
        "stdin": stdin,
        "memory_limit_MB": memory_limit_mb,
        "language": language,
        "files": {path: _encoded(path, content) for path, content in (files or {}).items()},
        "fetch_files": list(fetch_files),
    }
    client = http or HttpClient()
    try:
        answer, made = await _post(client, with_default_path(url, "/run_code"), request, attempts)
    except HttpFailure as error:
        if error.fault != "too_large":
            raise
        return RunResult(
            "output_limit", reason="The program wrote more output than the sandbox can return."
        )
    finally:
        if http is None:
            await client.close()
    return _result(answer, request, made)


async def _post(
    client: HttpClient, url: str, request: dict[str, Any], attempts: int
) -> tuple[Any, int]:
    deadline = time.monotonic() + (
        request["compile_timeout"] + request["run_timeout"] + HTTP_MARGIN_S
    )
    attempt = 1
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            return await client.request_json("POST", url, body=request, timeout_s=left_s), attempt
        except HttpFailure as error:
            delay_s = max(error.retry_after_s, _FIRST_DELAY_S * attempt)
            in_time = time.monotonic() + delay_s < deadline
            if not error.not_processed or attempt >= attempts or not in_time:
                raise
        await asyncio.sleep(delay_s)
        attempt += 1


def _encoded(path: str, content: FileContent) -> str:
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")
    if isinstance(content, bytes):
        return base64.b64encode(content).decode("ascii")
    encoded = content.get("base64") if isinstance(content, Mapping) else None
    if not isinstance(encoded, str):
        raise ToolFailure(f'the content of file {path!r} must be text or {{"base64": ...}}')
    return encoded


def _result(answer: Any, request: Mapping[str, Any], attempts: int) -> RunResult:
    status = answer.get("status") if isinstance(answer, dict) else None
    if status not in ("Success", "Failed", "SandboxError"):
        raise HttpFailure(
            f"the sandbox's answer is not Sandbox Fusion's: it has status {status!r:.80}", "broken"
        )
    if status == "SandboxError":
        message = str(answer.get("message") or "no message").strip()
        raise HttpFailure(
            f"the sandbox could not run the program: {message[:_MAX_MESSAGE]}", "broken"
        )
    compiled, ran = answer.get("compile_result"), answer.get("run_result")
    compiled = compiled if isinstance(compiled, dict) else None
    ran = ran if isinstance(ran, dict) else None
    shown = ran or compiled or {}
    outcome, reason = _outcome(compiled, ran, request)
    code = shown.get("return_code")
    return RunResult(
        outcome=outcome,
        stdout=str(shown.get("stdout") or ""),
        stderr=str(shown.get("stderr") or ""),
        return_code=code if isinstance(code, int) else None,
        run_s=_seconds(ran),
        compile_s=_seconds(compiled),
        reason=reason,
        files=_decoded(answer.get("files")),
        attempts=attempts,
    )


def _outcome(
    compiled: dict[str, Any] | None, ran: dict[str, Any] | None, request: Mapping[str, Any]
) -> tuple[Outcome, str]:
    if ran is None and compiled is not None:
        if compiled.get("status") == "TimeLimitExceeded":
            limit = request["compile_timeout"]
            return (
                "compile_timeout",
                f"The compiler was stopped: it ran longer than the time limit of {limit:g} s.",
            )
        return (
            "compile_error",
            f"The program did not compile (return code {compiled.get('return_code')}).",
        )
    ran = ran or {}
    if ran.get("status") == "TimeLimitExceeded":
        limit = request["run_timeout"]
        reason = f"The program was stopped: it ran longer than the time limit of {limit:g} s."
        if len(str(ran.get("stdout"))) + len(str(ran.get("stderr"))) > _MUCH_OUTPUT:
            reason += " It wrote more than the sandbox reads while a program runs: print less."
        return "timeout", reason
    code = ran.get("return_code")
    if not isinstance(code, int) or code == 0:
        return "ok", ""
    return _bad_end(code, str(ran.get("stderr") or ""), request["memory_limit_MB"])


def _bad_end(code: int, stderr: str, memory_limit_mb: int) -> tuple[Outcome, str]:
    # Python reports a signal as -9, a shell as 128 + 9.
    number = -code if code < 0 else code - 128
    names = {int(each): each.name for each in signal.Signals}
    memory = f"the memory limit of {memory_limit_mb} MB" if memory_limit_mb > 0 else ""
    if number in names:
        reason = f"The program was killed by {names[number]}"
        if memory and names[number] in ("SIGKILL", "SIGSEGV", "SIGABRT"):
            reason += f"; it may have exceeded {memory}"
        return "killed", reason + "."
    reason = f"The program ended with return code {code}."
    if memory and ("MemoryError" in stderr or "Cannot allocate memory" in stderr):
        reason += f" It exceeded {memory}."
    return "error", reason


def _decoded(files: Any) -> dict[str, bytes]:
    found = {}
    for path, content in files.items() if isinstance(files, dict) else ():
        try:
            found[str(path)] = base64.b64decode(str(content), validate=True)
        except (binascii.Error, ValueError):
            continue
    return found


def _seconds(command: dict[str, Any] | None) -> float:
    value = (command or {}).get("execution_time")
    return float(value) if isinstance(value, int | float) else 0.0
