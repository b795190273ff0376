"""A sidecar with SGLang as users start it: a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from sglang_cases import dtype, engine_extra, only_llama

ROOT = Path(__file__).parents[2]
START_S = 300.0


class ServedProcess:
    """`python -m rollout_sidecar --engine sglang` with the calculator."""

    def __init__(self, model: Path, folder: Path, *, dp: int = 1, **sglang_args: Any):
        folder.mkdir(parents=True, exist_ok=True)
        self._port_file, self._log_file = folder / "port", folder / "log"
        arguments = ["--engine", "sglang", "--model", str(model), "--dtype", dtype()]
        arguments += ["--tool_config", str(ROOT / "configs/tools/calculator.yaml")]
        arguments += ["--port", "0", "--port_file", str(self._port_file)]
        arguments += ["--slots", "16", "--max_model_tokens", "1024", "--memory_fraction", "0.2"]
        arguments += ["--dp", str(dp)]
        arguments += ["--sglang_args", json.dumps(engine_extra() | sglang_args)]
        with self._log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollout_sidecar", *arguments],
                cwd=ROOT,
                env=os.environ | only_llama() | {"PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port_file.read_text()}"

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def wait_until_ready(self) -> "ServedProcess":
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the sidecar ended with {self.process.returncode}:\n{self.log}")
            if self._port_file.is_file():
                try:
                    self.get("/readyz")
                    return self
                except OSError:  # not ready, or just ended
                    pass
            time.sleep(0.1)
        pytest.fail(f"the sidecar was not ready within {START_S:g} s:\n{self.log}")

    def wait_for_log(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log:
            assert time.monotonic() < deadline, f"{text!r} is not in the log:\n{self.log}"
            time.sleep(0.05)

    def family(self) -> dict[int, str]:
        """Every process that descends from the sidecar, with its command line; the sidecar itself left out."""
        found: dict[int, str] = {}
        parents = {self.process.pid}
        everyone = list(_processes())
        while parents:
            children = {pid: command for pid, parent, command in everyone if parent in parents}
            parents = set(children) - set(found)
            found |= children
        return found

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 15.0) -> int:
        """Sends a signal; gives the exit code. Fails if the sidecar, or what it started, is still there then."""
        family = self.family()
        self.process.send_signal(number)
        return self.wait_until_gone(family, timeout_s)

    def wait_until_gone(self, family: dict[int, str], timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the sidecar was still there after {timeout_s:g} s:\n{self.log}")
        while True:
            left = {pid: name for pid, _, name in _processes() if family.get(pid) == name}
            if not left:
                return code
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)

    def kill(self) -> None:
        """For fixtures that are torn down: nothing may outlive the tests."""
        for pid in self.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.kill()
        self.process.wait()


def _processes():
    """Process id, parent and command line of every process; none of those that are dead and not waited for."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            yield int(entry.name), int(parent), command
