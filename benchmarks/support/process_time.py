"""Where the time of this process goes: CPU seconds by thread and child, garbage collections, samples of the stack."""

import gc
import multiprocessing
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

SAMPLE_S = 0.001


@dataclass(kw_only=True)
class Usage:
    """Seconds, of a stretch of time."""

    process: float = 0.0
    """CPU time of this process, all threads."""
    main_thread: float = 0.0
    """Of the thread of the event loop."""
    garbage: float = 0.0
    """In collections, whatever thread they were in. Part of the above."""
    children: float = 0.0
    """CPU time of this process's children by multiprocessing: SGLang's schedulers."""

    def __sub__(self, other: "Usage") -> "Usage":
        names = [each.name for each in fields(self)]
        return Usage(**{name: getattr(self, name) - getattr(other, name) for name in names})


class UsageMeter:
    """`read` is what was used so far. Made and read in the event loop's thread."""

    def __init__(self):
        self._garbage = self._begun = 0.0
        gc.callbacks.append(self._collected)

    def read(self) -> Usage:
        """Since some moment in the past."""
        return Usage(
            process=time.process_time(),
            main_thread=time.thread_time(),
            garbage=self._garbage,
            children=sum(_cpu_s(child.pid) for child in multiprocessing.active_children()),
        )

    def _collected(self, phase: str, _: dict) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._begun = now
        else:
            self._garbage += now - self._begun


def _cpu_s(pid: int | None) -> float:
    """CPU time of a process, as Linux counts it; 0 where nobody says."""
    try:
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


class Sampler:
    """Looks where the event loop's thread is each time that the process has used a millisecond of CPU time.

    A sample belongs to the innermost frame whose file is in one of the packages that are asked for. What C code takes
    counts for the Python line after it.
    """

    def __init__(self, packages: tuple[str, ...]):
        self.samples: Counter[str] = Counter()
        self._packages = packages

    def __enter__(self) -> "Sampler":
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def table(self, turns: int, cpu_s: float, rows: int = 40) -> str:
        """Microseconds a turn by part, the largest first, of so many CPU seconds in all."""
        each_us = 1e6 * cpu_s / turns / max(1, self.samples.total())
        lines = [
            f"{n * each_us:8.1f} us a turn  {name}" for name, n in self.samples.most_common(rows)
        ]
        return "\n".join(lines)

    def _look(self, _: int, frame: FrameType | None) -> None:
        innermost = frame
        while frame is not None:
            path = frame.f_code.co_filename
            for package in self._packages:
                if f"/{package}/" in path:
                    name = f"{package}{path.rpartition(f'/{package}')[2]}:{frame.f_code.co_name}"
                    self.samples[name] += 1
                    return
            frame = frame.f_back
        if innermost is not None:
            code = innermost.f_code
            self.samples[f"{Path(code.co_filename).name}:{code.co_name}"] += 1
