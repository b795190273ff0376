"""A sidecar in a process of its own, something for it to do, and what can be seen of it from outside."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.protocol import Limits, RolloutRequest, RolloutSpec, Task

ROOT = Path(__file__).parents[2]


@contextmanager
def served(
    arguments: Sequence[str], folder: Path, program: Sequence[str] = ("-m", "rollout_sidecar")
) -> Iterator[tuple[str, int]]:
    """Runs a sidecar with these arguments; gives its URL and process id. Its log goes into the folder."""
    port_file, log = folder / "port", folder / "log"
    port = ["--port", "0", "--port_file", str(port_file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *program, *arguments, *port],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the sidecar ended:\n{log.read_text()[-3000:]}")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text()}", process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def until_ready(client: SidecarClient, timeout_s: float = 300.0) -> None:
    """SGLang takes a minute to start."""
    async with asyncio.timeout(timeout_s):
        while not await client.ready():
            await asyncio.sleep(0.2)


@asynccontextmanager
async def generating(client: SidecarClient, running: int) -> AsyncIterator[None]:
    """Keeps so many trajectories under way within the block, so that there is something to hold up."""
    reading = [asyncio.create_task(_keep_asking(client, i)) for i in range(running)]
    await asyncio.sleep(2.0 if running else 0.0)  # prompts are read, kernels compiled
    try:
        yield
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _keep_asking(client: SidecarClient, seed: int) -> None:
    task = Task(task_id="t", messages=[{"role": "user", "content": "Count to two."}])
    number = 0
    while True:
        request = RolloutRequest(
            request_id=f"load-{seed}-{number}",
            tasks=[task],
            rollouts=[RolloutSpec(task_index=0, sample_index=0, seed=seed)],
            limits=Limits(max_tokens_per_turn=900, max_trajectory_tokens=1000),
        )
        async for _ in client.rollouts(request):
            number += 1


async def swap_seconds(client: SidecarClient) -> dict[str, float]:
    """What the last push took in the sidecar, by stage."""
    text = (await client._call("GET", "/metrics")).decode()
    found = re.findall(r'weight_swap_seconds\{stage="(\w+)"\} (\S+)', text)
    return {stage: float(value) for stage, value in found}


def resident(process: int) -> int:
    """Memory of a process."""
    return status_bytes(process, "VmRSS")


def processes_of(process: int) -> list[int]:
    """The process and those that it started, on Linux."""
    found = [process]
    for each in found:  # grows while it is read
        with suppress(OSError):
            for file in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, file.read_text().split())
    return found


def status_bytes(process: int, field: str) -> int:
    """A size from what Linux says of a process; 0 elsewhere."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def gpu_bytes() -> int:
    """Memory used of the first GPU; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    with suppress(OSError, subprocess.CalledProcessError, ValueError):
        return int(subprocess.check_output(command, text=True)) * 2**20
    return 0
