"""From a process with the zygote's rights to one that can do nothing but compute: view of files, limits, rights.

The order matters: mounting needs the capabilities, the limits and the filter must be there before the first line of
the program runs, and every one of them is inherited by whatever it starts.
"""

import os
import resource
from typing import Any

from rollout_sidecar.tools.python_sandbox.inside import syscall_filter, syscalls

CAP_SETPCAP, CAP_SYS_ADMIN = 8, 21
OTHER_PROCESSES = 4
"""Those of a worker that count against its RLIMIT_NPROC beside the program's: bubblewrap, zygote, supervisor, init."""

_STACK_BYTES = 8 << 20
_SCRATCH = "/run/scratch"


def confine(config: dict[str, Any]) -> None:
    """Runs in init, which is process 1 of its own process namespace where `isolated`."""
    os.setsid()  # no signal to the process group may reach the other side of the wall
    _first_to_go_when_memory_is_short()
    base_bytes = _virtual_memory_bytes()
    if config["isolated"]:
        syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC)
        _mount(config["disk_bytes"])
        syscalls.drop_capabilities([CAP_SETPCAP, CAP_SYS_ADMIN])
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    _limit(config, base_bytes)
    syscall_filter.install()


def _mount(disk_bytes: int) -> None:
    """Fresh, empty /sandbox, /tmp and /dev/shm that share one size, and a /proc of this process namespace."""
    quiet = syscalls.MS_NOSUID | syscalls.MS_NODEV
    # Files of no bytes cost kernel memory too.
    size = f"size={disk_bytes},nr_inodes={max(1024, disk_bytes >> 13)},mode=0755"
    syscalls.mount("tmpfs", _SCRATCH, "tmpfs", quiet, size)
    for name, target in (("work", "/sandbox"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"{_SCRATCH}/{name}", 0o755)
        syscalls.mount(f"{_SCRATCH}/{name}", target, "", syscalls.MS_BIND)
    # _SCRATCH stays mounted: to undo a mount takes milliseconds, and it shows nothing else.
    quiet |= syscalls.MS_NOEXEC
    for data in ("subset=pid", ""):  # the first from Linux 5.8: nothing but processes
        try:
            return syscalls.mount("proc", "/proc", "proc", quiet, data)
        except OSError:
            continue
    syscalls.mount("tmpfs", "/proc", "tmpfs", quiet | syscalls.MS_RDONLY, "size=4k")


def _limit(config: dict[str, Any], base_bytes: int) -> None:
    limits = {
        "RLIMIT_AS": base_bytes + config["memory_bytes"],
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": config["disk_bytes"],
        "RLIMIT_NOFILE": config["max_files"],
        "RLIMIT_STACK": _STACK_BYTES,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
        "RLIMIT_RTPRIO": 0,
        "RLIMIT_NICE": 0,
    }
    if config["isolated"]:  # elsewhere it would count everything else that runs as this user
        limits["RLIMIT_NPROC"] = config["max_processes"] + OTHER_PROCESSES
    for name, value in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def _first_to_go_when_memory_is_short() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _virtual_memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
