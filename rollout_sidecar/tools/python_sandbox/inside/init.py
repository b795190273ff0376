"""Process 1 of the program's process namespace: confines itself, starts the program, buries orphans.

It has no more rights than the program, and knows nothing worth having. When the program ends it says so and ends too,
and the kernel ends everything else in the namespace.
"""

import fcntl
import os
import signal
import struct
from typing import Any, NoReturn

from rollout_sidecar.tools.python_sandbox.inside import confine, program, syscalls

READY = b"+"
_STATUS = struct.Struct("!i")


def run(
    config: dict[str, Any], requests: int, out: int, err: int, notes: int, life: int
) -> NoReturn:
    """Says READY on `life`, or why not; then the program's wait status."""
    try:
        if not config["isolated"]:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        requests, out, err, notes, life = _move_up((requests, out, err, notes, life))
        confine.confine(config)
        os.chdir(config["work_folder"])
        child = os.fork()
        if child == 0:
            null = os.open("/dev/null", os.O_RDWR)
            _keep(null, out, err, requests, notes)
            program.serve(3, 4, last_value=config["last_value"])
        # Ours are not for the program to read or trace.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        null = os.open("/dev/null", os.O_RDWR)
        _keep(null, null, null, life)
        os.write(3, READY)
        _bury_until(child)
    except BaseException as error:
        os.write(life, f"!{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def exit_code(life: int) -> int | None:
    """The program's exit code, negative for a signal; None if init was ended first."""
    data = os.read(life, _STATUS.size)
    if len(data) < _STATUS.size:
        return None
    return os.waitstatus_to_exitcode(_STATUS.unpack(data)[0])


def _bury_until(child: int) -> NoReturn:
    while True:
        pid, status = os.wait()
        if pid == child:
            os.write(3, _STATUS.pack(status))
            os._exit(0)


def _move_up(fds: tuple[int, ...]) -> tuple[int, ...]:
    """The same files under numbers that _keep does not use."""
    return tuple(_duplicate(fd, 16) for fd in fds)


def _keep(*fds: int) -> None:
    """These become 0, 1, 2...; all others are closed."""
    high = [_duplicate(fd, 16) for fd in fds]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    os.closerange(len(fds), 1024)


def _duplicate(fd: int, at_least: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD, at_least)
