"""Known failures of weight updates: what many of them leave behind."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scripted_sidecar import KeepingEngine, serving, write_tokenizer

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.weights.push import WeightSender


@pytest.mark.parametrize("mode", ["full", "delta"])
async def test_pushes_leave_no_memory_behind(tmp_path, mode):
    """Pain point 22: 50 pushes of 8 MB, both sides in this process, grow it by less than 1 MB each."""
    if sys.platform != "linux":
        pytest.skip("reads the size of this process from /proc")
    rng = np.random.default_rng(0)
    array = rng.normal(size=(2048, 2048)).astype(jnp.bfloat16)
    tokenizer = ChatTokenizer.from_folder(write_tokenizer(tmp_path))
    engine = KeepingEngine(tokenizer)
    sizes = []
    async with serving(engine, tokenizer) as url, SidecarClient(url) as client:
        sender = WeightSender([client], mode=mode, part_bytes=2**20)
        for version in range(1, 61):
            array[version] = rng.normal(size=2048)
            tensors = [("w", jnp.asarray(array))]
            report = await sender.push(tensors, version=version, timeout_s=30.0)
            sizes.append(resident_bytes())
    assert report.bytes < 2**17 if mode == "delta" else report.bytes == array.nbytes
    assert engine.weights == {"w": array.tobytes()}
    settled = np.array(sizes[10:]) / 1e6
    # The slope of a line through them. A copy left behind by every push would give 8.
    slope = np.polyfit(np.arange(settled.size), settled, 1)[0]
    assert slope < 1, f"{slope:.2f} MB a push"


def resident_bytes() -> int:
    """Memory of this process that is in use: what the allocator keeps for later is given back first."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
