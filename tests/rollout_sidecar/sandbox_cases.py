"""What the tests of the Python sandbox share: a sandbox that skips where bubblewrap cannot run, and a look at /proc."""

import functools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_sidecar.tools.python_sandbox import PythonSandbox, SandboxOptions


@functools.cache
def why_no_sandbox() -> str:
    """What keeps bubblewrap itself from working here, in its own words; "" if nothing does."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    probe = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/"]
    identity = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    done = subprocess.run(
        [*probe, "--proc", "/proc", "true"],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
        **identity,
    )
    return done.stderr.strip() if done.returncode else ""


def needs_bubblewrap() -> None:
    """Skips the test where there can be no sandbox."""
    if problem := why_no_sandbox():
        pytest.skip(problem)


@asynccontextmanager
async def open_sandbox(**options) -> AsyncIterator[PythonSandbox]:
    """One that is started, with one worker unless told otherwise."""
    needs_bubblewrap()
    box = PythonSandbox(SandboxOptions(**{"workers": 1, **options}))
    await box.start()
    try:
        yield box
    finally:
        await box.close()


def processes_below(root: int) -> dict[int, str]:
    """The descendants of a process, and their commands."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except (OSError, IndexError):
            continue
    found: dict[int, str] = {}
    ahead = [root]
    while ahead:
        parent = ahead.pop()
        for pid, its_parent in parents.items():
            if its_parent == parent:
                found[pid] = command_of(pid)
                ahead.append(pid)
    return found


def command_of(pid: int) -> str:
    """The arguments of a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """A process that is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
