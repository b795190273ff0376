"""The local sidecar as a process: it serves, it ends with the trainer, and its failures are told."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scripted_sidecar import write_tokenizer

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import Limits, RolloutRequest, RolloutSpec, Task
from tooljax import launch
from tooljax.config import Config, ModelConfig, RewardConfig, SidecarConfig
from tooljax.launch import local_sidecar

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, and a script for the scripted engine."""
    folder = write_tokenizer(tmp_path_factory.mktemp("model"))
    (folder / "script.json").write_text(json.dumps(["#### 2"]))
    return folder


@pytest.fixture
def engine(folder):
    return ("--engine", "scripted", "--script", str(folder / "script.json"))


@pytest.fixture
def started(monkeypatch):
    """The processes that are started."""
    processes = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(launch.subprocess, "Popen", Popen)
    return processes


def config(folder, **sidecar) -> Config:
    return Config(model=ModelConfig(path=str(folder)), sidecar=SidecarConfig(**sidecar))


def request() -> RolloutRequest:
    task = Task(
        task_id="t",
        messages=[{"role": "user", "content": "Count to two."}],
        data_source="openai/gsm8k",
        ground_truth="2",
    )
    return RolloutRequest(
        request_id="r",
        tasks=[task],
        rollouts=[RolloutSpec(task_index=0, sample_index=0, seed=1)],
        limits=Limits(max_tokens_per_turn=16),
    )


async def test_it_serves_as_configured_and_ends_with_the_block(folder, engine, started, tmp_path):
    settings = replace(
        config(folder, max_model_tokens=321),
        reward=RewardConfig(function="gsm8k", function_kwargs='{"score": 0.75}'),
    )
    log_path = tmp_path / "new" / "sidecar.log"
    with local_sidecar(settings, log_path=log_path, engine=engine) as (url, token):
        async with SidecarClient(url, token=token) as client:
            info = await client.info()
            [trajectory] = [t async for t in client.rollouts(request())]
        async with SidecarClient(url, token="guess") as client:
            with pytest.raises(SidecarError, match="401"):
                await client.info()
        [process] = started
        # Ctrl-C on the terminal goes to the trainer's process group, and the sidecar is not in it.
        assert os.getpgid(process.pid) == process.pid != os.getpgrp()
        assert token not in " ".join(process.args)
        [option] = [a for a in process.args if a.endswith("/token")]
        assert os.stat(option).st_mode & 0o077 == 0
    assert (info.engine, info.model, info.max_model_tokens) == ("scripted", str(folder), 321)
    assert trajectory.reward == 0.75
    assert process.returncode == 0  # it was asked, not killed
    assert "ready" in log_path.read_text()
    assert not Path(option).exists()


def test_an_error_in_the_block_ends_it_too(folder, engine, started, tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        local_sidecar(config(folder), log_path=tmp_path / "log", engine=engine),
    ):
        raise ZeroDivisionError
    assert started[0].returncode == 0


def test_a_bad_model_is_told_with_the_end_of_the_log(tmp_path):
    log_path = tmp_path / "log"
    log_path.write_text("of an earlier run\n")
    nowhere = tmp_path / "nowhere"
    with (
        pytest.raises(SidecarError, match=r"ended while starting \(exit code 1\)") as caught,
        local_sidecar(config(nowhere), log_path=log_path),
    ):
        raise AssertionError("it must not start")
    assert f"The end of its log, {log_path}:" in str(caught.value)
    assert str(nowhere) in str(caught.value)
    assert "of an earlier run" not in str(caught.value)
    assert log_path.read_text().startswith("of an earlier run\n")


def test_no_model_is_the_users_mistake(tmp_path):
    with (
        pytest.raises(ValueError, match=r"model\.path is empty: set it"),
        local_sidecar(Config(), log_path=tmp_path / "log"),
    ):
        pass


def test_a_start_that_takes_too_long_is_ended(folder, engine, started, tmp_path):
    settings = config(folder, start_timeout_s=0.01)
    with (
        pytest.raises(SidecarError, match=r"not ready within 0\.01 s \(raise sidecar\.start_t"),
        local_sidecar(settings, log_path=tmp_path / "log", engine=engine),
    ):
        pass
    assert started[0].returncode is not None


async def test_a_sidecar_that_dies_is_named_as_the_cause(
    folder, engine, started, tmp_path, monkeypatch
):
    monkeypatch.setattr("rollout_sidecar.connection.RETRIES", 0)

    async def use() -> None:
        with local_sidecar(config(folder), log_path=tmp_path / "log", engine=engine) as (url, key):
            started[0].kill()
            started[0].wait()
            async with SidecarClient(url, token=key) as client:
                async for _ in client.rollouts(request()):
                    pass

    message = r"ended while it was serving \(signal SIGKILL, as when memory runs out\)"
    with pytest.raises(SidecarError, match=message) as caught:
        await use()
    assert "cannot be reached" in str(caught.value.__cause__)


def test_a_sidecar_that_hangs_is_killed(folder, engine, started, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(launch, "GRACE_S", 0.3)
    with local_sidecar(config(folder), log_path=tmp_path / "log", engine=engine):
        started[0].send_signal(signal.SIGSTOP)
    assert started[0].returncode == -signal.SIGKILL
    assert "did not end within 0.3 s and was killed" in caplog.text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_it_does_not_outlive_a_killed_trainer(folder, engine, tmp_path):
    script = (
        "import time\n"
        "from tooljax.config import Config, ModelConfig\n"
        "from tooljax.launch import local_sidecar\n"
        f"config = Config(model=ModelConfig(path={str(folder)!r}))\n"
        f"with local_sidecar(config, log_path={str(tmp_path / 'log')!r}, engine={engine!r}):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,  # not the root: the sidecar's package is found all the same
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        [sidecar] = [Path("/proc") / child for child in children]
        trainer.kill()
    deadline = time.monotonic() + 20
    while _is_running(sidecar):
        assert time.monotonic() < deadline, "the sidecar is still there"
        time.sleep(0.05)


def _is_running(process: Path) -> bool:
    try:
        state = (process / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"  # dead, and nobody has asked how


async def test_the_embedded_engine_serves_what_is_pushed(tmp_path):
    from tooljax.model import hf
    from tooljax.model.decoder import Decoder, DecoderConfig
    from tooljax.weights.push import WeightSender

    cfg = DecoderConfig(
        family="qwen2",
        vocab=259,
        embed=16,
        layers=1,
        q_heads=2,
        kv_heads=1,
        head_dim=8,
        ffw=16,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied_head=True,
        max_positions=128,
        qkv_bias=True,
        dtype="float32",
    )
    decoder = Decoder(cfg, rngs=nnx.Rngs(0))
    folder = tmp_path / "model"
    hf.save(decoder, folder, source=None)
    write_tokenizer(folder)
    settings = Config(
        model=ModelConfig(path=str(folder), dtype="float32"),
        sidecar=SidecarConfig(slots=2, max_model_tokens=128),
        reward=RewardConfig(function="gsm8k"),
    )
    # A head of zeros makes every token equally likely, which no other weights do.
    flat = [(name, jnp.zeros_like(x)) for name, x in hf.to_hf(cfg, decoder)]
    with local_sidecar(settings, log_path=tmp_path / "log") as (url, token):
        async with SidecarClient(url, token=token) as client:
            sender = WeightSender([client], mode="full", part_bytes=4096)
            report = await sender.push(flat, version=1, timeout_s=30.0)
            assert (await client.info()).content_hash == report.content_hash
            [trajectory] = [t async for t in client.rollouts(request())]
    assert trajectory.status in ("completed", "max_tokens"), trajectory.error
    sampled = np.array(trajectory.rollout_log_probs)[np.array(trajectory.loss_mask)]
    np.testing.assert_allclose(sampled, -np.log(259), rtol=1e-6)
