"""The Sandbox Fusion client and tool, against a server that runs programs.

TOOLJAX_TEST_SANDBOX_FUSION_URL names a real server: the tests of what programs do then run against it as well.
"""

import json
import os
import time

import pytest
from servers_sandbox_fusion import HAS_CPP, SandboxFusionServer

from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.sandbox_fusion import SandboxFusionTool
from rollout_sidecar.tools.sandbox_fusion_client import run_code

REAL_URL = os.environ.get("TOOLJAX_TEST_SANDBOX_FUSION_URL", "")

STOCK = {
    "num_workers": 10,
    "enable_global_rate_limit": True,
    "rate_limit": 10,
    "default_timeout": 30,
    "default_language": "python",
    "memory_limit_mb": 1024,
    "type": "native",
}
"""verl's stock config, without the address."""


@pytest.fixture
async def ours():
    async with SandboxFusionServer() as server:
        yield server


@pytest.fixture(params=["ours", "real"] if REAL_URL else ["ours"])
def url(request, ours):
    return ours.url if request.param == "ours" else REAL_URL


@pytest.fixture
async def make_tool():
    tools = []

    async def make(url, **config):
        tool = SandboxFusionTool({**STOCK, "sandbox_fusion_url": url, **config}, None)
        tools.append(tool)
        await tool.startup()
        return tool

    yield make
    for tool in tools:
        await tool.shutdown()


async def answer(tool, code, kwargs=None, **parameters):
    response, reward, metrics = await tool.execute(
        "i", {"code": code, **parameters}, **kwargs or {}
    )
    assert reward == 0.0
    return response.text, metrics


# --- what programs do -------------------------------------------------------------------------------------------


async def test_output_comes_back_as_it_was_written(url, make_tool):
    code = "import sys\nprint(' 6*7 =', 6*7)\nsys.stderr.write('note\\n')"
    text, metrics = await answer(await make_tool(url), code)
    assert text == " 6*7 = 42\nnote\n"
    assert (metrics["outcome"], metrics["failed"]) == ("ok", 0.0)
    assert 0 < metrics["execution_s"] < 30


async def test_an_exception_is_told_with_its_traceback(url, make_tool):
    text, metrics = await answer(await make_tool(url), "print('before')\n1 / 0")
    assert text.startswith("before\nTraceback (most recent call last):\n")
    assert text.endswith(
        "ZeroDivisionError: division by zero\nThe program ended with return code 1."
    )
    assert (metrics["outcome"], metrics["failed"]) == ("error", 1.0)


async def test_a_time_limit_is_named_and_keeps_the_output(url, make_tool):
    """Pain point 16."""
    code = "print('started', flush=True)\nwhile True: pass"
    started = time.monotonic()
    text, metrics = await answer(await make_tool(url, default_timeout=1), code)
    assert text == ("started\nThe program was stopped: it ran longer than the time limit of 1 s.")
    assert (metrics["outcome"], metrics["timed_out"]) == ("timeout", 1.0)
    assert time.monotonic() - started < 8


async def test_a_program_that_fills_the_servers_pipes_is_told_to_print_less(ours):
    stuck = {"status": "TimeLimitExceeded", "stdout": "x" * 219_264, "stderr": ""}
    ours.faults = [(200, {}, json.dumps({"status": "Failed", "run_result": stuck}))]
    result = await run_code(ours.url, "print('x' * 1_000_000)", run_timeout_s=5)
    assert result.reason == (
        "The program was stopped: it ran longer than the time limit of 5 s."
        " It wrote more than the sandbox reads while a program runs: print less."
    )


async def test_silence_is_told_as_such(url, make_tool):
    text, _ = await answer(await make_tool(url), "x = 1")
    assert text == "The program finished without output."


async def test_memory_limit_is_named(url, make_tool):
    tool = await make_tool(url, memory_limit_mb=256)
    text, metrics = await answer(tool, "x = bytearray(1 << 30)")
    assert "MemoryError" in text
    assert text.endswith(
        "The program ended with return code 1. It exceeded the memory limit of 256 MB."
    )
    assert metrics["outcome"] == "error"


async def test_a_killed_program_is_told_by_which_signal(url, make_tool):
    text, metrics = await answer(await make_tool(url), "import os; os.kill(os.getpid(), 9)")
    assert text == (
        "The program was killed by SIGKILL; it may have exceeded the memory limit of 1024 MB."
    )
    assert metrics["outcome"] == "killed"


async def test_stdin_files_and_fetched_files_of_the_policy(url, make_tool):
    code = "open('out/b.txt', 'w').write(open('in/a.txt').read() + input())"
    text, _ = await answer(
        await make_tool(url),
        "import os; os.mkdir('out')\n" + code,
        stdin="ö2\n",
        files={"in/a.txt": "é1,"},
        fetch_files=["out/b.txt", "none.txt"],
    )
    assert text == "--- out/b.txt ---\né1,ö2\n--- none.txt ---\n(there is no such file)"


async def test_a_task_gives_files_input_and_language(url, make_tool):
    kwargs = {
        "language": "bash",
        "stdin": "from the task",
        "files": {"a": "1", "b": {"base64": "Mg=="}, "c": b"3", "absent": None},
        "unknown": 1,
    }
    text, _ = await answer(await make_tool(url), "cat a b c; cat; ls | wc -l", kwargs)
    assert text.startswith("123from the task")


async def test_the_policy_chooses_the_language(url, make_tool):
    text, metrics = await answer(await make_tool(url), "echo $((6 * 7)); exit 3", language="bash")
    assert text == "42\nThe program ended with return code 3."
    assert metrics["outcome"] == "error"


@pytest.mark.skipif(not HAS_CPP, reason="needs g++")
async def test_compiled_programs(url, make_tool):
    tool = await make_tool(url)
    good = '#include <cstdio>\nint main() { printf("%d", 42); }'
    text, metrics = await answer(tool, good, language="cpp")
    assert text == "42"
    assert metrics["compile_s"] > 0
    text, metrics = await answer(tool, "int main() { return x; }", language="cpp")
    assert "was not declared in this scope" in text
    assert text.endswith("The program did not compile (return code 1).")
    assert (metrics["outcome"], metrics["execution_s"]) == ("compile_error", 0.0)


async def test_an_unknown_language_is_told(url, make_tool):
    with pytest.raises(ToolFailure, match="status 422: language: Input should be 'python'"):
        await answer(await make_tool(url), "x", language="cobol")


async def test_unusual_text_survives(url, make_tool):
    text, _ = await answer(await make_tool(url), "print('\\x1b[31m', '\\u2028', '語', chr(0))")
    assert text == "\x1b[31m \u2028 語 \x00\n"


# --- the request ------------------------------------------------------------------------------------------------


async def test_the_stock_config_gives_verls_request(ours, make_tool):
    await answer(await make_tool(ours.url), "1")
    assert ours.requests == [
        {
            "compile_timeout": 30.0,
            "run_timeout": 30.0,
            "code": "1",
            "stdin": None,
            "memory_limit_MB": 1024,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }
    ]


async def test_an_address_with_a_path_is_used_as_it_stands(ours, make_tool):
    text, _ = await answer(await make_tool(ours.url + "/run_code"), "print(1)")
    assert text == "1\n"


async def test_the_policy_may_ask_for_less_time_but_not_for_more(ours, make_tool):
    tool = await make_tool(ours.url, compile_timeout=7)
    await answer(tool, "1", timeout=5)
    await answer(tool, "1", timeout=500)
    await answer(tool, "1", {"timeout": 60, "memory_limit_mb": 64})
    seen = [(r["compile_timeout"], r["run_timeout"], r["memory_limit_MB"]) for r in ours.requests]
    assert seen == [(7, 5, 1024), (7, 30, 1024), (7, 60, 64)]
    with pytest.raises(ValueError, match="timeout is -1, expected seconds above 0"):
        await answer(tool, "1", timeout=-1)


async def test_the_call_has_longer_than_the_program(make_tool):
    tool = await make_tool("http://127.0.0.1:1", default_timeout=20)
    assert tool.config["timeout_s"] == 50  # compiling 20, running 20, and 10
    assert (await make_tool("http://127.0.0.1:1", timeout_s=9)).config["timeout_s"] == 9


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", " "])
async def test_paths_of_the_policy_stay_inside_the_work_folder(ours, make_tool, path):
    tool = await make_tool(ours.url)
    for arguments in ({"files": {path: ""}}, {"fetch_files": [path]}):
        with pytest.raises(ToolFailure, match="must be relative, and inside the work folder"):
            await answer(tool, "1", **arguments)
    assert ours.requests == []


# --- what goes wrong with the server ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_a_request_that_was_turned_away_is_sent_again(ours, make_tool, status):
    ours.faults = [status]
    text, _ = await answer(await make_tool(ours.url), "print(1)")
    assert (text, len(ours.requests)) == ("1\n", 2)


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_a_request_that_may_have_run_is_not_sent_again(ours, make_tool, status):
    ours.faults = [status]
    with pytest.raises(ToolFailure, match=f"/run_code answered with status {status}: busy"):
        await answer(await make_tool(ours.url), "print(1)")
    assert len(ours.requests) == 1


async def test_a_retry_that_would_come_too_late_is_not_made(ours, make_tool):
    ours.faults = [(503, {"Retry-After": "3000"}, "")]
    with pytest.raises(ToolFailure, match="status 503"):
        await answer(await make_tool(ours.url), "print(1)")


async def test_tries_are_bounded(ours):
    ours.faults = [503] * 9
    with pytest.raises(ToolFailure, match="status 503"):
        await run_code(ours.url, "1")
    assert len(ours.requests) == 3


async def test_tries_of_an_idempotent_tool_are_its_gates(ours, make_tool):
    ours.faults = [503]
    with pytest.raises(ToolFailure, match="status 503"):
        await answer(await make_tool(ours.url, idempotent=True), "print(1)")
    assert len(ours.requests) == 1


async def test_sandbox_errors_are_failures_with_the_servers_message(ours, make_tool):
    ours.faults = ["SandboxError"]
    with pytest.raises(
        ToolFailure, match="^the sandbox could not run the program: no free worker$"
    ):
        await answer(await make_tool(ours.url), "print(1)")


async def test_another_kind_of_server_is_told(ours):
    ours.faults = [(200, {}, '{"result": []}'), (200, {}, "<html>"), (200, {}, '["Success"]')]
    with pytest.raises(ToolFailure, match="is not Sandbox Fusion's: it has status None"):
        await run_code(ours.url, "1")
    with pytest.raises(ToolFailure, match="something that is not JSON: '<html>'"):
        await run_code(ours.url, "1")
    with pytest.raises(ToolFailure, match="is not Sandbox Fusion's"):
        await run_code(ours.url, "1")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"sandbox_fusion_url": ""}, "sandbox_fusion_url is '', expected an address"),
        ({"default_timeout": 0}, "default_timeout is 0, expected seconds above 0"),
        ({"memory_limit_mb": "1G"}, "memory_limit_mb is '1G', expected megabytes"),
        ({"headers": {"k": "${TOOLJAX_UNSET}"}}, "TOOLJAX_UNSET, which is not set; export it"),
    ],
)
def test_config_that_cannot_work_is_refused(config, problem):
    with pytest.raises(ValueError, match=problem):
        SandboxFusionTool({**STOCK, "sandbox_fusion_url": "http://localhost", **config}, None)
