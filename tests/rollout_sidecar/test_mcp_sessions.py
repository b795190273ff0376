"""Whose session it is, when it is opened, and that nothing is left of it."""

import asyncio
import os
from typing import Any

import pytest
from mcp_cases import (
    assert_nothing_left,
    entry,
    http_server,
    opened,
    raw,
    say,
    server_processes,
)

from rollout_sidecar.errors import DeadlineError
from rollout_sidecar.tools.mcp import McpTool, open_mcp_tools, stdio
from rollout_sidecar.tools.mcp.connection import McpConnection
from rollout_sidecar.tools.mcp.servers import read_servers


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that will not end are killed sooner."""
    monkeypatch.setattr(stdio, "STOP_PATIENCE_S", 0.2)


async def begin(tools: dict[str, Any], *keys: str) -> None:
    """The sidecar creates every tool for each trajectory."""
    for key in keys:
        for tool in tools.values():
            assert (await tool.create(key))[0] == key


async def end(tools: dict[str, Any], *keys: str) -> None:
    """And releases them."""
    for key in keys:
        for tool in tools.values():
            await tool.release(key)


def alive(pid: str) -> bool:
    """There is such a process, and it is no zombie."""
    try:
        with open(f"/proc/{int(pid)}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_tools_of_a_server_share_the_trajectorys_session(tmp_path):
    async with opened(tmp_path, {"s": raw()}) as tools:
        await begin(tools, "a", "b")
        assert server_processes() == []  # nothing is opened before it is needed
        pids = [await say(tools, key, "pid") for key in "aab"]
        assert pids[0] == pids[1] != pids[2]
        assert [await say(tools, key, "inc") for key in "aaba"] == ["1", "2", "1", "3"]
        await tools["inc"].release("a")
        assert alive(pids[0])  # other tools of the trajectory still use it
        await end({name: tool for name, tool in tools.items() if name != "inc"}, "a")
        assert (alive(pids[0]), alive(pids[2])) == (False, True)


async def test_two_entries_for_one_server_share_the_trajectorys_session(tmp_path):
    async with opened(tmp_path, {"s": raw()}, select=["inc"]) as one:
        second = {**entry(tmp_path, {"s": raw()}), "class_name": McpTool}
        two = await open_mcp_tools(second, where="", base_dir=tmp_path)
        for tools in (one, two):
            await begin(tools, "a")
        assert [await say(tools, "a", "inc") for tools in (one, two, one)] == ["1", "2", "3"]
        await end(one, "a")
        assert await say(two, "a", "inc") == "4"
        await end(two, "a")
        assert server_processes() == []


async def test_calls_at_once_open_one_session(tmp_path):
    async with opened(tmp_path, {"s": raw()}) as tools:
        pids = await asyncio.gather(*(say(tools, "a", "pid") for _ in range(8)))
        assert len(set(pids)) == 1
        assert len(server_processes()) == 1


async def test_a_session_for_the_run_is_shared_and_open_from_the_start(tmp_path):
    async with opened(tmp_path, {"s": raw()}, session="run") as tools:
        assert len(server_processes()) == 1
        await begin(tools, "a", "b")
        assert [await say(tools, key, "inc") for key in "aab"] == ["1", "2", "3"]
        await end(tools, "a", "b")
        assert await say(tools, "c", "inc") == "4"


async def test_a_session_for_each_call_forgets(tmp_path):
    async with opened(tmp_path, {"s": raw()}, session="call") as tools:
        await begin(tools, "a")
        assert [await say(tools, "a", "inc") for _ in range(2)] == ["1", "1"]
        await end(tools, "a")


async def test_sessions_kept_ready_are_given_to_one_trajectory_only(tmp_path):
    async with opened(tmp_path, {"s": raw()}, prestart=2) as tools:
        ready = set(map(str, server_processes()))
        assert len(ready) == 2
        pids = []
        for key in "abcd":
            await begin(tools, key)
            pids.append(await say(tools, key, "pid"))
            assert await say(tools, key, "inc") == "1"
            await end(tools, key)
        assert len(set(pids)) == 4
        assert ready < set(pids)
        for _ in range(200):
            if len(server_processes()) == 2:  # what was taken is made up for
                break
            await asyncio.sleep(0.01)
        assert len(server_processes()) == 2
        assert not ready & set(map(str, server_processes()))


async def test_a_full_house_lets_wait_and_says_so(tmp_path):
    config = {"max_sessions": 1, "timeout": 0.2, "connect_timeout_s": 0.8}
    async with opened(tmp_path, {"s": raw()}, select=["inc"], **config) as tools:
        await begin(tools, "a", "b", "c")
        assert await say(tools, "a", "inc") == "1"
        waiting = asyncio.create_task(say(tools, "b", "inc"))
        await asyncio.sleep(0.1)
        await end(tools, "a")
        assert await waiting == "1"
        with pytest.raises(DeadlineError, match=r"no session .*within 1 s: .* \(max_sessions=1\)"):
            await say(tools, "c", "inc")
        await end(tools, "b")
        assert await say(tools, "c", "inc") == "1"


async def test_the_reaper_closes_sessions_that_nobody_released(tmp_path, caplog):
    async with opened(tmp_path, {"s": raw()}, select=["inc"], session_idle_s=0.4) as tools:
        await begin(tools, "leaked")
        assert await say(tools, "leaked", "inc") == "1"
        for _ in range(20):
            await asyncio.sleep(0.05)
            await say(tools, "busy", "inc")  # never idle for so long
        assert len(server_processes()) == 1
        assert "closing a session that was left open" in caplog.text
        assert await say(tools, "busy", "inc") == "21"
        assert await say(tools, "leaked", "inc") == "1"  # opened again


async def test_releasing_twice_or_what_was_never_created_is_nothing(tmp_path):
    async with opened(tmp_path, {"s": raw()}, select=["inc"]) as tools:
        await tools["inc"].release("never")
        await begin(tools, "a")
        await say(tools, "a", "inc")
        await end(tools, "a", "a")
        assert server_processes() == []


# --- what is left -----------------------------------------------------------------------------------------------


async def dies(pid: str) -> bool:
    """Soon: a killed process takes a moment."""
    for _ in range(100):
        if not alive(pid):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_server_that_will_not_end_is_killed_with_its_children(tmp_path):
    async with opened(tmp_path, {"s": raw("stubborn")}, select=["children", "pid"]) as tools:
        await begin(tools, "a")
        daemon, pid = await say(tools, "a", "children"), await say(tools, "a", "pid")
        assert alive(daemon)  # in a session of its own, and no child of the server any more
        started = asyncio.get_running_loop().time()
        await end(tools, "a")
        assert asyncio.get_running_loop().time() - started < 2
        assert await dies(daemon)
        assert await dies(pid)


async def test_a_server_that_ends_by_itself_leaves_no_children_either(tmp_path):
    async with opened(tmp_path, {"s": raw()}, select=["children"]) as tools:
        daemon = await say(tools, "a", "children")
        await end(tools, "a")
        assert await dies(daemon)


async def test_shutdown_closes_what_is_open_and_can_be_followed_by_a_start(tmp_path):
    async with opened(tmp_path, {"s": raw()}, select=["inc", "hang"]) as tools:
        await begin(tools, "a", "b")
        await say(tools, "a", "inc")
        hanging = asyncio.create_task(say(tools, "b", "hang"))
        await asyncio.sleep(0.2)
        for tool in tools.values():
            await tool.shutdown()
        assert server_processes() == []
        with pytest.raises(Exception, match="the connection to the MCP server 's' was lost"):
            await hanging
        for tool in tools.values():
            await tool.startup()
        assert await say(tools, "a", "inc") == "1"


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.04, 0.06])
async def test_cancelling_a_call_that_connects_leaves_nothing(tmp_path, delay_s):
    async with opened(tmp_path, {"s": raw()}, select=["inc"]) as tools:
        await begin(tools, "a")
        calling = asyncio.create_task(say(tools, "a", "inc"))
        await asyncio.sleep(delay_s)
        calling.cancel()
        await asyncio.wait({calling})
        await end(tools, "a")
        assert server_processes() == []


async def test_cancelling_the_release_does_not_keep_it_from_happening(tmp_path):
    async with opened(tmp_path, {"s": raw("stubborn")}, select=["pid"]) as tools:
        await begin(tools, "a")
        pid = await say(tools, "a", "pid")
        releasing = asyncio.create_task(end(tools, "a"))
        await asyncio.sleep(0.05)
        releasing.cancel()
        await asyncio.wait({releasing})
        assert alive(pid)
        assert await dies(pid)
        await asyncio.sleep(0.1)  # the task that did it


async def test_the_owner_of_a_connection_may_be_cancelled_at_any_time(tmp_path):
    """What a stopping event loop does: every task is cancelled, some of them again."""
    (tmp_path / "mcp.json").write_text(
        __import__("json").dumps({"mcpServers": {"s": raw("stubborn")}})
    )
    server = read_servers("mcp.json", where="", base_dir=tmp_path)["s"]
    owner: asyncio.Task[None] | None = None
    for delays in ([0.01], [0.05, 0.01], [0.2, 0.0, 0.1]):
        connection = McpConnection(server, connect_timeout_s=5)
        opening = asyncio.create_task(connection.open())
        await asyncio.sleep(0)
        for delay_s in delays:
            await asyncio.sleep(delay_s)
            owner = connection._owner
            assert owner is not None
            owner.cancel()
        assert owner is not None
        await asyncio.wait({opening, owner}, timeout=5)
        assert owner.done()
        for pid in map(str, server_processes()):
            assert await dies(pid)
    assert_nothing_left()


async def test_no_file_stays_open(tmp_path):
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with http_server("http") as http, http_server("sse") as sse:
        for server in (raw(), {"url": http.url}, {"url": sse.url}):
            async with opened(tmp_path, {"s": server}, select=["inc"]) as tools:
                counts = []
                for key in "abcd":
                    await begin(tools, key)
                    await say(tools, key, "inc")
                    await end(tools, key)
                    await asyncio.sleep(0.02)
                    counts.append(files())
                assert counts[-1] <= counts[0]
