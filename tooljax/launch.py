"""Starts a rollout sidecar on this machine, for configs that name none, and ends it with the run.

The sidecar is a process of its own, in a session of its own: Ctrl-C reaches the trainer only, which decides when the
sidecar may go. Should the trainer be killed, the sidecar ends by itself (on Linux).
"""

import http.client
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout_sidecar import protocol
from rollout_sidecar.client import SidecarError
from tooljax.config import Config

HOST = "127.0.0.1"
GRACE_S = 15.0
"""How long the sidecar may take to release its tools after SIGTERM, before it is killed."""
POLL_S = 0.05
TAIL_LINES = 15
"""Lines of the sidecar's log that an error shows."""

log = logging.getLogger("tooljax")


@contextmanager
def local_sidecar(
    config: Config, *, log_path: str | Path, engine: Sequence[str] = ("--engine", "jax")
) -> Iterator[tuple[str, str]]:
    """Gives (url, token) of a sidecar that is ready; ends it with the block.

    Args:
        config: its model, sidecar and run sections say what is served.
        log_path: file that the sidecar's output is appended to.
        engine: the arguments that choose the engine.

    Raises SidecarError, with the last lines of the log, when the sidecar ends by itself, or is not ready within
    sidecar.start_timeout_s.
    """
    if not config.model.path:
        raise ValueError("model.path is empty: set it to a Hugging Face folder")
    log_path = Path(log_path)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tooljax_") as private, log_path.open("ab") as output:
        sidecar = _Process(config, engine, Path(private), log_path, output.fileno())
        try:
            yield sidecar.wait_until_ready(config.sidecar.start_timeout_s), sidecar.token
        except SidecarError as error:
            if error.kind != "sidecar_ended" and sidecar.has_ended():
                raise sidecar.error("while it was serving") from error
            raise
        finally:
            sidecar.stop()


def check_files(config: Config, *, training: bool = True) -> None:
    """Raises one ValueError that names every file of the config that is not there. An evaluation reads neither
    data.train nor, if its sidecars run already, the model.

    Of the model only the log says something: it may be on another machine.
    """
    named = [("data.train", file) for file in config.data.train] if training else []
    named += [("data.eval", file) for file in config.data.eval]
    if not config.sidecar.urls:  # else these are the sidecars' own
        named += [("sidecar.tool_config", file) for file in config.sidecar.tool_config]
        named += [("sidecar.interaction_config", config.sidecar.interaction_config)]
        reward = config.reward.function
        path = reward if reward.endswith(".py") else reward.rpartition(":")[0]
        named += [("reward.function", path)]
    named += [("sidecar.token_file", config.sidecar.token_file)]
    named += [("sidecar.ca_file", config.sidecar.ca_file)]
    missing = [f"{field}: {file}: no such file" for field, file in named if _is_missing(file)]
    if missing:
        raise ValueError(f"{'; '.join(missing)} (looked from {Path.cwd()})")
    reads_model = training or not config.sidecar.urls
    if reads_model and not Path(config.model.path or " ").is_dir():
        log.warning(
            "model.path is %r, which is no folder here; a run needs a Hugging Face folder on disk",
            config.model.path,
        )


def _is_missing(file: str) -> bool:
    return bool(file) and not Path(file).is_file()


class _Process:
    """The child process, and the files that it is told of."""

    def __init__(
        self, config: Config, engine: Sequence[str], private: Path, log_path: Path, output: int
    ):
        self.token = secrets.token_urlsafe(32)
        self._log_path = log_path
        self._log_start = log_path.stat().st_size
        self._port_file = private / "port"
        token_file = private / "token"
        # In a file that only this user can read: arguments and environment are visible to more.
        with os.fdopen(os.open(token_file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(self.token)
        command = [sys.executable, "-m", "rollout_sidecar", *engine, *_arguments(config)]
        command += ["--port_file", str(self._port_file), "--token_file", str(token_file)]
        if sys.platform.startswith("linux"):
            command.append("--exit_with_parent")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
            start_new_session=True,
        )

    def wait_until_ready(self, timeout_s: float) -> str:
        """The URL, once rollouts can start."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.has_ended():
                raise self.error("while starting")
            if self._port_file.exists():
                port = int(self._port_file.read_text())
                if is_ready(port):
                    return f"http://{HOST}:{port}"
            time.sleep(POLL_S)
        raise SidecarError(
            f"the local sidecar was not ready within {timeout_s:g} s (raise sidecar.start_timeout_s "
            f"if its model is large). {self._tail()}",
            kind="timeout",
        )

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def error(self, when: str) -> SidecarError:
        """What to raise when it has ended by itself."""
        code = self._process.returncode
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += ", as when memory runs out"
        return SidecarError(
            f"the local sidecar ended {when} ({how}). {self._tail()}", kind="sidecar_ended"
        )

    def stop(self) -> None:
        """Ends the process: politely, so that tools are released, then by force."""
        if self.has_ended():
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("the local sidecar did not end within %g s and was killed", GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its tools' processes too
            self._process.wait()

    def _tail(self) -> str:
        with self._log_path.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").rstrip().splitlines()
        if not lines:
            return f"It wrote nothing to its log, {self._log_path}"
        listed = "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])
        return f"The end of its log, {self._log_path}:\n{listed}"


def _arguments(config: Config) -> list[str]:
    sidecar = config.sidecar
    values = [
        ("model", config.model.path),
        ("dtype", config.model.dtype),
        ("host", HOST),
        ("port", 0),
        *(("tool_config", file) for file in sidecar.tool_config),
        ("interaction_config", sidecar.interaction_config),
        ("tool_format", sidecar.tool_format),
        ("profile", sidecar.profile),
        ("context_policy", sidecar.context_policy),
        ("truncate_side", sidecar.truncate_side),
        ("max_tool_response_length", sidecar.max_tool_response_length),
        ("reward", config.reward.function),
        ("reward_kwargs", config.reward.function_kwargs or "{}"),
        ("reward_text", config.reward.text),
        ("slots", sidecar.slots),
        ("max_model_tokens", sidecar.max_model_tokens),
    ]
    # One word each: a negative number as a word of its own would be taken for an option.
    return [f"--{name}={value}" for name, value in values if value != ""]


def _environment() -> dict[str, str]:
    """This process's, and the folder that the package was imported from: it need not be installed."""
    root = str(Path(protocol.__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def is_ready(port: int) -> bool:
    """Whether rollouts can start at a sidecar of this machine: asks /readyz. Not through urllib, which would ask a
    proxy that the environment names."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
