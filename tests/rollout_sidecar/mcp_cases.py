"""What the tests of MCP tools share: servers that are started for real, and tools opened on them."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from sidecar_cases import make_agent, make_request

from rollout_sidecar.agent import run_rollout
from rollout_sidecar.protocol import Trajectory
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.mcp import McpTool, open_mcp_tools

SERVERS = Path(__file__).parent / "mcp_servers"
SDK_SERVER = [sys.executable, str(SERVERS / "sdk_server.py")]


def raw(*modes: str) -> dict[str, Any]:
    """A stdio server that starts in no time, as an entry of the MCP JSON."""
    # -S and -I: a bare interpreter, in 20 ms.
    return {"command": sys.executable, "args": ["-S", "-I", str(SERVERS / "raw_server.py"), *modes]}


def sdk_stdio(**keys: Any) -> dict[str, Any]:
    """A stdio server written with the SDK."""
    return {"command": SDK_SERVER[0], "args": [*SDK_SERVER[1:], "stdio"], **keys}


class HttpServer:
    """A server written with the SDK, over streamable HTTP ("http") or SSE ("sse")."""

    def __init__(self, kind: str, *, token: str = ""):
        self.kind = kind
        self.port = 0
        self._environment = {**os.environ, **({"TOKEN": token} if token else {})}
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Where it is; nothing in it tells HTTP from SSE."""
        return f"http://127.0.0.1:{self.port}/{'events' if self.kind == 'sse' else 'mcp'}"

    def start(self) -> None:
        """Listens when this returns; always at the same port."""
        self._process = subprocess.Popen(
            [*SDK_SERVER, self.kind, str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def signal(self, number: int) -> None:
        """SIGSTOP, say."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Without a goodbye."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@contextmanager
def http_server(kind: str, *, token: str = "") -> Iterator[HttpServer]:
    """A running server."""
    server = HttpServer(kind, token=token)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def entry(folder: Path, servers: dict[str, Any], **config: Any) -> dict[str, Any]:
    """An entry of a tool_config, with its MCP JSON in the folder."""
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return {
        "class_name": "verl.tools.mcp_base_tool.MCPBaseTool",
        "config": {"type": "mcp", **config},
        "mcp": {"mcp_servers_config_path": "mcp.json"},
    }


@asynccontextmanager
async def opened(
    folder: Path, servers: dict[str, Any], *, select: list[str] | None = None, **config: Any
) -> AsyncIterator[dict[str, McpTool]]:
    """The tools, started; shut down at the end, when nothing of them may be left."""
    made = entry(folder, servers, **config)
    made["mcp"]["tool_selected_list"] = select
    tools: dict[str, Any] = await open_mcp_tools(
        made, where="tools.yaml: tools[0]", base_dir=folder
    )
    try:
        for tool in tools.values():
            await tool.startup()
        yield tools
    finally:
        for tool in tools.values():
            await tool.shutdown()
    assert_nothing_left()


async def play_all(
    tokenizer: ChatTokenizer, tools: dict[str, McpTool], scripts: Sequence[list[str]]
) -> list[Trajectory]:
    """A trajectory for each script, all at once; cancelled with whoever awaits this."""

    def playing(ordinal: int, script: list[str]) -> Coroutine[Any, Any, Trajectory]:
        agent, request = make_agent(tokenizer, script, *tools.values()), make_request()
        return run_rollout(agent, request.tasks[0], request.rollouts[0], request, ordinal)

    return await asyncio.gather(*(playing(i, script) for i, script in enumerate(scripts)))


async def say(tools: Mapping[str, Any], key: str, name: str, /, **arguments: Any) -> str:
    """What a tool answers in a trajectory."""
    response, _, _ = await tools[name].execute(key, arguments)
    assert response.text is not None
    return response.text


def server_processes() -> list[int]:
    """Processes that this process's stdio sessions started, by their mark, descendants included."""
    mark = f"TOOLJAX_MCP_SESSION={os.getpid()}-".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def assert_nothing_left() -> None:
    """No process of a server, and no task but the test's own."""
    assert server_processes() == []
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert [task.get_coro() for task in others] == []
