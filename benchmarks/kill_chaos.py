"""kill -9 of sidecars at random moments of pushes and rollouts: what reaches the trainer must be as if nobody had died.

    python benchmarks/kill_chaos.py
    python benchmarks/kill_chaos.py --kills 20 --seed 1 --sidecars 3

Sidecars are processes of their own with the embedded engine (random weights of a tiny model), real pushes and
conversations of several turns. Each step pushes new weights and rolls out under them, while one of the sidecars, or now
and then all of them, is killed with SIGKILL and started again on its port. One more sidecar, which nobody kills and
which gets every push whole, says what each trajectory must be: same weights, contexts and seeds give the same tokens,
and the same log-probs but for rounding (one that went on elsewhere had its context read in other pieces). After every
step each sidecar is asked for the hashes of what its engine holds.
Exit code 1 unless all counts of faults are 0. Moments are drawn from the seed; what they hit differs from run to run.
"""

import argparse
import asyncio
import collections
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.interactions import gsm8k
from rollout_sidecar.protocol import (
    Limits,
    SamplingParams,
    ServedWeights,
    Task,
    Trajectory,
)
from tooljax.config.schema import WeightsConfig
from tooljax.model import hf, tiny
from tooljax.rollouts import Groups, Sidecars

ROOT = Path(__file__).parents[1]
TASKS, SAMPLES, TURNS = 6, 4, 6
ALL = 0.15
"""Share of the steps that kill every sidecar."""
PART_BYTES = 4096
ROUNDING = 1e-4
"""Of log-probs in nats, computed in float32."""
START_S = 120.0

INTERACTION = """
interaction:
  - name: gsm8k
    class_name: rollout_sidecar.interactions.gsm8k.Gsm8kInteraction
    config: {stateless: true}  # its replies and scores follow from the messages: trajectories can go on elsewhere
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--sidecars", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        (folder / "interaction.yaml").write_text(INTERACTION)
        with contextlib.ExitStack() as stack:
            made = [Victim(folder, i) for i in range(args.sidecars + 1)]
            for victim in made:
                stack.callback(victim.kill)
                victim.start()
            for victim in made:
                victim.wait()
            report = run(made[:-1], made[-1], args)
    show(report, args)
    return 1 if report.faults() else 0


def write_model(folder: Path) -> None:
    """A tiny random model whose turns end after some twenty tokens: fifteen more of its tokens end turns."""
    tiny.build(folder, [gsm8k.INCORRECT, "Problem 12?"], vocab=300, embed=64, layers=2, seed=0)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ends = [ids[letter] for letter in "abcdefghijklmno"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


class Victim:
    """A sidecar in a process of its own, on a port that it keeps."""

    def __init__(self, folder: Path, number: int):
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = folder / f"log{number}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns before it can be used."""
        options = ["--engine", "jax", "--model", self._folder / "model", "--dtype", "float32"]
        options += ["--slots", TASKS * SAMPLES, "--max_model_tokens", 512, "--reward", "gsm8k"]
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
        while not self._is_ready():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.url} did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

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


@dataclass
class ChaosReport:
    """What was killed when, and what was wrong afterwards."""

    moments: collections.Counter[str] = field(default_factory=collections.Counter)
    steps: int = 0
    trajectories: int = 0
    tokens: int = 0
    lost: int = 0
    """Trajectories that did not come, or came as failed."""
    doubled: int = 0
    unknown_versions: int = 0
    """Sampled tokens without a version, or of another one than was asked for."""
    other_tokens: int = 0
    """Trajectories with other tokens or log-probs than those of an undisturbed sidecar with the same weights."""
    apart: float = 0.0
    """Largest difference of a log-prob from the undisturbed one's."""
    mixed_weights: int = 0
    """Looks at a sidecar whose content hash or tensors are not those of the version that it names."""
    looks: int = 0
    stale: int = 0
    """Looks at one that was started again and had not got the weights yet: it is not used, and is no fault."""
    resumed: int = 0
    restarted: int = 0
    full_resends: int = 0
    seconds: float = 0.0

    def faults(self) -> int:
        """Must be 0."""
        parts = (self.lost, self.doubled, self.unknown_versions, self.other_tokens)
        return sum(parts) + self.mixed_weights


def run(victims: Sequence[Victim], witness: Victim, args: argparse.Namespace) -> ChaosReport:
    """Steps until so many were killed."""
    report, draw = ChaosReport(), random.Random(args.seed)
    started = time.monotonic()
    urls = [victim.url for victim in victims]
    with watched_sidecars(urls) as sidecars, watched_sidecars([witness.url]) as undisturbed:
        killer = Killer(victims, sidecars, draw, report.moments)
        while report.moments.total() < args.kills:
            step = report.steps
            expected = undisturbed.push(weights(step), step=step, weights=pushes("full"))
            for victim in victims:
                victim.wait()
            killer.arm()
            with killer.phase("push"):
                pushed = sidecars.push(weights(step), step=step, weights=pushes("delta"))
            assert pushed.content_hash == expected.content_hash
            report.full_resends += pushed.full_resends
            seen: list[int] = []
            with killer.phase("rollout"):
                groups = roll(sidecars, step, killer.arrived, seen)
            killer.done()
            check_trajectories(report, groups, seen, sidecars.version_of(step))
            compare(report, groups, roll(undisturbed, step, lambda share: None, []))
            for victim in victims:
                victim.wait()
            look(report, sidecars, undisturbed)
            report.steps += 1
            found = report.faults()
            print(f"step {step}: {report.moments.total()} kills, {found} faults", flush=True)
        report.resumed, report.restarted = sidecars.fleet.resumed, sidecars.fleet.restarted
    report.seconds = time.monotonic() - started
    return report


@contextlib.contextmanager
def watched_sidecars(urls: Sequence[str]) -> Iterator[Sidecars]:
    """The trainer's side, with clients that remember what they asked for."""
    sidecars = Sidecars(urls, token=None, timeout_s=120.0)
    for client in sidecars._clients:
        client.__class__ = Watched
    sidecars.fleet.period_s = 0.5
    with sidecars:
        yield sidecars


def pushes(mode: Any) -> WeightsConfig:
    """Many small parts, so that a push has many moments."""
    return WeightsConfig(part_bytes=PART_BYTES, mode=mode, timeout_s=60.0)


def weights(step: int) -> list[tuple[str, jnp.ndarray]]:
    """Those after so many steps, in bfloat16: a twentieth of the elements moves in each."""
    return [(name, jnp.asarray(array)) for name, array in _weights(step).items()]


_MADE: dict[int, dict[str, np.ndarray]] = {}


def _weights(step: int) -> dict[str, np.ndarray]:
    if step not in _MADE:
        rng = np.random.default_rng(step)
        if step == 0:
            from flax import nnx

            from tooljax.model.decoder import Decoder

            config = tiny.tiny_config(300, embed=64, layers=2)
            decoder = Decoder(config, rngs=nnx.Rngs(0))
            before = {name: np.asarray(a) for name, a in hf.to_hf(config, decoder)}
        else:
            before = _MADE.pop(step - 1)
        after = {}
        for name, array in before.items():
            moved = array.astype(np.float32)
            where = rng.random(array.shape) < 0.05
            moved[where] += rng.normal(0, 0.02, int(where.sum()))
            after[name] = moved.astype(jnp.bfloat16)
        _MADE[step] = after
    return _MADE[step]


def roll(sidecars: Sidecars, step: int, arrived: Any, seen: list[int]) -> Groups:
    """Every task and sample under the weights of a step."""

    def on_progress(made: int, wanted: int) -> None:
        seen.append(made)
        arrived(made / wanted)

    tasks = [
        Task(
            task_id=f"t{i}",
            messages=[{"role": "user", "content": f"Problem {i}?"}],
            data_source="openai/gsm8k",
            ground_truth=str(i),
            interaction="gsm8k",
            interaction_kwargs={"ground_truth": str(i)},
        )
        for i in range(TASKS)
    ]
    return sidecars.rollout(
        tasks,
        samples=SAMPLES,
        seed=(step,),
        step=step,
        sampling=SamplingParams(),
        limits=Limits(max_turns=TURNS, max_tokens_per_turn=64, max_trajectory_tokens=512),
        on_progress=on_progress,
    )


# --- killing --------------------------------------------------------------------------------------------------------


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


# --- checks ---------------------------------------------------------------------------------------------------------


def check_trajectories(
    report: ChaosReport, groups: Groups, seen: Sequence[int], version: int
) -> None:
    """Every trajectory is there once, and every token has the version that was asked for."""
    wanted = TASKS * SAMPLES
    report.trajectories += wanted
    report.doubled += len(seen) - len(set(seen)) + max(0, max(seen) - wanted)
    for i in range(TASKS):
        there = {(t.task_index, t.sample_index, t.task_id): t for t in groups[i]}
        report.doubled += len(groups[i]) - len(there)
        for s in range(SAMPLES):
            trajectory = there.get((i, s, f"t{i}"))
            failed = trajectory is None or trajectory.status in ("engine_error", "aborted")
            report.lost += failed
            if trajectory is None:
                continue
            if failed:
                print(f"lost: {trajectory.status}: {trajectory.error}")
            mask = np.array(trajectory.loss_mask, bool)
            report.tokens += int(mask.sum())
            known = np.zeros_like(mask)
            for span in trajectory.version_spans:
                known[span.start : span.end] |= span.policy_version == version
            report.unknown_versions += int((mask & ~known).sum())


def compare(report: ChaosReport, groups: Groups, expected: Groups) -> None:
    """Trajectories are those of the sidecar that was not killed."""
    for group, others in zip(groups, expected, strict=True):
        for one, other in zip(group, others, strict=True):
            same = essence(one) == essence(other)
            if same:
                apart = np.abs(np.subtract(one.rollout_log_probs, other.rollout_log_probs))
                report.apart = max(report.apart, float(apart.max(initial=0.0)))
                same = not (apart >= ROUNDING).any()
            report.other_tokens += not same


def essence(trajectory: Trajectory) -> tuple[Any, ...]:
    """What must not depend on who died."""
    tokens = (tuple(trajectory.token_ids), tuple(trajectory.loss_mask))
    return (*tokens, trajectory.status, trajectory.reward, trajectory.seed)


def look(report: ChaosReport, sidecars: Sidecars, undisturbed: Sidecars) -> None:
    """Asks every sidecar what its engine holds, and whether that is what was pushed as the version it names."""

    async def ask(client: SidecarClient) -> ServedWeights | None:
        try:
            return await client.served_weights()
        except SidecarError as error:
            if error.kind == "no_weights":
                return None
            raise

    async def ask_all(clients: Sequence[SidecarClient]) -> list[ServedWeights | None]:
        return list(await asyncio.gather(*map(ask, clients)))

    expected = undisturbed._runner.run(ask_all(undisturbed._clients))[0]
    assert expected is not None
    for served in sidecars._runner.run(ask_all(sidecars._clients)):
        report.looks += 1
        if served is None or served.version != expected.version:
            report.stale += 1
            continue
        same = (served.content_hash, served.hashes) == (expected.content_hash, expected.hashes)
        report.mixed_weights += not same or bool(served.altered)


def show(report: ChaosReport, args: argparse.Namespace) -> None:
    """A table of moments, and what was wrong."""
    print(
        f"\n{report.moments.total()} kills of {args.sidecars} sidecars in {report.steps} steps,"
        f" {report.seconds:.0f} s; seed {args.seed}\n"
    )
    print("| killed in | times |\n|---|---:|")
    for moment, count in sorted(report.moments.items()):
        print(f"| {moment} | {count} |")
    print("\n| seen | count |\n|---|---:|")
    rows = {
        "trajectories wanted": report.trajectories,
        "sampled tokens": report.tokens,
        "asked for again, from a finished turn": report.resumed,
        "asked for again, from the prompt": report.restarted,
        "pushes that had to be sent whole": report.full_resends,
        "looks at what an engine holds": report.looks,
        "of these, started again and not used yet": report.stale,
        "largest difference of a log-prob, nats": f"{report.apart:.1e}",
        "**trajectories lost**": report.lost,
        "**trajectories doubled**": report.doubled,
        "**tokens of unknown version**": report.unknown_versions,
        "**trajectories other than undisturbed**": report.other_tokens,
        "**looks that found mixed weights**": report.mixed_weights,
    }
    for name, count in rows.items():
        print(f"| {name} | {count} |")


if __name__ == "__main__":
    sys.exit(main())
