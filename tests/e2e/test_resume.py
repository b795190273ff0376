"""Whole runs in processes of their own: killed and resumed, interrupted, and fed with what is broken."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)

ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}


def command(world: Path, run_dir: Path, *settings: str) -> list[str]:
    arguments = [sys.executable, "-m", "tooljax.train", "--config", str(world / "run.gin")]
    for setting in (f"run.dir={run_dir}", *settings):
        arguments += ["--set", setting]
    return arguments


def run(world: Path, run_dir: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(world, run_dir, *settings),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def start_and_wait_for_step(
    world: Path, run_dir: Path, step: int, *settings: str
) -> subprocess.Popen[bytes]:
    """A run that has logged `step` steps."""
    with (run_dir.parent / f"{run_dir.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command(world, run_dir, *settings),
            env=ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 200
    while len(metrics(run_dir)) < step:
        assert process.poll() is None, (run_dir.parent / f"{run_dir.name}.log").read_text()[-3000:]
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.02)
    return process


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """What was logged, without what a clock said and what a process of its own had to compile."""
    file = run_dir / "metrics.jsonl"
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    # time/push_s, perf/tokens_per_s, rollout/trajectory_s/mean
    others = re.compile(r"_s(/|$)|perf/(compilations|update_tflops|mfu)")
    return [{k: v for k, v in row.items() if not others.search(k)} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(small_world, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    result = run(small_world, run_dir)
    assert result.returncode == 0, result.stderr[-3000:]
    return run_dir


def weights(run_dir: Path) -> bytes:
    return (run_dir / "policy" / "model.safetensors").read_bytes()


def test_a_run_leaves_what_the_readme_says(uninterrupted):
    for name in (
        "metrics.jsonl",
        "learning_curve.png",
        "tensorboard",
        "trajectories",
        "config.gin",
        "policy",
    ):
        assert (uninterrupted / name).exists(), name
    rows = metrics(uninterrupted)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # Something is learned: a resumed run that lost moments or rewards would be another one.
    assert all(row["optim/grad_norm"] > 1e-3 and row["reward/std"] > 0 for row in rows)
    # Rollouts come from the very weights that are trained: the mismatch is numerics only.
    assert all(0 <= row["policy/kl_mismatch"] < 1e-6 for row in rows)
    assert all(row["policy/lag/max"] == 0 for row in rows)


def test_a_stored_run_replays_to_the_same_numbers(uninterrupted):
    command = [sys.executable, "-m", "tooljax.replay", str(uninterrupted)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same") == 4


def test_killed_at_any_step_it_resumes_bit_identically(small_world, uninterrupted, tmp_path):
    """Pain point 23."""
    run_dir = tmp_path / "killed"
    process = start_and_wait_for_step(small_world, run_dir, 2)
    time.sleep(os.getpid() % 7 * 0.05)  # somewhere in the next step
    process.kill()
    process.wait()
    result = run(small_world, run_dir)
    assert result.returncode == 0, result.stderr[-3000:]
    assert metrics(run_dir) == metrics(uninterrupted)
    assert weights(run_dir) == weights(uninterrupted)


def test_a_preempted_run_saves_within_its_grace_period_and_resumes(
    small_world, uninterrupted, tmp_path
):
    """The sidecar hangs, so that the rollout can neither end nor be aborted."""
    run_dir = tmp_path / "preempted"
    settings = ("checkpoint.every_steps=50", "checkpoint.grace_s=6")
    process = start_and_wait_for_step(small_world, run_dir, 1, *settings)
    (sidecar,) = sidecars_of(small_world / "model")
    os.kill(sidecar, signal.SIGSTOP)
    assert not saved(run_dir)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 40  # a busy machine may be late
    while not saved(run_dir):
        assert process.poll() is None
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.02)
    os.kill(sidecar, signal.SIGCONT)
    assert process.wait(60) == 130
    log = (tmp_path / "preempted.log").read_text()
    assert "saved; run the same command to go on" in log
    assert "Traceback" not in log
    assert not sidecars_of(small_world / "model")
    steps = len(metrics(run_dir))
    assert saved(run_dir) == [str(steps)]
    result = run(small_world, run_dir)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3, 4]
    assert weights(run_dir) == weights(uninterrupted)


def saved(run_dir: Path) -> list[str]:
    """The complete checkpoints."""
    return [path.name for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit()]


def sidecars_of(model: Path) -> list[int]:
    """Processes of sidecars that serve a model."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if entry.name.isdigit()
                else ""
            )
        except OSError:
            continue
        if "rollout_sidecar" in line and str(model) in line:
            found.append(int(entry.name))
    return found


def test_a_sidecar_that_is_down_is_one_sentence(small_world, tmp_path):
    result = run(small_world, tmp_path / "down", "sidecar.urls=('http://127.0.0.1:9',)")
    assert result.returncode == 1
    assert "http://127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_truncated_shard_is_one_sentence(small_world, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in (small_world / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "model.safetensors").write_bytes(
        (small_world / "model" / "model.safetensors").read_bytes()[:5000]
    )
    result = run(small_world, tmp_path / "run", f"model.path={model}")
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr


def test_prompts_over_the_limit_are_rejected_and_counted(small_world, tmp_path):
    """Pain points 17 and 19: never truncated, never a crash, never trained on."""
    result = run(small_world, tmp_path / "long", "limits.max_prompt_tokens=4", "run.steps=1")
    assert result.returncode == 0, result.stderr[-3000:]
    assert (
        "none of 16 trajectories can be trained on; the first ended as prompt_too_long"
        in result.stderr
    )
    (row,) = metrics(tmp_path / "long")
    assert row["rollout/status/prompt_too_long_frac"] == 1
    assert row["perf/loss_tokens"] == 0
    assert row["optim/skipped"] == 1
