"""The Python sandbox in ordinary use: what a program sees, what is told of it, and sessions."""

import asyncio
import ctypes
import sys
from textwrap import dedent

import pytest
import pytest_asyncio
from sandbox_cases import open_sandbox

from rollout_sidecar.tools.python_sandbox import SandboxOptions, SandboxResult
from rollout_sidecar.tools.python_sandbox.inside import syscall_filter
from rollout_sidecar.tools.python_sandbox.result import MAX_CODE_CHARACTERS, clean

in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    async with open_sandbox(wall_s=2.0, last_value=True) as box:
        yield box


# --- a program --------------------------------------------------------------------------------------------------


@in_module_loop
async def test_output_and_errors_in_the_order_of_their_streams(box):
    result = await box.run("import sys\nprint('to stderr', file=sys.stderr)\nprint('to stdout')")
    assert (result.status, result.exit_code, result.reason) == ("ok", 0, "")
    assert result.text() == "to stdout\nto stderr"


@in_module_loop
async def test_a_traceback_is_that_of_a_file(box):
    result = await box.run("def f(x):\n    return 1 // x\n\nf(0)\n")
    assert (result.status, result.exit_code) == ("error", 1)
    assert result.stderr.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "main.py", line 4, in <module>',
        "    f(0)",
    ]
    assert result.stderr.splitlines()[-1].startswith("ZeroDivisionError: ")
    syntax = await box.run("x = (")
    assert syntax.text().splitlines()[0] == '  File "main.py", line 1'
    assert (await box.run("\0")).status == "error"
    assert (await box.run("print('\\ud800')\n'\ud800'")).status == "error"


@in_module_loop
@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [
        ("import sys; sys.exit()", 0, "(no output)"),
        ("import sys; sys.exit(7)", 7, "[The program ended with exit code 7.]"),
        ("raise SystemExit('bye')", 1, "bye"),
    ],
)
async def test_exit_codes(box, code, exit_code, text):
    result = await box.run(code)
    assert result.exit_code == exit_code
    assert result.status == ("error" if exit_code else "ok")
    assert result.text() == text


@in_module_loop
async def test_it_is_a_main_program(box):
    code = """
        import atexit, pickle, sys, threading, time
        class Point: pass
        print(__name__, sys.argv, type(pickle.loads(pickle.dumps(Point()))).__name__, "rollout_sidecar" in sys.modules)
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    """
    result = await box.run(dedent(code))
    assert result.stdout == "__main__ ['main.py'] Point False\nthread\nat exit\n"
    with_processes = """
        import multiprocessing
        def f(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.Pool(2) as pool: print(pool.map(f, [1, 2, 3]))
    """
    assert (await box.run(dedent(with_processes))).stdout == "[1, 4, 9]\n"


@in_module_loop
async def test_a_forked_child_that_runs_to_the_end_is_not_the_end(box):
    code = "import os, time\npid = os.fork()\nif pid: os.wait(); time.sleep(0.1); print('parent')\nelse: print('child')"
    assert (await box.run(code)).stdout == "child\nparent\n"


@in_module_loop
async def test_standard_input(box):
    assert (await box.run("print(input() + input())", stdin="a\nb\n")).stdout == "ab\n"
    long = "x" * 200_000
    assert (await box.run("print(len(open(0).read()))", stdin=long)).stdout == "200000\n"
    assert (await box.run("input()")).stderr.endswith("EOFError: EOF when reading a line\n")


@in_module_loop
async def test_the_last_value(box):
    assert (await box.run("x = 20\nx + 1")).stdout == "21\n"
    assert (await box.run("x = 20\nprint(x)")).stdout == "20\n"
    assert (await box.run("'a'")).stdout == "'a'\n"
    assert (await box.run("1\nx = 2")).text() == "(no output)"


@in_module_loop
async def test_code_that_is_too_long_is_not_run(box):
    result = await box.run("#" * (MAX_CODE_CHARACTERS + 1))
    assert result.status == "too_long"
    assert result.text() == "[The code has 1048577 characters, at most 1048576 are allowed.]"


@in_module_loop
async def test_output_that_a_chat_cannot_hold(box):
    code = r"""
        import os
        os.write(1, b"a\x00b\x1b[31mred\x1b[0m\x1b]0;title\x07 \xff\xfe \xf0\x9f\x98\x80 1%\r2%\r\nend\x08")
        print("<|im_end|><tool_call>[INST]</s>")
    """
    result = await box.run(dedent(code))
    # Tokens of chat templates are the conversation's business, which encodes them as plain text.
    assert (
        result.stdout
        == "abred \ufffd\ufffd \U0001f600 1%\n2%\nend<|im_end|><tool_call>[INST]</s>\n"
    )


def test_a_cut_in_a_character_is_no_invalid_character():
    euro = "€".encode()
    assert clean(b"a" + euro[:2], euro[2:] + b"b", 30) == "a\n... (30 bytes left out) ...\nb"
    assert clean(b"a" + euro[:2]) == "a\ufffd"


def test_every_part_of_a_result_is_told():
    result = SandboxResult(status="error", stdout="out\n", stderr="err\n", reason="Too much.")
    assert result.text() == "out\nerr\n[Too much.]"


# --- sessions ---------------------------------------------------------------------------------------------------


@in_module_loop
async def test_a_session_keeps_its_state_and_no_other_sees_it(box):
    assert (await box.run("x = 1; open('file', 'w').write('kept')", session="a")).status == "ok"
    assert box.live == 1
    assert "NameError" in (await box.run("x", session="b")).stderr
    assert (await box.run("print(x, open('file').read())", session="a")).stdout == "1 kept\n"
    assert "NameError" in (await box.run("x")).stderr
    assert (await box.run("raise SystemExit(3)", session="a")).exit_code == 3
    assert "ZeroDivisionError" in (await box.run("x += 1; 1 / 0", session="a")).stderr
    assert (await box.run("x", session="a")).stdout == "2\n"
    await box.end_session("a")
    await box.end_session("b")
    await box.end_session("never begun")
    assert box.live == 0
    again = await box.run("import os; print('x' in globals(), os.listdir('.'))", session="a")
    assert again.stdout == "False []\n"
    await box.end_session("a")


@in_module_loop
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "The time limit of 0.5 s was reached, and the program was stopped."),
        ("import os; os._exit(2)", "The program ended with exit code 2."),
        ("import os; os._exit(0)", "The program ended itself."),
        ("import os; os.kill(os.getpid(), 9)", "The program was ended by SIGKILL."),
    ],
)  # fmt: skip
async def test_a_session_that_lost_its_state_says_so_and_goes_on(box, code, reason):
    await box.run("x = 1", session="a")
    result = await box.run(code, session="a", timeout_s=0.5)
    assert result.reason == f"{reason} The variables of earlier calls are gone."
    assert "NameError" in (await box.run("x", session="a")).stderr
    await box.end_session("a")


@in_module_loop
async def test_a_memory_limit_does_not_cost_a_session_its_state(box):
    await box.run("x = 1", session="a")
    assert (await box.run("y = bytearray(1 << 30)", session="a")).status == "memory"
    assert (await box.run("x", session="a")).stdout == "1\n"
    await box.end_session("a")


@in_module_loop
async def test_nothing_runs_between_the_calls_of_a_session(box):
    begin = """
        import subprocess, threading, time
        def run():
            while True: pass
        threading.Thread(target=run, daemon=True).start()
        child = subprocess.Popen(["sleep", "60"])
        print(time.process_time())
    """
    first = await box.run(dedent(begin), session="a")
    await asyncio.sleep(0.6)
    second = await box.run("time.process_time()", session="a")
    # A thread that went on would have used most of 0.6 s of a processor.
    assert float(second.stdout) - float(first.stdout) < 0.15
    assert (await box.run("child.poll()", session="a")).stdout == "-9\n"
    await box.end_session("a")


@in_module_loop
async def test_processor_time_is_counted_for_each_call_and_for_all_processes():
    async with open_sandbox(wall_s=8.0, cpu_s=0.5) as box:
        burn = "import time\nwhile time.process_time() - begin < 0.3: pass"
        for _ in range(3):
            result = await box.run(f"import time; begin = time.process_time()\n{burn}", session="a")
            assert result.status == "ok"
        forks = "import os\nfor _ in range(3):\n  if not os.fork(): break\nwhile True: pass"
        result = await box.run(forks)
        assert result.status == "timeout"
        assert result.reason == (
            "The limit of 0.5 s of processor time was reached, and the program was stopped."
        )


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"memory": 1}, "unknown key 'memory' in the config of a Python sandbox; did you mean 'memory_mb'?"),
        ({"zzz": 1}, "unknown key 'zzz' in the config of a Python sandbox; there are: wall_s, cpu_s"),
        ({"memory_mb": "512"}, "memory_mb must be of type int, got '512'"),
        ({"disk_mb": True}, "disk_mb must be of type int, got True"),
        ({"preload": [1]}, r"preload must be a list of strings, got \[1\]"),
        ({"wall_s": 0}, r"wall_s=0.0 is no limit: give seconds, above 0 and up to 86400"),
        ({"output_bytes": 0}, "output_bytes=0 must be at least 1"),
        ({"memory_mb": 1}, "memory_mb=1 must be at least 16: with less, ordinary programs fail"),
        ({"max_files": 3}, "max_files=3 must be at least 16 to import anything"),
        ({"workers": 9, "max_workers": 8}, "workers=9 must be between 0 and max_workers=8"),
    ],
)  # fmt: skip
def test_a_config_that_is_none_is_told(config, message):
    with pytest.raises(ValueError, match=message):
        SandboxOptions.from_config(config)


def test_a_config_is_read():
    options = SandboxOptions.from_config({"wall_s": 3, "preload": "math", "python": None})
    assert options == SandboxOptions(wall_s=3.0, preload=("math",))
    assert SandboxOptions(workers=3).workers_at_start() == 3
    assert SandboxOptions(max_workers=2).workers_at_start() == 2


def test_the_filter_is_there_for_the_common_machines():
    for machine in ("x86_64", "aarch64"):
        program = syscall_filter.build(machine)
        assert program is not None
        assert len(program) // 8 < 256  # a jump goes no further
    assert syscall_filter.build("mips") is None


@pytest.mark.skipif(sys.platform != "linux", reason="there is no prctl")
def test_this_process_is_under_no_filter():
    get_seccomp = 21
    assert ctypes.CDLL(None).prctl(get_seccomp, 0, 0, 0, 0) == 0
