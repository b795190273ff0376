"""The command that starts a worker: bubblewrap's walls, or none where the options say so."""

import fcntl
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rollout_sidecar.tools.python_sandbox.errors import SandboxUnavailableError
from rollout_sidecar.tools.python_sandbox.interpreter import (
    Interpreter,
    check_folders,
    find_interpreter,
)
from rollout_sidecar.tools.python_sandbox.options import SandboxOptions

INSTALL = "apt-get install -y bubblewrap (or your system's package of that name)"
NOBODY = 65534

_PACKAGE = "rollout_sidecar.tools.python_sandbox.inside"
_MAIN = f"""import sys
if sys.argv[1:]:
    from {_PACKAGE} import reach
    reach.main(sys.argv[1])
else:
    from {_PACKAGE} import zygote
    zygote.main()
"""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_UBUNTU_SWITCH = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launcher:
    """How to start a worker."""

    walls: tuple[str, ...]
    """bubblewrap's command up to the interpreter's; empty without isolation."""
    python: str
    environment: dict[str, str]
    """Of the command itself. Behind the walls there is another."""
    closed: tuple[str, ...] = ()
    """Folders that nobody may not pass, though there are `needed` ones below them."""
    needed: tuple[str, ...] = ()

    @property
    def isolated(self) -> bool:
        """There are walls."""
        return bool(self.walls)

    def start(self, bundle: int, stdin: int, stderr: int) -> subprocess.Popen:
        """Starts a worker in the calling thread, with which it dies. OSError if the command cannot be run."""
        bundle_path = f"/proc/self/fd/{bundle}"
        argv = [*self.walls, self.python, "-s", bundle_path]
        identity = {}
        # Root is exempt from limits on processes, inside a user namespace too.
        if self.isolated and os.geteuid() == 0:
            setpriv = shutil.which("setpriv")
            if self.closed:
                request = json.dumps([self.closed, self.needed, NOBODY, argv])
                argv = [sys.executable, "-s", "-S", bundle_path, request]
            elif setpriv:  # without a fork of this whole process, which may be large
                who = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
                argv = [setpriv, *who, "--", *argv]
            else:
                identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(bundle,),
            cwd="/",
            env=self.environment,
            start_new_session=True,
            **identity,
        )


def make_launcher(options: SandboxOptions) -> Launcher:
    """For these options on this machine. SandboxUnavailableError names what is missing."""
    if sys.platform != "linux":
        raise SandboxUnavailableError(
            f"the Python sandbox needs Linux, this is {sys.platform} (use a Sandbox Fusion server)"
        )
    if options.unsafe_without_isolation:
        _log.warning(
            "unsafe_without_isolation is set: code that the policy writes runs as uid %d WITHOUT isolation. It can "
            "read and change this user's files and use the network. Never use it with a policy you do not trust.",
            os.geteuid(),
        )
        interpreter = find_interpreter(options.python)
        return Launcher((), interpreter.path, _environment(interpreter, "/tmp"))
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailableError(
            f"the Python sandbox needs bubblewrap, and there is no bwrap on the PATH: {INSTALL}. "
            "To run the policy's code without isolation, set unsafe_without_isolation: true"
        )
    interpreter = find_interpreter(options.python)
    usage = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False).stdout
    if "--disable-userns" not in usage:
        raise SandboxUnavailableError(
            f"{bwrap} is too old: the Python sandbox needs its option --disable-userns (bubblewrap 0.8 or later)"
        )
    folders = (*interpreter.folders, *options.read_only_paths)
    check_folders(options.read_only_paths)
    closed, needed = _closed_to_others(folders) if os.geteuid() == 0 else ((), ())
    walls = (bwrap, *_walls(interpreter, folders))
    return Launcher(walls, interpreter.path, {}, closed, needed)


def hint() -> str:
    """What commonly keeps bubblewrap from working, if it is the case here."""
    try:
        with open(_UBUNTU_SWITCH) as file:
            restricted = file.read().strip() == "1"
    except OSError:
        restricted = False
    if restricted:
        return (
            " AppArmor forbids unprivileged user namespaces here: give bwrap a profile that allows them, or "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`."
        )
    return " In a container, start it with the rights to make namespaces and to mount proc (for example --privileged)."


def make_bundle() -> int:
    """An open, unchangeable file: a zip of `inside` that Python can run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        parts = _PACKAGE.split(".")
        for depth in range(1, len(parts)):
            bundle.writestr("/".join([*parts[:depth], "__init__.py"]), "")
        for file in resources.files(_PACKAGE).iterdir():
            if file.name.endswith(".py"):
                bundle.writestr("/".join([*parts, file.name]), file.read_bytes())
        bundle.writestr("__main__.py", _MAIN)
    fd = os.memfd_create("python_sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(buffer.getvalue())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def _closed_to_others(folders: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders above these that others may not pass, and those of these that lie below."""
    closed: list[str] = []
    needed: list[str] = []
    for folder in map(Path, folders):
        if not folder.exists():
            raise SandboxUnavailableError(f"read_only_paths of the Python sandbox: no {folder}")
        wanted = 0o005 if folder.is_dir() else 0o004
        if folder.stat().st_mode & wanted != wanted:
            raise SandboxUnavailableError(
                f"the Python sandbox runs as nobody, who may not read {folder}: chmod -R o+rX {folder}"
            )
        above = [str(path) for path in reversed(folder.parents) if not path.stat().st_mode & 0o001]
        if above:
            closed.append(above[0])
            needed.append(str(folder))
    return tuple(dict.fromkeys(closed)), tuple(needed)


def _walls(interpreter: Interpreter, folders: tuple[str, ...]) -> list[str]:
    argv = ["--die-with-parent", "--new-session", "--clearenv"]
    argv += ["--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net"]
    argv += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    argv += ["--uid", "1000", "--gid", "1000"]
    # For the zygote's side of the wall, within its user namespace; a program has none (inside/confine.py).
    argv += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    for name, value in _environment(interpreter, "/sandbox").items():
        argv += ["--setenv", name, value]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            argv += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        else:
            argv += ["--ro-bind-try", f"/{name}", f"/{name}"]
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/nix/store"):
        argv += ["--ro-bind-try", path, path]
    for name in _DEVICES:
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for target, link in (("/proc/self/fd", "/dev/fd"), *interpreter.links):
        argv += ["--symlink", target, link]
    argv += ["--proc", "/proc"]
    for folder in folders:
        argv += ["--ro-bind", folder, folder]
    for folder in ("/sandbox", "/tmp", "/dev/shm", "/run/scratch"):
        argv += ["--dir", folder]
    return [*argv, "--remount-ro", "/", "--chdir", "/sandbox", "--"]


def _environment(interpreter: Interpreter, home: str) -> dict[str, str]:
    """Nothing of the sidecar's own."""
    return {
        "PATH": f"{os.path.dirname(interpreter.path)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same code prints the same order of a set in every worker
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "Agg",
        # A library that starts a thread for each processor, or an arena for each thread, would be out of its limits.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
