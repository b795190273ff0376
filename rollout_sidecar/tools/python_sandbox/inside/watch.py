"""What a call uses, read from /proc: tasks, processor time, memory. Limits per process do not add up to a limit."""

import os
import signal
import time
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

NICENESS = 5


class Process(NamedTuple):
    """The fields of /proc/PID/stat that matter here."""

    state: bytes
    parent: int
    cpu_s: float
    waited_cpu_s: float
    tasks: int
    resident_bytes: int


class Usage(NamedTuple):
    """Of all processes of a call together."""

    tasks: int
    cpu_s: float
    resident_bytes: int
    """An upper bound: pages that processes share are counted once for each."""
    pids: list[int]


class Watch:
    """Sees the processes below `init`, which is process 1 of a process namespace where `isolated`."""

    def __init__(self, init: int, *, isolated: bool):
        self._init = init
        # In a worker of its own everything that is none of these four belongs to the call.
        self._ours = {1, os.getppid(), os.getpid(), init} if isolated else None

    def usage(self) -> Usage:
        """As of now. Processes that end meanwhile are left out."""
        pids = self._pids()
        found = {pid: process for pid in pids if (process := _read(pid))}
        init = _read(self._init)
        return Usage(
            tasks=sum(process.tasks for process in found.values()),
            cpu_s=sum(process.cpu_s + process.waited_cpu_s for process in found.values())
            + (init.waited_cpu_s if init else 0.0),
            resident_bytes=sum(process.resident_bytes for process in found.values()),
            pids=list(found),
        )

    def yield_to_others(self) -> None:
        """A call that takes long gets less of a busy processor than the sidecar. One that does not is not held up."""
        try:
            os.setpriority(os.PRIO_PGRP, self._init, NICENESS)
        except OSError:
            pass  # it has ended

    def kill_others(self, kept: int, attempts: int = 50) -> bool:
        """Kills all processes of the call but one. False if they multiply faster than that."""
        for _ in range(attempts):
            others = [pid for pid in self._pids() if pid != kept and _runs(pid)]
            if not others:
                return True
            for pid in others:
                kill(pid)
            time.sleep(0.002)
        return False

    def _pids(self) -> list[int]:
        pids = all_pids()
        if self._ours is not None:
            return [pid for pid in pids if pid not in self._ours]
        return descendants(os.getpid(), pids, leave_out=self._init)


def all_pids() -> list[int]:
    """Every process that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int, pids: list[int], leave_out: int = 0) -> list[int]:
    """Those of the pids that come from `root`, by their parents."""
    children: dict[int, list[int]] = {}
    for pid in pids:
        process = _read(pid)
        if process is not None:
            children.setdefault(process.parent, []).append(pid)
    found, ahead = [], [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return [pid for pid in found if pid != leave_out]


def exact_memory_bytes(pids: list[int], otherwise: int) -> int:
    """Memory that files do not back, with pages that processes share counted once; dear, so only asked in doubt."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                sizes = {
                    line.split()[0]: line.split()[1] for line in file if line.startswith("Pss")
                }
        except ProcessLookupError:
            continue
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/stat"):
                return otherwise  # a kernel without the file
            continue
        except OSError:
            return otherwise  # it made itself unreadable
        if "Pss_Anon:" in sizes:
            total += 1024 * (int(sizes["Pss_Anon:"]) + int(sizes["Pss_Shmem:"]))
        else:
            total += 1024 * int(sizes.get("Pss:", 0))
    return total


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _runs(pid: int) -> bool:
    """It is there, and not only for its parent to ask how it ended."""
    process = _read(pid)
    return process is not None and process.state not in (b"Z", b"X")


def _read(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Process(
        state=fields[0],
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        waited_cpu_s=(int(fields[13]) + int(fields[14])) / _TICKS,
        tasks=int(fields[17]),
        resident_bytes=int(fields[21]) * _PAGE,
    )
