"""Work on many tensors at once. Hashing, compressing and NumPy leave Python to other threads meanwhile."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Result = TypeVar("Result")

WORKERS = min(8, os.cpu_count() or 1)


SWITCH_S = 0.0005
"""How long a thread may have Python while another waits, within `brisk`. Python's default is ten times that."""

_lock = threading.Lock()
_brisk, _usual_s = 0, 0.0


@contextmanager
def brisk() -> Iterator[None]:
    """For work that asks for Python often and briefly, beside an event loop that computes in it: otherwise it would
    wait for most of its time. Of the whole process; blocks may overlap."""
    global _brisk, _usual_s
    with _lock:
        if not _brisk:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, _usual_s))
        _brisk += 1
    try:
        yield
    finally:
        with _lock:
            _brisk -= 1
            if not _brisk:
                sys.setswitchinterval(_usual_s)


def workers() -> ThreadPoolExecutor:
    """A pool to leave when the work is done."""
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="weights")


def in_threads(function: Callable[[T], Result], items: Iterable[T]) -> list[Result]:
    """The function of every item. All have ended when this returns, or raises what the first that failed raised."""
    with workers() as pool:
        futures = [pool.submit(function, item) for item in items]
    return [future.result() for future in futures]
