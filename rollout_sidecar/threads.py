"""Work on many tensors at once. Hashing, compressing and NumPy leave Python to other threads meanwhile."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
Result = TypeVar("Result")

WORKERS = min(8, os.cpu_count() or 1)


def workers() -> ThreadPoolExecutor:
    """A pool to leave when the work is done."""
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="weights")


def in_threads(function: Callable[[T], Result], items: Iterable[T]) -> list[Result]:
    """The function of every item. All have ended when this returns, or raises what the first that failed raised."""
    with workers() as pool:
        futures = [pool.submit(function, item) for item in items]
    return [future.result() for future in futures]
