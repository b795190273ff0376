"""Two processes of two devices each train as one process with four."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from policy_mesh_cases import opened, settings, small_batch
from safetensors.numpy import load_file

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.usefixtures("quick_compilations"),
    pytest.mark.timeout(240),  # three processes start and compile at once
]


def test_two_processes_give_the_metrics_of_one(tmp_path):
    folder = tmp_path / "model"
    made = settings(folder, data=2, fsdp=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(
        [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "process_of_two.py"), str(rank), str(port), str(folder)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        policy, updater = opened(made)
        state, metrics = updater.update(updater.init(policy.params), small_batch())
        log_probs = updater.log_probs(state.params, small_batch())
        told = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, (out, errors) in zip(processes, told, strict=True):
        assert process.returncode == 0, errors[-2000:]
        found = json.loads(out.splitlines()[-1])
        assert found["devices"] == 4
        assert found["metrics"] == pytest.approx(metrics, rel=1e-5)
        np.testing.assert_allclose(found["log_probs"], log_probs, rtol=1e-5, atol=1e-6)
        assert found["heard"]
        # fsdp=2 within each process: it holds every weight once, in two parts. Only biases of heads are whole on both.
        assert found["whole"] <= found["held"] < 1.2 * found["whole"]
    # The first process has written what both hold.
    policy.save(state.params, tmp_path / "own")
    saved, own = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "own"))
    assert saved.keys() == own.keys()
    for name, values in own.items():
        np.testing.assert_allclose(saved[name], values, rtol=1e-5, atol=1e-6)
