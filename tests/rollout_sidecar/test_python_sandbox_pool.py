"""Many calls at once, calls that are given up, sidecars that are killed, machines that cannot make a sandbox."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_cases import (
    is_alive,
    needs_bubblewrap,
    open_sandbox,
    processes_below,
)

from rollout_sidecar.tools.python_sandbox import (
    PythonSandbox,
    SandboxOptions,
    SandboxUnavailableError,
    launch,
    shared_sandbox,
)


async def until(condition, timeout_s: float = 10.0) -> None:
    """Waits for something that takes a moment."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, processes_below(os.getpid())
        await asyncio.sleep(0.01)


# --- many -------------------------------------------------------------------------------------------------------


async def test_sixty_four_at_once_are_each_answered_for_themselves():
    async with open_sandbox(workers=4) as box:
        results = await asyncio.gather(*(box.run(f"print({i} ** 2)") for i in range(64)))
    assert [result.stdout for result in results] == [f"{i**2}\n" for i in range(64)]
    # The wait is not run time.
    assert max(result.queue_s for result in results) > max(result.run_s for result in results)


async def test_calls_that_run_into_their_limits_do_not_hold_up_the_others():
    async with open_sandbox(workers=2, max_workers=6) as box:
        slow = [asyncio.create_task(box.run("import time; time.sleep(3)")) for _ in range(4)]
        await asyncio.sleep(0.1)
        assert (await box.run("print(1)")).stdout == "1\n"
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_the_pool_grows_for_sessions_that_hold_their_workers():
    async with open_sandbox(workers=1, max_workers=12) as box:
        started = time.monotonic()
        await asyncio.gather(*(box.run("x = 1", session=f"s{i}") for i in range(12)))
        assert box.live == 12
        assert time.monotonic() - started < 10
        for i in range(12):
            await box.end_session(f"s{i}")
        assert box.live == 0


async def test_workers_are_no_more_than_allowed():
    async with open_sandbox(workers=1, max_workers=2) as box:
        started = time.monotonic()
        await asyncio.gather(*(box.run("import time; time.sleep(0.3)") for _ in range(6)))
        assert time.monotonic() - started >= 0.9  # three rounds of two
        sandboxes = [cmd for cmd in processes_below(os.getpid()).values() if "--die-with" in cmd]
        assert len(sandboxes) <= 2 * 2  # bubblewrap has two processes


async def test_calls_of_one_session_run_one_after_the_other():
    async with open_sandbox(workers=2) as box:
        await box.run("log = []", session="a")
        calls = [
            f"log.append({i}); import time; time.sleep(0.02); log.append({i})" for i in range(3)
        ]
        await asyncio.gather(*(box.run(code, session="a") for code in calls))
        log = (await box.run("print(*log)", session="a")).stdout.split()
        assert log[0::2] == log[1::2]
        await box.end_session("a")


# --- given up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [True, False])
async def test_no_sandbox_is_left_of_64_that_were_given_up(session):
    """Pain point 16."""
    async with open_sandbox(workers=2, max_workers=8, wall_s=60.0) as box:
        names = [f"s{i}" if session else "" for i in range(64)]
        calls = [asyncio.create_task(box.run("while True: pass", session=name)) for name in names]
        await until(lambda: box.live == 8)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for name in filter(None, names):
            await box.end_session(name)
        assert box.live == 0
        # What was in the calls is dead; new workers, at rest, are on their way.
        assert (await box.run("print('well')")).stdout == "well\n"
    await until(lambda: not processes_below(os.getpid()))


async def test_a_session_that_is_ended_during_a_call():
    async with open_sandbox(wall_s=60.0) as box:
        call = asyncio.create_task(box.run("while True: pass", session="a"))
        await until(lambda: box.live == 1)
        await asyncio.sleep(0.1)
        await box.end_session("a")
        assert (await call).status == "lost"
        assert box.live == 0
        assert (await box.run("print(1)")).stdout == "1\n"


async def test_closing_ends_what_runs():
    async with open_sandbox(wall_s=60.0) as box:
        calls = [asyncio.create_task(box.run("while True: pass", session=s)) for s in ("", "a", "")]
        await until(lambda: box.live == 1)
        await asyncio.sleep(0.1)
        await box.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        assert (
            isinstance(result, SandboxUnavailableError) or getattr(result, "status", "") == "lost"
        )
    await until(lambda: not processes_below(os.getpid()))


async def test_a_worker_that_dies_costs_one_call():
    async with open_sandbox(wall_s=60.0) as box:
        call = asyncio.create_task(box.run("while True: pass"))
        await until(lambda: box.live == 1)
        for pid in processes_below(os.getpid()):
            with suppress(ProcessLookupError):  # they take each other along
                os.kill(pid, signal.SIGKILL)
        result = await call
        assert result.status == "lost"
        assert result.reason.startswith("The sandbox was lost: ")
        assert (await box.run("print(1)")).stdout == "1\n"


async def test_a_worker_that_dies_at_rest_costs_none():
    async with open_sandbox(workers=2) as box:
        for pid in processes_below(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert (await box.run("print(1)")).stdout == "1\n"


KILLED = """
import asyncio, sys
from rollout_sidecar.tools.python_sandbox import PythonSandbox, SandboxOptions
async def main():
    box = PythonSandbox(SandboxOptions(workers=2, wall_s=60.0, unsafe_without_isolation=bool(sys.argv[1:])))
    await box.start()
    code = "import os\\nif os.fork() == 0: os.setsid()\\nwhile True: pass"
    calls = [asyncio.create_task(box.run(code)) for _ in range(2)]
    await asyncio.sleep(0.3)
    print("running", flush=True)
    await asyncio.gather(*calls)
asyncio.run(main())
"""


@pytest.mark.parametrize("arguments", [[], ["unsafe"]])
async def test_a_sidecar_that_is_killed_takes_its_sandboxes_with_it(arguments):
    needs_bubblewrap()
    root = Path(__file__).parents[2]
    sidecar = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    with sidecar:
        assert sidecar.stdout is not None
        assert sidecar.stdout.readline() == b"running\n"
        below = processes_below(sidecar.pid)
        assert len(below) >= 8
        sidecar.kill()
    await until(lambda: not any(map(is_alive, below)))


# --- shared -----------------------------------------------------------------------------------------------------


async def test_equal_options_share_a_sandbox_until_the_last_user_closes_it():
    needs_bubblewrap()
    options = SandboxOptions(workers=1, wall_s=7.0)
    box = shared_sandbox(options)
    assert shared_sandbox(SandboxOptions(workers=1, wall_s=7.0)) is box
    assert shared_sandbox(SandboxOptions(workers=1, wall_s=8.0)) is not box
    await asyncio.gather(box.start(), box.start())
    await box.close()
    assert processes_below(os.getpid())
    assert (await box.run("print(1)")).stdout == "1\n"
    await box.close()
    await until(lambda: not processes_below(os.getpid()))


def test_a_sandbox_outlives_an_event_loop():
    needs_bubblewrap()
    box = PythonSandbox(SandboxOptions(workers=1))
    assert asyncio.run(box.run("print(1)")).stdout == "1\n"

    async def again():
        result = await box.run("print(2)")
        await box.close()
        return result

    assert asyncio.run(again()).stdout == "2\n"
    assert not processes_below(os.getpid())


# --- machines ---------------------------------------------------------------------------------------------------


async def test_without_bubblewrap_it_refuses_and_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    box = PythonSandbox(SandboxOptions())
    with pytest.raises(SandboxUnavailableError, match="apt-get install -y bubblewrap") as refusal:
        await box.start()
    assert "unsafe_without_isolation: true" in str(refusal.value)
    with pytest.raises(SandboxUnavailableError, match="no bwrap on the PATH"):
        await box.run("print(1)")
    await box.close()


def fake_bwrap(folder: Path, monkeypatch, usage: str) -> None:
    """A bubblewrap that is there, and cannot do it."""
    command = folder / "bwrap"
    command.write_text(
        f'#!/bin/sh\n[ "$1" = --help ] && echo "{usage}" && exit\necho "bwrap: no permissions" >&2\nexit 1\n'
    )
    command.chmod(0o755)
    folder.chmod(0o755)
    setpriv = shutil.which("setpriv")
    if setpriv:
        (folder / "setpriv").symlink_to(setpriv)
    monkeypatch.setenv("PATH", str(folder))


async def test_a_bubblewrap_that_cannot_is_quoted(monkeypatch, tmp_path):
    fake_bwrap(tmp_path, monkeypatch, "--disable-userns")
    if os.geteuid() == 0:  # nobody may not run what lies in a folder of pytest's
        monkeypatch.setattr(launch, "NOBODY", 0)
    message = "bubblewrap could not make a sandbox here: bwrap: no permissions"
    with pytest.raises(SandboxUnavailableError, match=message):
        await PythonSandbox(SandboxOptions()).start()


async def test_an_old_bubblewrap_is_named(monkeypatch, tmp_path):
    fake_bwrap(tmp_path, monkeypatch, "--unshare-all")
    with pytest.raises(SandboxUnavailableError, match=r"too old: .* \(bubblewrap 0.8 or later\)"):
        await PythonSandbox(SandboxOptions()).start()


async def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="needs Linux, this is darwin"):
        await PythonSandbox(SandboxOptions(unsafe_without_isolation=True)).start()


async def test_a_python_that_does_not_run_is_named():
    needs_bubblewrap()
    message = "python='/no/such/python' of the Python sandbox does not run: .*No such file"
    with pytest.raises(SandboxUnavailableError, match=message):
        await PythonSandbox(SandboxOptions(python="/no/such/python")).start()


async def test_a_module_that_cannot_be_loaded_is_named():
    needs_bubblewrap()
    message = (
        r"^the Python sandbox cannot preload no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
        r" \(see its options preload and python\)$"
    )
    with pytest.raises(SandboxUnavailableError, match=message):
        await PythonSandbox(SandboxOptions(preload=("no_such_module",))).start()


async def test_folders_that_the_sandbox_has_itself_cannot_be_shown(tmp_path):
    needs_bubblewrap()
    box = PythonSandbox(SandboxOptions(read_only_paths=("/tmp/x",)))
    with pytest.raises(SandboxUnavailableError, match="/tmp/x cannot be shown .* its own /tmp"):
        await box.start()


@pytest.mark.skipif(
    sys.prefix.startswith(("/tmp/", "/sandbox/", "/dev/")),
    reason="this environment lies in a folder that the sandbox has of its own",
)
async def test_the_python_of_this_environment_and_its_packages_can_be_used():
    """Also where it lives in a folder that is closed to others, such as /root."""
    options = {"python": sys.executable, "preload": ("numpy",)}
    async with open_sandbox(**options) as box:
        code = "import subprocess, sys; print(sys.prefix); subprocess.run(['python', '-c', 'import numpy'], check=True)"
        result = await box.run(code)
        assert (result.status, result.stdout) == ("ok", f"{sys.prefix}\n")
        assert (await box.run("import numpy; print(numpy.eye(2).sum())")).stdout == "2.0\n"


async def test_without_isolation_limits_hold_all_the_same(caplog):
    box = PythonSandbox(
        SandboxOptions(workers=1, wall_s=1.0, memory_mb=128, unsafe_without_isolation=True)
    )
    await box.start()
    try:
        assert "WITHOUT isolation" in caplog.text
        assert (await box.run("print(1)")).stdout == "1\n"
        assert (await box.run("while True: pass")).status == "timeout"
        assert (await box.run("x = bytearray(1 << 30)")).status == "memory"
        await box.run("x = 1", session="a")
        assert (await box.run("print(x)", session="a")).stdout == "1\n"
        await box.end_session("a")
        daemon = "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    while True: pass"
        await box.run(daemon)
        # Zygote, supervisor, init, program.
        await until(lambda: len(processes_below(os.getpid())) == 4)
    finally:
        await box.close()
