"""After a signal to end: what sidecars do not answer is given up in time to save, and a second signal ends at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from gate_cases import make_config, make_folder, serve_model
from served_sidecars import make_tokenizer, serve

from rollout_sidecar.client import SidecarError
from tooljax.config.schema import DataConfig, GrpoConfig, RunConfig, TrackConfig
from tooljax.rollouts import InterruptedRollout, Sidecars
from tooljax.train import Run

ROOT = Path(__file__).parents[2]


async def never(client) -> None:
    """A sidecar that does not answer."""
    await asyncio.sleep(600)


def test_what_has_no_answer_in_half_of_the_grace_period_is_given_up(tmp_path):
    with (
        serve(make_tokenizer(tmp_path), []) as served,
        Sidecars([served[0].url], token=None, timeout_s=60.0, grace_s=0.4) as sidecars,
    ):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(
            SidecarError,
            match=r"the sidecars gave no answer within 0\.2 s of the signal to end, half of checkpoint\.grace_s",
        ):
            sidecars.on_each(never, interruptible=False)
        # Nor does anything begin that late.
        with pytest.raises(SidecarError, match="half of checkpoint.grace_s"):
            sidecars.on_each(never, interruptible=False)
        with pytest.raises(InterruptedRollout):
            sidecars.on_each(never)


def test_cleaning_up_after_a_rollout_is_given_up_too(tmp_path):
    async def slow_to_end(client) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)  # such as aborting a request of a sidecar that hangs

    with (
        serve(make_tokenizer(tmp_path), []) as served,
        Sidecars([served[0].url], token=None, timeout_s=60.0, grace_s=0.4) as sidecars,
    ):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(InterruptedRollout):
            sidecars.on_each(slow_to_end)


TWICE = """
import asyncio, sys
from tooljax.rollouts import Sidecars

async def never(client):
    print("asking", flush=True)
    await asyncio.sleep(600)

with Sidecars([sys.argv[1]], token=None, timeout_s=60.0, grace_s=600.0) as sidecars:
    sidecars.on_each(never, interruptible=False)
"""


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    with serve(make_tokenizer(tmp_path), []) as served:
        process = subprocess.Popen(
            [sys.executable, "-c", TWICE, served[0].url],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"asking\n"
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)  # the first only asks
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.kill()
            process.communicate()


def test_a_sidecar_that_fails_when_the_run_is_to_end_does_not_cost_the_step(tmp_path):
    folder = make_folder(tmp_path / "model", layers=1)
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Problem?"}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    config = make_config(
        folder,
        run=RunConfig(dir=str(tmp_path / "run"), progress="off"),
        data=DataConfig(train=(str(tmp_path / "train.jsonl"),), prompts_per_step=1),
        grpo=GrpoConfig(group_size=2, kl_coef=0.0),
        track=TrackConfig(tensorboard=False),
    )
    with (
        serve_model(folder) as served,
        Sidecars([served.url], token=None, timeout_s=20.0, grace_s=0.2) as sidecars,
    ):
        run = Run.open(config, sidecars)
        state, step = run.restore()
        assert run.push(state, step)
        os.kill(os.getpid(), signal.SIGTERM)
        assert sidecars._late.wait(10)
        assert run.push(state, step) == {}
        assert run.look(state, step).metrics == {}
        run.save(state, step)
        assert run.checkpointer.steps() == [0]
        run.checkpointer.close()
        # In a run that is to go on, it is an error.
        sidecars.stop_requested = False
        with pytest.raises(SidecarError):
            run.push(state, step)
