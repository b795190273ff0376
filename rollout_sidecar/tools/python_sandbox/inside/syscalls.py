"""The system calls that Python's os module lacks, through libc. All raise OSError with the call's name."""

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    _check(
        _libc.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
        ),
        f"mount {kind or source} on {target}",
    )


def prctl(option: int, first: int = 0, second: int | bytes = 0) -> None:
    """prctl(2)."""
    last = second if isinstance(second, bytes) else ctypes.c_ulong(second)
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(first), last, zero, zero), f"prctl {option}")


def drop_capabilities(held: list[int]) -> None:
    """Gives up every capability for good; `held` are those still in the bounding set."""
    for capability in held:
        prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_CAP_AMBIENT, 4)
    version_3 = 0x20080522
    _check(_libc.capset(struct.pack("=Ii", version_3, 0), bytes(24)), "capset")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
