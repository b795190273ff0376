"""What a call of the Python sandbox costs: the start of the pool, one call at a time, sessions, and many at once.

    python benchmarks/python_sandbox.py
    python benchmarks/python_sandbox.py --workers 16 --python ~/venv/bin/python --preload numpy

Beside each number stands the same for a plain `python -I -c pass` in a process of its own, which walls nothing off,
measured in turns with it: on a busy machine the ratio tells more than the milliseconds.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

from rollout_sidecar.tools.python_sandbox import PythonSandbox, SandboxOptions
from rollout_sidecar.tools.python_sandbox.interpreter import find_interpreter


async def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--workers", type=int, default=0, help="0: as the sandbox chooses")
    parser.add_argument("--python", default="", help="interpreter in the sandbox")
    parser.add_argument("--preload", nargs="*", default=[], help="modules that calls find imported")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--at_once", type=int, default=64)
    parser.add_argument("--pause_ms", type=float, default=20, help="between single calls")
    args = parser.parse_args()

    options = SandboxOptions(
        workers=args.workers, python=args.python, preload=tuple(args.preload), wall_s=30.0
    )
    python = find_interpreter(args.python).path
    box = PythonSandbox(options)
    begun = time.perf_counter()
    await box.start()
    start_s = time.perf_counter() - begun
    try:
        await report(args, options, python, box, start_s)
    finally:
        await box.close()


async def report(
    args: argparse.Namespace,
    options: SandboxOptions,
    python: str,
    box: PythonSandbox,
    start_s: float,
) -> None:
    """Measures and prints."""

    async def fresh() -> None:
        assert (await box.run("")).status == "ok"

    async def in_session() -> None:
        assert (await box.run("", session="s")).status == "ok"

    async def plain() -> None:
        process = await asyncio.create_subprocess_exec(python, "-I", "-c", "pass")
        assert await process.wait() == 0

    await in_session()
    kinds = {"fresh": fresh, "session": in_session, "plain": plain}
    times = await in_turns(kinds, args.calls, args.pause_ms / 1000)
    await box.end_session("s")
    many = {
        kind: [await at_once(call, args.at_once) for _ in range(5)]
        for kind, call in (("fresh", fresh), ("plain", plain))
    }
    rows = [
        ("empty call, warm pool, p50", p(times["fresh"], 50), p(times["plain"], 50)),
        ("empty call, warm pool, p95", p(times["fresh"], 95), p(times["plain"], 95)),
        ("empty call of a session, p50", p(times["session"], 50), p(times["plain"], 50)),
        ("empty call of a session, p95", p(times["session"], 95), p(times["plain"], 95)),
        (f"{args.at_once} at once, all done", *(middle(many[k], 0) for k in many)),
        (f"{args.at_once} at once, p95 of a call", *(middle(many[k], 1) for k in many)),
    ]
    load = os.getloadavg()[0]
    print(
        f"{options.workers_at_start()} workers, {os.cpu_count()} processors, load {load:.1f}; {python}"
    )
    print(f"sidecar's Python {sys.version.split()[0]}; pool started in {1000 * start_s:.0f} ms\n")
    print(f"{'':34}{'sandbox':>12}{'plain':>12}{'ratio':>8}")
    for name, ours, theirs in rows:
        print(f"{name:34}{1000 * ours:9.2f} ms{1000 * theirs:9.2f} ms{ours / theirs:8.2f}")


async def in_turns(
    kinds: Mapping[str, Callable[[], Awaitable[None]]], calls: int, pause_s: float
) -> dict[str, list[float]]:
    """Seconds of each call: one of each kind, then the next of each, with a pause before each."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(calls):
        for kind, call in kinds.items():
            await asyncio.sleep(pause_s)
            begun = time.perf_counter()
            await call()
            times[kind].append(time.perf_counter() - begun)
    return times


async def at_once(call: Callable[[], Awaitable[None]], count: int) -> tuple[float, float]:
    """Seconds until all are done, and the 95th percentile of each by itself."""
    begun = time.perf_counter()

    async def timed() -> float:
        await call()
        return time.perf_counter() - begun

    each = await asyncio.gather(*(timed() for _ in range(count)))
    return time.perf_counter() - begun, p(list(each), 95)


def p(times: list[float], percent: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


def middle(runs: list[tuple[float, float]], column: int) -> float:
    return statistics.median(run[column] for run in runs)


if __name__ == "__main__":
    asyncio.run(main())
