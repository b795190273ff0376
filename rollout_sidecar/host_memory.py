"""How much memory this process may still take, where the system tells; and giving back what it has freed."""

import ctypes
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """What the machine and this process's control group (version 2) have left; None where nobody says."""
    known = [size for size in (_of_machine(), _of_group()) if size is not None]
    return min(known, default=None)


def give_back() -> None:
    """Freed memory goes back to the system. Where the C library is not glibc, it does nothing.

    glibc keeps freed blocks of up to 32 MB in an arena of each thread, and finds ever new places for the next ones:
    pushes of a large model would make a process grow for hundreds of them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _of_machine() -> int | None:
    kibibytes = _fields(MEMINFO).get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _of_group() -> int | None:
    folder = GROUPS / _own_group()
    limit, used = (_number(folder / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    # Files that were read are counted as used, and given up when memory is wanted.
    return limit - used + _fields(folder / "memory.stat").get("inactive_file", 0)


def _own_group() -> str:
    lines = _read(OWN_GROUP).splitlines()
    return next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = [line.split()[:2] for line in _read(file).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
