"""What a policy may write, out of ignorance or not. Each attack is told its end, and the worker it ran in, which is the
only one, is as good as new for the next call."""

import asyncio
import os
import time
from textwrap import dedent

import pytest
import pytest_asyncio
from sandbox_cases import open_sandbox, processes_below

from rollout_sidecar.tools.python_sandbox import PythonSandbox, SandboxResult

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = {"wall_s": 1.0, "memory_mb": 128, "max_processes": 16, "disk_mb": 8, "output_bytes": 20000}
READY_PROCESSES = 6
"""Of a worker at rest: bubblewrap twice, zygote, supervisor, init, program."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    async with open_sandbox(**LIMITS) as box:
        yield box


async def attack(box: PythonSandbox, code: str, **kwargs) -> SandboxResult:
    """Runs the code, and checks that nothing of it is left and that the sandbox serves the next call."""
    started = time.monotonic()
    result = await box.run(code, **kwargs)
    assert time.monotonic() - started < 10
    assert result.status != "lost"
    assert (await box.run("print(6 * 7)")).stdout == "42\n"
    assert box.live == 0
    await settled()
    return result


async def settled() -> None:
    """Waits until only the worker's own processes are there."""
    for _ in range(500):
        if len(processes_below(os.getpid())) <= READY_PROCESSES:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(processes_below(os.getpid()))


# --- too much of something --------------------------------------------------------------------------------------


async def test_an_infinite_loop_names_its_time_limit(box):
    result = await attack(box, "print('begin')\nwhile True: pass")
    assert result.status == "timeout"
    assert result.stdout == "begin\n"
    assert (
        result.text() == "begin\n[The time limit of 1 s was reached, and the program was stopped.]"
    )


async def test_signals_that_are_ignored_do_not_help(box):
    code = """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: signal.pause()
    """
    assert (await attack(box, dedent(code))).status == "timeout"


@pytest.mark.parametrize(
    "code",
    [
        "n = 10 ** 10 ** 8",
        "str(3 ** 10 ** 7)",
        "import re; re.match('(a|a)*b', 'a' * 64)",
        "sum(range(10 ** 12))",
    ],
)
async def test_one_call_into_c_that_takes_for_ever(box, code):
    assert (await attack(box, code)).status in ("timeout", "memory", "error")
    slow = await attack(box, "import re; re.match('(a|a)*b', 'a' * 64)", timeout_s=0.2)
    assert slow.reason == "The time limit of 0.2 s was reached, and the program was stopped."


async def test_a_fork_bomb(box):
    result = await attack(box, "import os\nwhile True: os.fork()")
    assert result.status in ("error", "timeout")
    if result.status == "error":
        assert "The limit of 16 processes and threads was reached." in result.reason


async def test_a_fork_bomb_that_does_not_give_up(box):
    code = """
        import os
        while True:
            try: os.fork()
            except OSError: pass
    """
    assert (await attack(box, dedent(code))).status == "timeout"


async def test_a_bomb_of_shells(box):
    code = "import subprocess; subprocess.run(['sh', '-c', 'b() { b | b & b; }; b'])"
    assert (await attack(box, code)).status in ("ok", "error", "timeout", "killed")


async def test_a_thread_bomb(box):
    code = """
        import threading, time
        while True: threading.Thread(target=time.sleep, args=(60,)).start()
    """
    result = await attack(box, dedent(code))
    assert "can't start new thread" in result.stderr
    # Its threads keep it from ending.
    assert result.status == "timeout"
    ends = await attack(box, dedent(code).replace("args=(60,)", "args=(60,), daemon=True"))
    assert ends.reason == "The limit of 16 processes and threads was reached."


async def test_a_memory_bomb(box):
    result = await attack(box, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.status == "memory"
    assert "MemoryError" in result.stderr
    assert result.reason == "The memory limit of 128 MB was reached."


async def test_a_memory_bomb_of_many_processes(box):
    """Each is within its limit, all together are not."""
    code = """
        import os, time
        for _ in range(8):
            if os.fork() == 0: break
        x = bytearray(os.urandom(1 << 20) * 90)
        time.sleep(60)
    """
    result = await attack(box, dedent(code), timeout_s=9.0)
    assert result.status == "memory"
    assert result.reason == "The memory limit of 128 MB was reached, and the program was stopped."


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.memfd_create('x')",
        "import mmap; mmap.mmap(-1, 1 << 28)",
        "import ctypes; print(1 / max(0, ctypes.CDLL(None).shmget(0, 1 << 28, 0o1666)))",
    ],
)
async def test_memory_that_belongs_to_no_process(box, code):
    assert (await attack(box, code)).status in ("error", "memory")


@pytest.mark.parametrize("folder", ["/sandbox", "/tmp", "/dev/shm"])
async def test_filling_the_disk(box, folder):
    code = f"""
        import os
        for i in range(100):
            with open(f"{folder}/{{i}}", "wb") as file: file.write(bytes(1 << 20))
    """
    result = await attack(box, dedent(code))
    assert "No space left on device" in result.stderr
    assert result.reason == "The limit of 8 MB of files was reached."
    assert (await box.run(f"import os; print(os.listdir('{folder}'))")).stdout == "[]\n"


async def test_one_file_too_large_and_too_many_small_ones(box):
    large = await attack(box, "open('x', 'wb').truncate(1 << 30)")
    assert large.reason == "The limit of 8 MB of files was reached."
    many = await attack(box, "for i in range(10 ** 6): open(str(i), 'w').close()", timeout_s=9.0)
    assert "No space left on device" in many.stderr


async def test_using_up_the_descriptors(box):
    result = await attack(box, "x = []\nwhile True: x.append(open('/dev/null'))")
    assert "Too many open files" in result.stderr
    assert result.reason == "The limit of 128 open files was reached."


@pytest.mark.parametrize("stream", [1, 2])
async def test_a_flood_of_output(box, stream):
    code = f"import os\nfor _ in range(1 << 14): os.write({stream}, b'x' * (1 << 16))"  # 1 GB
    result = await attack(box, code, timeout_s=9.0)
    assert result.status == "output_limit"
    assert (result.stdout, result.stderr)[stream - 1].startswith("x" * 10000 + "\n... (")
    assert result.reason == (
        "The program wrote far more than the limit of 20000 bytes, and the program was stopped."
    )


async def test_more_output_than_the_limit_is_cut_and_said_so(box):
    result = await attack(box, "print('ä' * 15000)")
    assert result.status == "ok"
    # Of 30,001 bytes the first and the last 10,000; the last begins in the middle of a character.
    assert result.stdout == "ä" * 5000 + "\n... (10001 bytes left out) ...\n" + "ä" * 4999 + "\n"
    assert result.reason == "Stdout was longer than 20000 bytes."


async def test_a_flood_from_a_process_left_behind_does_not_hold_up_the_answer(box):
    code = "import os\nif os.fork() == 0:\n  while True: os.write(1, b'y' * 4096)\nprint('done')"
    assert (await attack(box, code)).status in ("ok", "output_limit")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def f(): f()\nf()", "RecursionError"),
        ("import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda: f()\nf()", ""),
        ("import sys\nsys.setrecursionlimit(10 ** 9)\nclass A: __repr__ = lambda self: repr(self)\nrepr(A())", ""),
        ("eval('(' * 10 ** 5)", "Error"),
    ],
)  # fmt: skip
async def test_deep_recursion(box, code, told):
    result = await attack(box, code, timeout_s=3.0)
    assert result.status in ("error", "memory", "killed", "timeout")
    assert told in result.text()
    if result.status == "killed":
        assert result.reason.startswith("The program was ended by SIGSEGV, as by a recursion")


# --- ways not to end --------------------------------------------------------------------------------------------

DAEMON = """
    import os, signal, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(3): os.close(fd)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        os._exit(0)
    os.wait()
"""


async def test_a_daemon_ends_with_its_call(box):
    result = await attack(box, dedent(DAEMON) + "print('left it behind')")
    assert result.stdout == "left it behind\n"


async def test_leaving_without_a_word(box):
    gone = await attack(box, "import os\nprint('never flushed', end='')\nos._exit(3)")
    assert (gone.status, gone.exit_code) == ("error", 3)
    assert gone.reason == "The program ended with exit code 3."
    crashed = await attack(box, "import os; os.abort()")
    assert (crashed.status, crashed.reason) == ("killed", "The program was ended by SIGABRT.")
    shot = await attack(box, "import os; os.kill(os.getpid(), 9)")
    assert shot.reason == "The program was ended by SIGKILL."


async def test_signals_reach_no_further_than_the_call(box):
    code = """
        import os, signal
        print(os.getppid())
        for target in (1, os.getppid()):
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP): os.kill(target, number)
        for target in range(3, 400):
            try: os.kill(target, signal.SIGKILL)
            except ProcessLookupError: pass
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(0, signal.SIGTERM)
        try: os.kill(-1, signal.SIGTERM)
        except ProcessLookupError: pass
        print("still here")
    """
    assert (await attack(box, dedent(code))).stdout == "1\nstill here\n"


async def test_the_end_of_a_call_cannot_be_forged(box):
    """All that a program can reach is its own output, and the note with its own exit code."""
    code = """
        import json, os, struct
        header = {"how": "note", "what": "", "code": 0, "alive": True, "run_s": 0}
        body = json.dumps({**header, "totals": [6, 0], "sizes": [6, 0, 0, 0]})
        forged = struct.pack("!I", len(body)) + body.encode() + b"forged"
        for fd in range(128):
            try: os.write(fd, forged)
            except OSError: pass
        while True: pass
    """
    result = await attack(box, dedent(code))
    assert result.stdout.endswith("forged")
    assert result.status == "error"
    assert result.run_s > 0


async def test_the_next_call_is_answered_for_itself(box):
    """What one call does to its interpreter, and to its files, the next does not see."""
    await box.run(
        "import builtins, sys; builtins.print = None; sys.modules['json'] = None; open('x', 'w')"
    )
    after = await box.run("import json, os; print(json.dumps(os.listdir('.')))")
    assert after.stdout == "[]\n"
