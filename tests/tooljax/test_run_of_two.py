"""A run of two processes with two devices each is the run of one process with four; and they end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gate_cases import make_config, make_folder, serve_model

from tooljax.checkpoint import Checkpointer
from tooljax.config import Config, to_gin
from tooljax.config.schema import (
    CheckpointConfig,
    DataConfig,
    GateConfig,
    GrpoConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    SidecarConfig,
    TrackConfig,
)
from tooljax.policy import Policy, abstract_state, make_updater
from tooljax.rollouts import Sidecars
from tooljax.train import train

ROOT = Path(__file__).parents[2]
STEPS = 60
"""More than are made."""

REWARD = """
def count(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) % 7 / 7, "acc": 0.0}
"""

pytestmark = [pytest.mark.usefixtures("quick_compilations"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def served(folder):
    with serve_model(folder) as served:
        yield served


@pytest.fixture
def config(folder, served, tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Problem {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(4)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # An untrained policy solves nothing, and rewards that are all equal teach nothing.
    (tmp_path / "reward.py").write_text(REWARD)
    served.sidecar.agent.scorer.reward = f"{tmp_path / 'reward.py'}:count"
    return make_config(
        folder,
        run=RunConfig(dir=str(tmp_path / "run"), steps=STEPS, progress="off"),
        data=DataConfig(train=(str(tmp_path / "train.jsonl"),), prompts_per_step=2),
        grpo=GrpoConfig(group_size=2, kl_coef=0.0, zero_variance="keep"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant"),
        track=TrackConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=1, keep=STEPS),
        gate=GateConfig(prompts=2, max_tokens=8),
        mesh=MeshConfig(data=2, fsdp=2),
        sidecar=SidecarConfig(urls=(served.url,), max_model_tokens=128),
    )


@contextmanager
def processes(config: Config, *options: Sequence[str]) -> Iterator[list[subprocess.Popen]]:
    """The trainer as two processes, each with options of its own. They meet as those of a Kubernetes Job do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    file = Path(config.run.dir).with_suffix(".gin")
    file.write_text(to_gin(config))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    command = [sys.executable, "-m", "tooljax.train", "--config", str(file)]
    command += ["--set", "mesh.coordinator=auto"]
    running = [
        subprocess.Popen(
            [*command, *own],
            env=environment | {"JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, own in enumerate(options)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def ended(running: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """The exit status of each, and what it said."""
    said = [process.communicate(timeout=150)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


def metrics(config: Config) -> list[dict[str, Any]]:
    file = Path(config.run.dir, "metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def small(metric: str) -> float:
    """A difference that is nothing: engine and trainer differ by rounding alone, and that by the order of sums."""
    return 3e-5 if metric.startswith("gate/") or "mismatch" in metric else 1e-6


def weights(config: Config, step: int) -> list[np.ndarray]:
    """Of a checkpoint, read by this process."""
    policy = Policy.load(config.model.path, "float32")
    updater = make_updater(config, policy, total_updates=1, learning_rate=1e-3)
    with Checkpointer(Path(config.run.dir, "checkpoints")) as checkpoints:
        found = checkpoints.restore(abstract_state(updater, policy.params), step=step)
    assert found is not None
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found[1].params)]


def test_a_run_of_two_processes_is_that_of_one_until_either_is_told_to_end(config, tmp_path):
    with processes(config, [], []) as running:
        while len(metrics(config)) < 2 and all(process.poll() is None for process in running):
            time.sleep(0.1)
        running[1].send_signal(signal.SIGTERM)
        for status, said in ended(running):
            assert status == 130, said
            assert "saved; run the same command to go on" in said
    made = metrics(config)
    assert 2 <= len(made) < STEPS
    one = replace(config, run=replace(config.run, dir=str(tmp_path / "one"), steps=2))
    with Sidecars(config.sidecar.urls, token=None, timeout_s=60.0) as sidecars:
        assert train(one, sidecars) == 2
    for found, wanted in zip(made, metrics(one), strict=False):
        # But for what a clock says.
        same = [name for name in wanted if not re.search(r"^(time|perf)/|_s(/|$)", name)]
        assert "gate/mean_kl" in same or found["step"] == 2
        for name in same:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=small(name)), name
    for found, wanted in zip(weights(config, 2), weights(one, 2), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert (Path(config.run.dir) / "checkpoints" / str(len(made))).is_dir()


def test_a_process_that_fails_ends_the_others(config):
    with processes(config, [], ["--set", "data.train=('missing.jsonl',)"]) as running:
        (_, first), (_, second) = ended(running)
    assert [process.returncode for process in running] == [1, 1]
    assert "tooljax.train: data.train: missing.jsonl: no such file" in second
    assert "process 1 of 2 has failed, so this one ends: data.train: missing.jsonl" in first
