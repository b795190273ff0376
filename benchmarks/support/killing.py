"""Sidecars in processes of their own that are killed at random moments, and a model for them to serve."""

import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.interactions import gsm8k
from tooljax.launch import is_ready
from tooljax.model import tiny
from tooljax.rollouts import Sidecars

ROOT = Path(__file__).parents[2]
ALL = 0.15
"""Share of the steps that kill every sidecar."""
START_S = 120.0

INTERACTION = """
interaction:
  - name: gsm8k
    class_name: rollout_sidecar.interactions.gsm8k.Gsm8kInteraction
    config: {stateless: true}  # its replies and scores follow from the messages: trajectories can go on elsewhere
"""


def write_model(folder: Path) -> None:
    """A tiny random model and an interaction beside its folder. Its turns end after some twenty tokens: fifteen
    more of its tokens end turns."""
    tiny.build(folder, [gsm8k.INCORRECT, "Problem 12?"], vocab=300, embed=64, layers=2, seed=0)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ends = [ids[letter] for letter in "abcdefghijklmno"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder.parent / "interaction.yaml").write_text(INTERACTION)


class Victim:
    """A sidecar in a process of its own, on a port that it keeps."""

    def __init__(self, folder: Path, number: int, dtype: str, *, slots: int):
        self._folder = folder
        self._dtype = dtype
        self._slots = slots
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = folder / f"log{number}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns before it can be used."""
        options = ["--engine", "jax", "--model", self._folder / "model", "--dtype", self._dtype]
        options += ["--slots", self._slots, "--max_model_tokens", 512, "--reward", "gsm8k"]
        options += ["--interaction_config", self._folder / "interaction.yaml"]
        options += ["--port", self._port, "--exit_with_parent"]
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled")}
        compiled["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout_sidecar", *map(str, options)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **compiled},
            )

    def wait(self) -> None:
        """Until rollouts can start there. SystemExit, with its log, if it ends instead."""
        until = time.monotonic() + START_S
        while not is_ready(self._port):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.url} did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


class Watched(SidecarClient):
    """A client that remembers what it last asked of its sidecar, health aside."""

    doing = ""

    def _open(self, method: str, path: str, deadline: float, **kwargs: Any) -> Any:
        if method == "POST" and path.endswith("/commit"):
            self.doing = "push: commit"
        elif method == "POST" and path.startswith("/v1/weights"):
            self.doing = "push: begin"
        elif method == "PUT":
            self.doing = "push: parts"
        elif method == "POST" and path == "/v1/rollouts":
            self.doing = "rollout"
        return super()._open(method, path, deadline, **kwargs)


@contextlib.contextmanager
def watched_sidecars(urls: Sequence[str]) -> Iterator[Sidecars]:
    """The trainer's side, with clients that remember what they asked for."""
    sidecars = Sidecars(urls, token=None, timeout_s=120.0)
    for client in sidecars._clients:
        client.__class__ = Watched
    sidecars.fleet.period_s = 0.5
    with sidecars:
        yield sidecars


class Killer:
    """Kills at a moment of the phase that was drawn, uniform over the time that the phase took before."""

    def __init__(
        self,
        victims: Sequence[Victim],
        sidecars: Sidecars,
        draw: random.Random,
        moments: collections.Counter[str],
    ):
        self._victims, self._sidecars, self._draw = victims, sidecars, draw
        self._moments = moments
        self._usual_s = {"push": 0.3, "rollout": 1.0}
        self._timer: threading.Timer | None = None
        self._phase, self._share, self._within = "", 0.0, ""

    def arm(self) -> None:
        """Draws phase and victims of the next step."""
        self._phase = self._draw.choice(["push", "rollout"])
        self._at = self._draw.random()
        together = self._draw.random() < ALL
        count = len(self._victims) if together else 1
        self._chosen = self._draw.sample(range(len(self._victims)), count)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within it, if it is the one that was drawn, somebody is killed."""
        self._share, self._within = 0.0, name
        for client in self._sidecars._clients:
            client.doing = ""  # type: ignore[attr-defined]
        if name == self._phase:
            self._timer = threading.Timer(self._at * self._usual_s[name], self._kill)
            self._timer.start()
        started = time.monotonic()
        yield
        if name != self._phase:  # undisturbed
            self._usual_s[name] = 0.5 * (self._usual_s[name] + time.monotonic() - started)

    def arrived(self, share: float) -> None:
        """So much of the rollout is there."""
        self._share = share

    def done(self) -> None:
        """The step is over."""
        assert self._timer is not None
        self._timer.join()

    def _kill(self) -> None:
        for i in self._chosen:
            doing = getattr(self._sidecars._clients[i], "doing", "")
            if self._within == "rollout":
                doing = f"rollout: {self._share // 0.25 * 25:.0f} % were there" if doing else "idle"
            self._victims[i].kill()
            self._moments[doing or "push: before it began"] += 1
        for i in self._chosen:
            self._victims[i].start()
