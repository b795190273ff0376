"""Servers that die, hang, come back, and are asked by many at once."""

import asyncio
import os
import signal
import time

import pytest
from mcp_cases import entry, http_server, opened, play_all, raw, say, server_processes
from sidecar_cases import call, statuses, tool_messages

from rollout_sidecar.errors import DeadlineError, ToolError
from rollout_sidecar.tools.mcp import stdio
from rollout_sidecar.tools.mcp import tools as mcp_tools
from rollout_sidecar.tools.mcp.connection import ConnectionLost, ServerUnavailable
from rollout_sidecar.tools.mcp.tools import open_mcp_tools


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that will not end are killed sooner."""
    monkeypatch.setattr(stdio, "STOP_PATIENCE_S", 0.2)


async def rises(tools, key: str, name: str, /, **arguments) -> Exception:
    """What a call raises."""
    with pytest.raises(ToolError) as caught:
        await tools[name].execute(key, arguments)
    return caught.value


# --- a server that dies -----------------------------------------------------------------------------------------


async def test_a_call_that_may_have_run_is_not_made_again(tmp_path, tiny_tokenizer):
    async with opened(tmp_path, {"s": raw()}, select=["inc", "die"]) as tools:
        script = [call("inc"), call("die"), call("inc"), "#### 2"]
        [trajectory] = await play_all(tiny_tokenizer, tools, [script])
        assert statuses(trajectory) == [["ok"], ["error"], ["ok"], []]
        # The last words on stderr are for the user, not for the policy.
        assert tool_messages(trajectory) == [
            "1",
            "Error executing tool 'die': the connection to the MCP server 's' was lost"
            " (its process ended with exit code 7); the call may have run",
            "1",  # a new session, which begins anew
        ]


async def test_a_server_killed_between_calls_is_started_again(tmp_path):
    async with opened(tmp_path, {"s": raw()}, select=["inc"]) as tools:
        assert await say(tools, "a", "inc") == "1"
        os.kill(server_processes()[0], signal.SIGKILL)
        await asyncio.sleep(0.3)
        assert await say(tools, "a", "inc") == "1"
        os.kill(server_processes()[0], signal.SIGKILL)
        # At once: whether the call was still read nobody knows.
        error = await rises(tools, "a", "inc")
        assert str(error).endswith("(its process was killed by SIGKILL); the call may have run")


@pytest.mark.parametrize("config", [{}, {"idempotent": False}, {"idempotent": True}])
async def test_only_an_idempotent_call_is_made_again(tmp_path, config):
    async with opened(tmp_path, {"s": raw()}, **config) as tools:
        for name, declared in (("die_once_safe", True), ("die_once", False)):
            again = config.get("idempotent", declared)
            assert tools[name].idempotent == again
            flag = {"flag": str(tmp_path / name)}
            if again:
                response, _, metrics = await tools[name].execute("a", flag)
                assert (response.text, metrics["reconnects"]) == ("lived", 1)
            else:
                error = await rises(tools, "a", name, **flag)
                assert isinstance(error, ConnectionLost)
                assert error.may_have_run


async def test_a_tool_that_only_reads_is_tried_twice_and_not_for_ever(tmp_path):
    async with opened(tmp_path, {"s": raw()}, select=["read_only_die"]) as tools:
        assert tools["read_only_die"].idempotent
        assert isinstance(await rises(tools, "a", "read_only_die"), ConnectionLost)


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_server_killed_during_a_call_and_restarted(tmp_path, kind):
    with http_server(kind) as server:
        async with opened(tmp_path, {"s": {"url": server.url}}, select=["inc", "slow"]) as tools:
            assert [await say(tools, key, "inc") for key in "aab"] == ["1", "2", "1"]
            slow = asyncio.create_task(rises(tools, "a", "slow", seconds=30))
            await asyncio.sleep(0.2)
            server.kill()
            lost = await slow
            assert isinstance(lost, ConnectionLost)
            assert lost.may_have_run
            # While it is down; the policy is told no more than it needs.
            down = await rises(tools, "a", "inc")
            assert isinstance(down, ServerUnavailable)
            assert str(server.port) not in str(down)
            server.start()
            assert [await say(tools, key, "inc") for key in "aab"] == ["1", "2", "1"]


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_restart_between_calls_is_not_noticed(tmp_path, kind):
    """But for what the server remembered."""
    with http_server(kind) as server:
        async with opened(tmp_path, {"s": {"url": server.url}}, select=["inc"]) as tools:
            assert [await say(tools, key, "inc") for key in "aab"] == ["1", "2", "1"]
            server.kill()
            server.start()
            await asyncio.sleep(0.1)
            response, _, metrics = await tools["inc"].execute("a", {})
            assert response.text == "1"
            assert metrics["connect_s"] > 0
            assert [await say(tools, key, "inc") for key in "ab"] == ["2", "1"]


async def test_a_server_that_is_not_up_yet_is_waited_for(tmp_path, caplog):
    with http_server("http") as server:
        server.kill()
        made = entry(tmp_path, {"s": {"url": server.url}}, connect_timeout_s=20)
        opening = asyncio.create_task(open_mcp_tools(made, where="tools[0]", base_dir=tmp_path))
        await asyncio.sleep(0.7)
        assert not opening.done()
        assert (
            f"nobody listens at {server.url} yet; waiting up to 10 s for MCP server" in caplog.text
        )
        server.start()
        assert "inc" in await opening


async def test_a_server_that_does_not_come_up_is_not_waited_for_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_tools, "LATE_START_S", 0.6)
    made = entry(tmp_path, {"s": {"url": "http://127.0.0.1:9/mcp"}}, connect_timeout_s=20)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"cannot be used: .* \(waited 0.6 s for it to start\)"):
        await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    assert time.monotonic() - began < 5


# --- a server that hangs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_call_past_its_deadline_is_cancelled_on_the_server(tmp_path, kind):
    with http_server(kind) as server:
        select = ["slow", "cancelled_calls", "inc"]
        servers = {"s": {"url": server.url}}
        async with opened(tmp_path, servers, select=select, timeout=0.3) as tools:
            assert await say(tools, "a", "inc") == "1"
            with pytest.raises(DeadlineError, match="'s' did not answer 'slow' within 0.3 s"):
                await say(tools, "a", "slow", seconds=30, name="ours")
            assert await say(tools, "a", "cancelled_calls") == "ours"
            assert await say(tools, "a", "inc") == "2"  # the session lives on
            # The deadline of whoever calls is honoured likewise.
            tools["slow"].timeout = 30.0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await say(tools, "a", "slow", seconds=30, name="theirs")
            assert await say(tools, "a", "cancelled_calls") == "ours,theirs"
            assert await say(tools, "a", "inc") == "3"


async def test_a_server_that_is_stuck_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_sidecar.tools.mcp.connection.PING_TIMEOUT_S", 0.2)
    async with opened(tmp_path, {"s": raw()}, timeout=0.2) as tools:
        assert [await say(tools, "a", "inc") for _ in range(2)] == ["1", "2"]
        with pytest.raises(DeadlineError):
            await say(tools, "a", "hang")
        assert await say(tools, "a", "inc") == "1"
        assert await say(tools, "a", "inc") == "2"


async def test_a_stuck_server_of_the_run_does_not_take_others_calls_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_sidecar.tools.mcp.connection.PING_TIMEOUT_S", 0.1)
    with http_server("http") as server:
        servers = {"s": {"url": server.url}}
        select = ["slow", "blocked", "echo"]
        async with opened(tmp_path, servers, select=select, session="run") as tools:
            slow = asyncio.create_task(say(tools, "a", "slow", seconds=1.0, name="a"))
            await asyncio.sleep(0.2)
            tools["blocked"].timeout = 0.1
            with pytest.raises(DeadlineError):
                await say(tools, "b", "blocked", seconds=0.6)
            assert await say(tools, "b", "echo", text="back") == "back"
            assert await slow == "slept a"


async def test_a_server_that_stops_reacting_over_http(tmp_path, monkeypatch):
    """It still accepts connections, and never answers: calls, new sessions and their end are bounded."""
    monkeypatch.setattr("rollout_sidecar.tools.mcp.connection.CLOSE_TIMEOUT_S", 0.3)
    with http_server("http") as server:
        servers = {"s": {"url": server.url}}
        config = {"timeout": 0.3, "connect_timeout_s": 0.5}
        async with opened(tmp_path, servers, select=["inc"], **config) as tools:
            assert [await say(tools, key, "inc") for key in "ab"] == ["1", "1"]
            server.signal(signal.SIGSTOP)
            started = asyncio.get_running_loop().time()
            connecting = asyncio.create_task(say(tools, "cancelled", "inc"))
            with pytest.raises(DeadlineError):
                await say(tools, "a", "inc")
            connecting.cancel()
            new = await rises(tools, "new", "inc")
            assert str(new) == (
                "the MCP server 's' cannot be used: no answer within 0.5 s (connect_timeout_s)"
            )
            for key in ("a", "cancelled", "new"):
                await tools["inc"].release(key)
            assert asyncio.get_running_loop().time() - started < 4
            server.signal(signal.SIGCONT)
            assert [await say(tools, key, "inc") for key in "ba"] == ["2", "1"]


async def test_a_flood_ends_the_session_not_the_sidecar(tmp_path):
    async with opened(tmp_path, {"s": raw()}, select=["flood", "inc"]) as tools:
        error = await rises(tools, "a", "flood")
        assert "it sent a message of more than 16777216 bytes" in str(error)
        assert await say(tools, "a", "inc") == "1"


# --- many at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["trajectory", "run"])
async def test_fifty_trajectories_on_one_server(tmp_path, session, tiny_tokenizer):
    with http_server("http") as server:
        servers = {"s": {"url": server.url}}
        async with opened(tmp_path, servers, select=["inc"], session=session) as tools:
            script = [call("inc"), call("inc"), "#### 2"]
            trajectories = await play_all(tiny_tokenizer, tools, [script] * 50)
            assert {trajectory.status for trajectory in trajectories} == {"completed"}
            answers = [tool_messages(trajectory) for trajectory in trajectories]
            if session == "trajectory":
                assert answers == [["1", "2"]] * 50
                assert tools["inc"].remote.pool.live == 0
            else:
                assert sorted(int(text) for pair in answers for text in pair) == [*range(1, 101)]


@pytest.mark.parametrize("delay_s", [0.05, 0.5])
async def test_aborted_trajectories_leave_nothing(tmp_path, tiny_tokenizer, delay_s):
    async with opened(tmp_path, {"s": raw()}, select=["inc", "hang"]) as tools:
        script = [call("inc"), call("hang"), "#### 2"]
        running = asyncio.create_task(play_all(tiny_tokenizer, tools, [script] * 6))
        await asyncio.sleep(delay_s)
        running.cancel()
        await asyncio.wait({running})
        for _ in range(400):
            if not server_processes() and tools["inc"].remote.pool.live == 0:
                break
            await asyncio.sleep(0.01)
        assert server_processes() == []
        assert tools["inc"].remote.pool.live == 0
        await asyncio.sleep(0.1)
