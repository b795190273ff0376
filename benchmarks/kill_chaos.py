"""kill -9 of sidecars at random moments of pushes and rollouts: what reaches the trainer must be as if nobody had died.

    python benchmarks/kill_chaos.py
    python benchmarks/kill_chaos.py --kills 20 --seed 1 --sidecars 3
    python benchmarks/kill_chaos.py --dtype float32     # little rounding, but no deltas

Sidecars are processes of their own with the embedded engine (random weights of a tiny model), real pushes and
conversations of several turns. Each step pushes new weights and rolls out under them, while one of the sidecars, or now
and then all of them, is killed with SIGKILL and started again on its port. One more sidecar, which nobody kills and
which gets every push whole, says what each trajectory must be: same weights, contexts and seeds give the same tokens
and log-probs to the last bit. Where a trajectory went on in another sidecar, its context was read there in other
pieces: log-probs may differ by rounding, and once in a while a token after that. A twentieth of the weights is drawn
anew in each step, which moves log-probs by far more. After every step each sidecar is asked what its engine holds.
Exit code 1 unless all counts of faults are 0. Moments are drawn from the seed; what they hit differs from run to run.
"""

import argparse
import asyncio
import collections
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
from support.killing import Killer, Victim, watched_sidecars, write_model

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.conversation import first_difference
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

TASKS, SAMPLES, TURNS = 6, 4, 6
PART_BYTES = 4096
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}
"""Of log-probs, in nats."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--sidecars", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(ROUNDING), default="bfloat16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        with contextlib.ExitStack() as stack:
            made = [
                Victim(folder, i, args.dtype, slots=TASKS * SAMPLES)
                for i in range(args.sidecars + 1)
            ]
            for victim in made:
                stack.callback(victim.kill)
                victim.start()
            for victim in made:
                victim.wait()
            report = run(made[:-1], made[-1], args)
    show(report, args)
    return 1 if report.faults() else 0


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
    """Trajectories that are not those of an undisturbed sidecar with the same weights, beyond rounding."""
    rounded: int = 0
    """Trajectories that went on elsewhere, with log-probs that differ by rounding."""
    flipped: int = 0
    """Of these, those in which a later token differs."""
    apart: float = 0.0
    """Largest difference of a log-prob by rounding."""
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
            new = weights(step, args.dtype)
            expected = undisturbed.push(new, step=step, weights=pushes("full"))
            for victim in victims:
                victim.wait()
            killer.arm()
            asked_again = sidecars.fleet.resumed + sidecars.fleet.restarted
            with killer.phase("push"):
                pushed = sidecars.push(new, step=step, weights=pushes("delta"))
            assert pushed.content_hash == expected.content_hash
            report.full_resends += pushed.full_resends
            seen: list[int] = []
            with killer.phase("rollout"):
                groups = roll(sidecars, step, killer.arrived, seen)
            killer.done()
            check_trajectories(report, groups, seen, sidecars.version_of(step))
            again = sidecars.fleet.resumed + sidecars.fleet.restarted - asked_again
            wanted = roll(undisturbed, step, lambda share: None, [])
            compare(report, groups, wanted, again, ROUNDING[args.dtype])
            for victim in victims:
                victim.wait()
            look(report, sidecars, undisturbed)
            report.steps += 1
            found = report.faults()
            print(f"step {step}: {report.moments.total()} kills, {found} faults", flush=True)
        report.resumed, report.restarted = sidecars.fleet.resumed, sidecars.fleet.restarted
    report.seconds = time.monotonic() - started
    return report


def pushes(mode: Any) -> WeightsConfig:
    """Many small parts, so that a push has many moments."""
    return WeightsConfig(part_bytes=PART_BYTES, mode=mode, timeout_s=60.0)


def weights(step: int, dtype: str) -> list[tuple[str, jnp.ndarray]]:
    """Those after so many steps: a twentieth of the elements is drawn anew in each."""
    return [(name, jnp.asarray(array, dtype)) for name, array in _weights(step).items()]


_MADE: dict[int, dict[str, np.ndarray]] = {}


def _weights(step: int) -> dict[str, np.ndarray]:
    if step not in _MADE:
        rng = np.random.default_rng(step)
        if step == 0:
            from flax import nnx

            from tooljax.model.decoder import Decoder

            config = tiny.tiny_config(300, embed=64, layers=2)
            decoder = Decoder(config, rngs=nnx.Rngs(0))
            before = {name: np.asarray(a, np.float32) for name, a in hf.to_hf(config, decoder)}
        else:
            before = _MADE.pop(step - 1)
        after = {}
        for name, array in before.items():
            moved = array.copy()
            where = rng.random(array.shape) < 0.05
            moved[where] = rng.normal(array.mean(), array.std(), int(where.sum()))
            after[name] = moved
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


def compare(
    report: ChaosReport, groups: Groups, expected: Groups, asked_again: int, rounding: float
) -> None:
    """Trajectories are those of the sidecar that was not killed: to the last bit, or, of at most as many as were asked
    for again, but for rounding."""
    differing = 0
    for group, others in zip(groups, expected, strict=True):
        for one, other in zip(group, others, strict=True):
            if essence(one) == essence(other):
                continue
            differing += 1
            same = first_difference(one.token_ids, other.token_ids)
            apart = np.subtract(one.rollout_log_probs[:same], other.rollout_log_probs[:same])
            most = float(np.abs(apart).max(initial=0.0))
            if one.seed != other.seed or most >= rounding:
                report.other_tokens += 1
                continue
            report.rounded += 1
            report.flipped += list(one.token_ids) != list(other.token_ids)
            report.apart = max(report.apart, most)
    report.other_tokens += max(0, differing - asked_again)


def essence(trajectory: Trajectory) -> tuple[Any, ...]:
    """What must not depend on who died."""
    tokens = (trajectory.token_ids, trajectory.loss_mask, trajectory.rollout_log_probs)
    return (*map(tuple, tokens), trajectory.status, trajectory.reward, trajectory.seed)


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

    expected = undisturbed._loop.run(ask_all(undisturbed._clients))[0]
    assert expected is not None
    for served in sidecars._loop.run(ask_all(sidecars._clients)):
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
        "of these, other in the last bits": report.rounded,
        "of these, with another token later": report.flipped,
        "largest difference of a log-prob by rounding, nats": f"{report.apart:.1e}",
        "pushes that had to be sent whole": report.full_resends,
        "looks at what an engine holds": report.looks,
        "of these, started again and not used yet": report.stale,
        "**trajectories lost**": report.lost,
        "**trajectories doubled**": report.doubled,
        "**tokens of unknown version**": report.unknown_versions,
        "**trajectories other than undisturbed, beyond that**": report.other_tokens,
        "**looks that found mixed weights**": report.mixed_weights,
    }
    for name, count in rows.items():
        print(f"| {name} | {count} |")


if __name__ == "__main__":
    sys.exit(main())
