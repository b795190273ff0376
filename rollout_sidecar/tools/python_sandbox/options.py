"""What a sandbox allows, and how many there are."""

import os
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

MIN_MEMORY_MB = 16
"""Below, lists of some ten thousand numbers and imports of larger modules fail: nobody wants that."""


@dataclass(frozen=True, kw_only=True)
class SandboxOptions:
    """The settings of a pool; those of one call are the first group. Equal options share a pool (`shared_sandbox`)."""

    wall_s: float = 10.0
    """How long a call may take, by the clock."""
    cpu_s: float = 10.0
    """How much processor time a call may use, all its processes and threads together."""
    memory_mb: int = 512
    """Beyond what an idle interpreter takes: of each process exactly (its allocations fail), and of all of a call
    together as often as it is looked at (the call is ended)."""
    max_processes: int = 32
    """Processes and threads of a call."""
    max_files: int = 128
    """Open files and sockets of a process."""
    disk_mb: int = 64
    """/sandbox, /tmp and /dev/shm together; they are memory too, and empty when a call or a session begins."""
    output_bytes: int = 65536
    """What is kept of each of stdout and stderr: half from the beginning, half from the end."""
    last_value: bool = False
    """Prints the value of a last line that is an expression, as notebooks do."""

    workers: int = 0
    """Kept warm; so many calls run at once without a wait. 0 is twice the processors, from 4 to 16."""
    max_workers: int = 256
    """Where the pool stops to grow when calls wait and sessions hold their workers: each trajectory of a stateful tool
    holds one from its first call on."""
    python: str = ""
    """The interpreter, for example of a virtual environment with packages for the policy. Its folders are readable in
    the sandbox. "" is /usr/bin/python3 or, without a recent one, the interpreter that this one's environment is
    made of."""
    preload: tuple[str, ...] = ()
    """Modules that every call finds imported, such as numpy: that costs nothing per call."""
    read_only_paths: tuple[str, ...] = ()
    """Further files and folders that the program may read, under the same path."""
    unsafe_without_isolation: bool = False
    """Runs without bubblewrap: the program can then read and change all that the sidecar's user can, and use the
    network. Limits hold as far as they do not need isolation."""

    def __post_init__(self):
        for name in ("wall_s", "cpu_s"):
            if not 0 < getattr(self, name) <= 86400:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is no limit: give seconds, above 0 and up to 86400"
                )
        if self.memory_mb < MIN_MEMORY_MB:
            raise ValueError(
                f"memory_mb={self.memory_mb!r} must be at least {MIN_MEMORY_MB}: with less, ordinary programs fail"
            )
        for name in ("max_processes", "disk_mb", "output_bytes", "max_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.max_files < 16:
            raise ValueError(f"max_files={self.max_files!r} must be at least 16 to import anything")
        if self.workers < 0 or self.workers > self.max_workers:
            raise ValueError(
                f"workers={self.workers!r} must be between 0 and max_workers={self.max_workers!r}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SandboxOptions":
        """From the keys of a tool's config. None means absent. ValueError names an unknown key or a wrong type."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in config.items():
            if key not in known:
                close = get_close_matches(key, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
                raise ValueError(f"unknown key {key!r} in the config of a Python sandbox; {hint}")
            if value is not None:
                values[key] = _typed(key, value, known[key].default)
        return cls(**values)

    def workers_at_start(self) -> int:
        """The number that 0 stands for, where it does."""
        automatic = min(16, max(4, 2 * (os.cpu_count() or 1)))
        return self.workers or min(automatic, self.max_workers)


def _typed(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise ValueError(f"{key} must be a list of strings, got {value!r}")
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        raise ValueError(f"{key} must be of type {type(default).__name__}, got {value!r}")
    return value
