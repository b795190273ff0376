"""A small server with Sandbox Fusion's documented contract, for tests. It runs python, bash and cpp for real, in a
folder of its own for each request, without any isolation: give it nothing but test programs.

POST /run_code as in rollout_sidecar/tools/sandbox_fusion_client.py; a missing code or an unknown language is 422 with
FastAPI's body; GET /v1/ping answers "pong". Special to it: `faults` makes it answer HTTP errors, or SandboxError.
"""

import asyncio
import base64
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

LANGUAGES = ("python", "bash", "cpp")
HAS_CPP = shutil.which("g++") is not None


class SandboxFusionServer:
    """`async with SandboxFusionServer() as server:`; server.url, server.requests."""

    def __init__(self):
        self.requests: list[dict[str, Any]] = []
        self.faults: list[Any] = []
        """Answers to give first, in order: an HTTP status, (status, headers, body), or "SandboxError"."""
        self.running = 0
        self.peak = 0
        """The most programs that ran at once."""
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_post("/run_code", self._run_code)
        app.router.add_get("/v1/ping", self._ping)
        self._server = TestServer(app, host="127.0.0.1")

    async def __aenter__(self) -> "SandboxFusionServer":
        await self._server.start_server()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("/")).rstrip("/")

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _run_code(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.faults:
            fault = self.faults.pop(0)
            if fault == "SandboxError":
                return web.json_response(_response("SandboxError", message="no free worker"))
            status, headers, text = fault if isinstance(fault, tuple) else (fault, {}, "busy")
            return web.Response(status=status, headers=headers, text=text)
        problem = _invalid(body)
        if problem is not None:
            return web.json_response({"detail": [problem]}, status=422)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return web.json_response(await _run(body, Path(folder)))
        finally:
            self.running -= 1


def _invalid(body: dict[str, Any]) -> dict[str, Any] | None:
    if "code" not in body:
        return {"type": "missing", "loc": ["body", "code"], "msg": "Field required"}
    if body.get("language") not in LANGUAGES:
        expected = " or ".join(map(repr, LANGUAGES))
        return {
            "type": "literal_error",
            "loc": ["body", "language"],
            "msg": f"Input should be {expected}",
        }
    return None


def _response(status: str, message: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
        **fields,
    }


async def _run(body: dict[str, Any], folder: Path) -> dict[str, Any]:
    for path, content in (body.get("files") or {}).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(content))
    source = folder / f"source.{'cpp' if body['language'] == 'cpp' else 'txt'}"
    source.write_text(body["code"])
    memory_mb = body.get("memory_limit_MB", -1)
    compiled, ran = None, None
    command = [{"python": sys.executable, "bash": "bash"}.get(body["language"], ""), str(source)]
    if body["language"] == "cpp":
        command = ["./program"]
        compiled = await _command(
            ["g++", str(source), "-o", "program"], folder, None, body.get("compile_timeout", 10), -1
        )
    if compiled is None or compiled["return_code"] == 0:
        ran = await _command(
            command, folder, body.get("stdin"), body.get("run_timeout", 10), memory_mb
        )
    good = all(each is None or each["return_code"] == 0 for each in (compiled, ran))
    files = {
        path: base64.b64encode((folder / path).read_bytes()).decode()
        for path in body.get("fetch_files") or ()
        if (folder / path).is_file()
    }
    status = "Success" if good else "Failed"
    return _response(status, compile_result=compiled, run_result=ran, files=files)


async def _command(
    command: list[str], folder: Path, stdin: str | None, timeout_s: float, memory_mb: int
) -> dict[str, Any]:
    if memory_mb > 0:
        # By the shell, not by preexec_fn: that forks this process, which JAX warns of where it was imported.
        limited = f'ulimit -v {memory_mb * 1024}; exec "$0" "$@"'
        command = ["sh", "-c", limited, *command]
    # Output goes to files, so that what a program wrote before it was stopped is not lost.
    out, err = folder / ".stdout", folder / ".stderr"
    started = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(process.communicate((stdin or "").encode()), timeout_s)
            status = "Finished"
        except TimeoutError:
            status = "TimeLimitExceeded"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    return {
        "status": status,
        "execution_time": time.monotonic() - started,
        "return_code": None if status == "TimeLimitExceeded" else process.returncode,
        "stdout": out.read_text(errors="replace"),
        "stderr": err.read_text(errors="replace"),
    }
