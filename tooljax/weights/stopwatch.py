"""Where the time of a push goes."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Stopwatch:
    """Seconds by stage, added up over the threads that worked on it."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the block's time."""
        begun = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] += perf_counter() - begun
