"""Many pushes in a row: does the engine hold, after every one, what a cold load of the same weights would, and does
memory grow?"""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from support.sidecar_process import gpu_bytes, processes_of, resident

from rollout_sidecar.client import SidecarClient, SidecarError

GOAL_MB = 1.0
"""Growth a push, at most."""

SETTLED = 1 / 3
"""Share of the pushes before allocators and caches have what they need: left out of the slope."""

ENOUGH = 30
"""Pushes that a slope is taken of, at least, for a verdict: an allocator that grows once by a gigabyte makes any
slope of a few."""


class Memory(NamedTuple):
    """Bytes after a push."""

    trainer: int
    sidecar: int
    engine: int
    """Of the processes that the sidecar started, SGLang's; what they share counts for each. 0 without any."""
    gpu_trainer: int
    """Of arrays, of what JAX's allocator has taken; 0 without a GPU."""
    gpu_sidecar: int
    """Of tensors, of what torch's allocator has taken, in the sidecar itself; 0 without a GPU."""
    gpu_all: int
    """Taken by all processes, used or not; 0 without a GPU."""


async def memory_of(sidecar: int, client: SidecarClient) -> Memory:
    """Of this process, the trainer, and of the sidecar."""
    _, *started = processes_of(sidecar)
    used = b"0"
    if gpu_bytes():
        with suppress(SidecarError):  # only the sidecar beside SGLang's own way tells
            used = await client._call("GET", "/benchmark/memory")
    return Memory(
        resident(os.getpid()),
        resident(sidecar),
        sum(map(resident, started)),
        trainer_gpu_bytes(),
        int(used),
        gpu_bytes(),
    )


def trainer_gpu_bytes() -> int:
    """In use, and not only kept, by JAX on its first device; 0 if that is a CPU."""
    import jax

    gc.collect()  # arrays that wait for Python's collector are no growth
    statistics = jax.devices()[0].memory_stats() or {}
    return int(statistics.get("bytes_in_use", 0))


async def push_many(
    client: SidecarClient,
    process: int,
    tensors: dict[str, Any],
    moved: Callable[[dict[str, Any], int], dict[str, Any]],
    pushes: int,
) -> int:
    """Pushes that many deltas and compares after every one; returns how many tensors differed, and prints them.

    A cold load is hashed anew from the trainer's arrays, by no code of the delta path. Against that: the sidecar's host
    copy, hashed when asked, and the engine's own memory, read back.
    """
    from tooljax.weights.push import WeightSender

    sender = WeightSender([client], mode="delta", part_bytes=2**25)
    memory: list[Memory] = []
    mismatches, seconds, changed, resent = 0, [], 0, 0
    for version in range(1, pushes + 2):
        if version > 1:
            tensors = moved(tensors, version)
        report = await sender.push(tensors.items(), version=version, timeout_s=600)
        resent += report.full_resends
        if version > 1:
            seconds.append(report.seconds)
            changed += report.changed_elements
        mismatches += await differing(client, version, report.content_hash, tensors)
        memory.append(await memory_of(process, client))
        if version % 100 == 0:
            print(f"  {version} pushes, {mismatches} mismatches", file=sys.stderr, flush=True)
    print(
        f"pushes: 1 full and {pushes} deltas, {changed:,} elements changed, {resent} sent again in"
    )
    print(f"full; {np.median(seconds):.3f} s a delta (median)")
    print(f"hash mismatches against a cold load: {mismatches} (goal: 0)")
    print_slopes(memory)
    return mismatches


async def differing(
    client: SidecarClient, version: int, pushed: str, tensors: dict[str, Any]
) -> int:
    """How many tensors are served otherwise than a cold load would; prints which."""
    served = await client.served_weights()
    if served.altered is None:
        raise SystemExit("the engine cannot tell which weights it holds: nothing to compare with")
    cold = cold_hashes(tensors)
    wrong = {name for name in cold if served.hashes.get(name) != cold[name]}
    wrong |= set(served.altered) | (set(served.hashes) - set(cold))
    for name in sorted(wrong):
        print(
            f"mismatch at version {version}: {name}: host copy {served.hashes.get(name)}, cold"
            f" {cold.get(name)}, the engine's memory altered: {name in served.altered}"
        )
    if (served.version, served.content_hash) != (version, pushed):
        print(f"mismatch at version {version}: {served.version} is served, {served.content_hash}")
        return max(len(wrong), 1)
    return len(wrong)


def cold_hashes(tensors: dict[str, Any]) -> dict[str, str]:
    """xxh3-128 of the bytes of every tensor, from the device once more."""
    import xxhash

    return {
        name: xxhash.xxh3_128_hexdigest(np.asarray(array).reshape(-1).view(np.uint8).data)
        for name, array in tensors.items()
    }


def print_slopes(memory: Sequence[Memory]) -> None:
    """Growth by least squares, once settled."""
    settled = memory[int(SETTLED * len(memory)) :]
    print(f"\nmemory, slope of the last {len(settled)} pushes (goal: under {GOAL_MB:g} MB a push)")
    print(f"{'':12}{'before, MB':>12}{'first, MB':>12}{'last, MB':>12}{'MB a push':>12}")
    before = zip(*memory[:1], strict=True)
    rows = zip(Memory._fields, before, zip(*settled, strict=True), strict=True)
    for name, (begun,), values in rows:
        if not values[-1]:
            continue
        slope = slope_mb(values)
        word = "reached" if slope < GOAL_MB else "missed"
        if len(settled) < ENOUGH:
            word = f"({ENOUGH} would tell)"
        sizes = "".join(f"{size / 1e6:12.1f}" for size in (begun, values[0], values[-1]))
        print(f"{name:12}{sizes}{slope:12.4f}  {word}")
    print()


def slope_mb(values: Sequence[int]) -> float:
    """Of bytes against their number, in MB, by least squares."""
    if len(values) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(values)), np.array(values, np.float64), 1)[0]) / 1e6
