"""Which Python runs in the sandbox, and the folders it needs to be seen there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rollout_sidecar.tools.python_sandbox.errors import SandboxUnavailableError

SYSTEM_PYTHON = "/usr/bin/python3"
OLDEST = (3, 10)
"""For the syntax of `inside`."""

COVERED = ("/sandbox", "/tmp", "/proc", "/dev", "/run/scratch")

_REPORT = """
import json, os, sys
print(json.dumps([sys.executable, list(sys.version_info[:2]), [sys.prefix, sys.base_prefix, sys.exec_prefix,
    os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))]]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python: the command, the folders outside /usr that it is made of, and links on the way to it."""

    path: str
    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    """(target, link)."""


def find_interpreter(wanted: str) -> Interpreter:
    """The one that was asked for; else the system's or, without a recent one, what this process's environment was
    made of. SandboxUnavailableError says what is wrong with it."""
    if wanted:
        return _examine(wanted)
    if os.path.exists(SYSTEM_PYTHON):
        try:
            return _examine(SYSTEM_PYTHON)
        except SandboxUnavailableError:
            pass  # too old, or broken
    return _examine(getattr(sys, "_base_executable", None) or sys.executable)


def _examine(command: str) -> Interpreter:
    try:
        done = subprocess.run(
            [command, "-I", "-c", _REPORT], capture_output=True, text=True, timeout=30, check=True
        )
        path, version, prefixes = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(
            f"python={command!r} of the Python sandbox does not run: {error}"
        ) from error
    if tuple(version) < OLDEST:
        raise SandboxUnavailableError(
            f"python={command!r} is Python {version[0]}.{version[1]}; the sandbox needs "
            f"{OLDEST[0]}.{OLDEST[1]} or later (set `python` to another interpreter)"
        )
    folders = _outermost({os.path.realpath(prefix) for prefix in prefixes} | set(prefixes))
    check_folders(folders)
    for folder in folders:
        if Path.home().is_relative_to(folder):
            raise SandboxUnavailableError(
                f"python={command!r} lives in {folder}, which holds the home folder: that cannot be shown "
                "to the sandbox (set `python` to an interpreter in a folder of its own)"
            )
    return Interpreter(path, folders, _links(path, folders))


def check_folders(paths: Iterable[str]) -> None:
    """SandboxUnavailableError for a path that the program's own folders would cover."""
    for path in paths:
        for covered in COVERED:
            if Path(path).is_relative_to(covered) or Path(covered).is_relative_to(path):
                raise SandboxUnavailableError(
                    f"{path} cannot be shown to the Python sandbox, which has its own {covered}; move it"
                )


def _outermost(folders: set[str]) -> tuple[str, ...]:
    """Without /usr, which every sandbox sees, and without folders in other folders."""
    outer = [
        folder
        for folder in folders
        if not any(
            folder != other and Path(folder).is_relative_to(other) for other in {*folders, "/usr"}
        )
    ]
    return tuple(sorted(folder for folder in outer if folder != "/usr"))


def _links(path: str, folders: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Symbolic links that lead to the interpreter from outside the folders, as uv makes them."""
    found = []
    while os.path.islink(path) and len(found) < 16:
        target = os.readlink(path)
        if not any(Path(path).is_relative_to(folder) for folder in (*folders, "/usr")):
            found.append((target, path))
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return tuple(found)
