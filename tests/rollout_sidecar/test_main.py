"""`python -m rollout_sidecar` as a process: it starts, serves, says what is wrong, and ends when told to."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from sidecar_cases import call, make_request, statuses

from rollout_sidecar.__main__ import main
from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import Limits

ROOT = Path(__file__).parents[2]

TOOLS = """\
tools:
  - class_name: rollout_sidecar.tools.calculator.CalculatorTool
    config: {type: native}
"""


@pytest.fixture
def start(tiny_tokenizer_folder, tmp_path):
    """Starts a sidecar with the scripted engine and arguments; ends it after the test."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps(["#### 2"]))
    processes = []

    def start(*arguments, launcher=()):
        command = [sys.executable, "-m", "rollout_sidecar", "--model", str(tiny_tokenizer_folder)]
        command += ["--engine", "scripted", "--script", str(script), *map(str, arguments)]
        process = subprocess.Popen(
            [*launcher, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(condition, what, timeout_s=20.0):
    """Waits until condition() is true, and returns what it is."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} took more than {timeout_s} s")


def url_of(port_file):
    """The URL, once the port has been written."""
    wait_for(port_file.exists, "the port file")
    return f"http://127.0.0.1:{int(port_file.read_text())}"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal_and_ends_with_0(start, tmp_path, how):
    port_file, token_file, tools = tmp_path / "port", tmp_path / "token", tmp_path / "tools.yaml"
    token_file.write_text("s3cret\n")
    tools.write_text(TOOLS)
    arguments = ["--port", 0, "--port_file", port_file, "--token_file", token_file]
    process = start(*arguments, "--tool_config", tools, "--reward", "gsm8k")
    url = url_of(port_file)
    async with SidecarClient(url, token="s3cret") as client:
        info = await client.info()
        assert [tool["function"]["name"] for tool in info.tools] == ["calculator"]
        found = [trajectory async for trajectory in client.rollouts(make_request())]
        assert (found[0].status, found[0].reward) == ("completed", 1.0)
    async with SidecarClient(url) as client:
        with pytest.raises(SidecarError, match="token_file"):
            await client.info()
    process.send_signal(how)
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()


BLOCKING = """\
import time

from rollout_sidecar.tools.function_tool import function_tool


@function_tool
async def block() -> str:
    \"\"\"Never comes back.\"\"\"
    time.sleep(10**6)
"""


async def test_a_tool_that_blocks_holds_up_neither_deadlines_nor_probes_nor_signals(
    start, tmp_path
):
    port_file, tool, script = tmp_path / "port", tmp_path / "blocking.py", tmp_path / "calls.json"
    tool.write_text(BLOCKING)
    script.write_text(json.dumps([call("block"), "#### 2"]))
    process = start(
        "--port", 0, "--port_file", port_file, "--tool_config", tool, "--script", script
    )
    url = url_of(port_file)
    async with SidecarClient(url) as client:
        async with asyncio.timeout(20):
            while not await client.ready():
                await asyncio.sleep(0.05)
        started = time.monotonic()
        request = make_request(limits=Limits(tool_timeout_s=0.5, trajectory_timeout_s=3.0))
        [trajectory] = [found async for found in client.rollouts(request)]
        assert time.monotonic() - started < 3
        assert statuses(trajectory) == [["timeout"], []]
        wait_for(lambda: "lost_threads 1" in urlopen(f"{url}/metrics").read().decode(), "the loss")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert "block holds up its event loop" in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines"),
        (["--reward", "best"], "unknown reward 'best'"),
        (["--tool_format", "morse"], "unknown tool format 'morse'"),
        (["--tool_config", "nowhere.yaml"], "nowhere.yaml: no such tool_config file"),
        (["--token_file", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--token_file", os.devnull], "is empty"),
        (["--script", os.devnull], f"--script {os.devnull} is not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(start, arguments, message):
    process = start("--port", 0, *arguments)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "argument --port: 65536 must be from 0 to 65535"),
        (["--slots", "0"], "argument --slots: 0 must be at least 1"),
        (["--max_model_tokens", "many"], "argument --max_model_tokens: invalid"),
    ],
)
def test_numbers_out_of_range_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["--model", "unread", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_to_be(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start("--port", taken.getsockname()[1])
        _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "address already in use" in error


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses a Linux system call")
def test_it_ends_with_its_parent(start, tmp_path):
    port_file, pid_file = tmp_path / "port", tmp_path / "pid"
    # A parent that starts the sidecar, notes its process id, and is then killed without warning.
    parent = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[2:])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    launcher = [sys.executable, "-c", parent, str(pid_file)]
    process = start("--port", 0, "--port_file", port_file, "--exit_with_parent", launcher=launcher)
    url_of(port_file)
    child = int(pid_file.read_text())
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not _is_running(child), "the end of the sidecar")


def _is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
