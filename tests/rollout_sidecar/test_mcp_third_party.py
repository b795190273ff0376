"""Servers that others wrote, in Python and TypeScript, with three releases of the protocol between them.

They are in the folder that TOOLJAX_TEST_MCP names (tests/tools/make_mcp_servers.sh makes it), each in an environment of
its own.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp_cases import opened, play_all, say, server_processes
from sidecar_cases import call, statuses, tool_messages

from rollout_sidecar.tools.base import ToolFailure

FASTMCP_1 = """
import sys
from mcp.server.fastmcp import Context, FastMCP

server = FastMCP("v1", host="127.0.0.1", port=int(sys.argv[2]), log_level="ERROR")
counts = {}

@server.tool()
def inc(ctx: Context) -> str:
    counts[id(ctx.session)] = counts.get(id(ctx.session), 0) + 1
    return str(counts[id(ctx.session)])

server.run(sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the servers are; skips without them."""
    if not os.environ.get("TOOLJAX_TEST_MCP"):
        pytest.skip("TOOLJAX_TEST_MCP is not set; tests/tools/make_mcp_servers.sh makes the folder")
    return Path(os.environ["TOOLJAX_TEST_MCP"])


def part(folder: Path, path: str) -> str:
    """A file of the folder; skips if that server was left out."""
    if not (folder / path).exists():
        pytest.skip(f"{path} is not in TOOLJAX_TEST_MCP")
    return str(folder / path)


def script(folder: Path, name: str) -> str:
    """Of a TypeScript server."""
    return part(folder, f"node/node_modules/@modelcontextprotocol/server-{name}/dist/index.js")


@contextmanager
def listening(
    command: list[str], port: int, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A server of others' at a port."""
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            for _ in range(400):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def free_port() -> int:
    """Nobody listens there now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def test_time(folder, tmp_path):
    server = {
        "command": part(folder, "time/bin/mcp-server-time"),
        "args": ["--local-timezone", "UTC"],
    }
    async with opened(tmp_path, {"time": server}) as tools:
        assert tools["convert_time"].idempotent
        converted = await say(
            tools,
            "a",
            "convert_time",
            source_timezone="UTC",
            time="12:00",
            target_timezone="Asia/Tokyo",
        )
        assert "T21:00:00+09:00" in converted
        with pytest.raises(ToolFailure, match="Nowhere"):
            await say(tools, "a", "get_current_time", timezone="Nowhere")


async def test_sqlite(folder, tmp_path, tiny_tokenizer):
    command = part(folder, "sqlite/bin/mcp-server-sqlite")
    server = {"command": command, "args": ["--db-path", str(tmp_path / "a.db")]}
    select = ["create_table", "write_query", "read_query"]
    async with opened(tmp_path, {"sqlite": server}, select=select) as tools:
        turns = [
            call("create_table", query="CREATE TABLE t (a INTEGER)"),
            call("write_query", query="INSERT INTO t VALUES (41), (1)"),
            call("read_query", query="SELECT sum(a) AS total FROM t"),
            call("read_query", query="SELECT * FROM nowhere"),
            "#### 42",
        ]
        [trajectory] = await play_all(tiny_tokenizer, tools, [turns])
        assert statuses(trajectory) == [["ok"]] * 4 + [[]]
        assert tool_messages(trajectory)[1:] == [
            "[{'affected_rows': 2}]",
            "[{'total': 42}]",
            "Database error: no such table: nowhere",
        ]
        assert server_processes() == []


async def test_calculator(folder, tmp_path):
    server = {"command": part(folder, "calculator/bin/mcp-server-calculator")}
    async with opened(tmp_path, {"calculator": server}) as tools:
        assert await say(tools, "a", "calculate", expression="2 * 21") == "42"
        with pytest.raises(ToolFailure, match="division by zero"):
            await say(tools, "a", "calculate", expression="1 / 0")


async def test_filesystem(folder, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    server = {"command": "node", "args": [script(folder, "filesystem"), str(files)]}
    async with opened(tmp_path, {"files": server}) as tools:
        # A schema with nested objects in a list, as the server declares it.
        edits = tools["edit_file"].tool_schema["function"]["parameters"]["properties"]["edits"]
        assert set(edits["items"]["properties"]) == {"oldText", "newText"}
        await say(tools, "a", "write_file", path=str(files / "a.txt"), content="naïve\nline")
        assert (files / "a.txt").read_text(encoding="utf-8") == "naïve\nline"
        assert await say(tools, "a", "read_text_file", path=str(files / "a.txt")) == "naïve\nline"
        with pytest.raises(ToolFailure, match="Access denied"):
            await say(tools, "a", "read_text_file", path="/etc/passwd")


@pytest.mark.parametrize("kind", ["stdio", "streamableHttp", "sse"])
async def test_everything(folder, tmp_path, kind):
    command, port = ["node", script(folder, "everything"), kind], free_port()
    server: dict[str, Any] = {"command": command[0], "args": command[1:]}
    if kind == "stdio":
        await use_everything(tmp_path, server)
        return
    with listening(command, port, PORT=str(port)):
        server = {"url": f"http://127.0.0.1:{port}/{'sse' if kind == 'sse' else 'mcp'}"}
        await use_everything(tmp_path, server)


async def use_everything(tmp_path: Path, server: dict[str, Any]) -> None:
    """What the reference server has to try clients with."""
    async with opened(tmp_path, {"everything": server}) as tools:
        assert await say(tools, "a", "get-sum", a=2, b=3) == "The sum of 2 and 3 is 5."
        assert await say(tools, "b", "echo", message="naïve 😀") == "Echo: naïve 😀"
        assert "[An image (image/png, " in await say(tools, "a", "get-tiny-image")
        long = await say(tools, "a", "trigger-long-running-operation", duration=0.2, steps=4)
        assert "completed" in long
        assert "[A link to the resource " in await say(tools, "a", "get-resource-links", count=2)
        with pytest.raises(ToolFailure, match="(?i)invalid"):
            await say(tools, "a", "get-sum", a="two", b=3)
        for key in "ab":
            for tool in tools.values():
                await tool.release(key)


@pytest.mark.parametrize("kind", ["streamable-http", "sse"])
async def test_a_server_of_the_sdks_first_generation(folder, tmp_path, kind):
    port = free_port()
    (tmp_path / "server.py").write_text(FASTMCP_1)
    python = part(folder, "calculator/bin/python")
    command = [python, str(tmp_path / "server.py"), kind, str(port)]
    server = {"url": f"http://127.0.0.1:{port}/{'sse' if kind == 'sse' else 'mcp'}"}
    with listening(command, port):
        async with opened(tmp_path, {"v1": server}) as tools:
            assert [await say(tools, key, "inc") for key in "aab"] == ["1", "2", "1"]


@pytest.mark.parametrize("generation", ["everything", "v1"])
async def test_a_restart_is_survived_whatever_the_server_says_of_the_old_session(
    folder, tmp_path, generation
):
    """Servers disagree about status, code and words for a session that they do not know."""
    port = free_port()
    if generation == "everything":
        command = ["node", script(folder, "everything"), "streamableHttp"]
        name, arguments = "echo", {"message": "back"}
    else:
        (tmp_path / "server.py").write_text(FASTMCP_1)
        python = part(folder, "calculator/bin/python")
        command = [python, str(tmp_path / "server.py"), "streamable-http", str(port)]
        name, arguments = "inc", {}
    servers = {"s": {"url": f"http://127.0.0.1:{port}/mcp"}}
    # Idempotent or not: the call was not run, and the server says so.
    with listening(command, port, PORT=str(port)) as first:
        async with opened(tmp_path, servers, select=[name], idempotent=False) as tools:
            before = await say(tools, "a", name, **arguments)
            first.kill()
            first.wait()
            with listening(command, port, PORT=str(port)):
                assert await say(tools, "a", name, **arguments) == before
                await tools[name].release("a")
