"""Runs as root, before the walls are up: shows nobody the interpreter's folders where a folder above them, such as
/root, is closed to others. Only in a mount namespace of this command; then it becomes nobody and goes on."""

import json
import os
import sys

from rollout_sidecar.tools.python_sandbox.inside import syscalls


def main(request: str) -> None:
    """Covers the closed folders, binds what is needed below them, and runs the command."""
    closed, needed, user, command = json.loads(request)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    # Opened before they are covered: a descriptor leads there all the same.
    opened = [(path, os.open(path, os.O_PATH)) for path in needed]
    for path in closed:
        syscalls.mount("tmpfs", path, "tmpfs", 0, "size=64k,mode=0755")
    for path, fd in opened:
        source = f"/proc/self/fd/{fd}"
        if os.path.isdir(source):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o444))
        syscalls.mount(source, path, "", syscalls.MS_BIND | syscalls.MS_REC)
        os.close(fd)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error}")
