"""Whose fault a failed call is: a policy's bad calls cost nobody the tool, and a service that is gone does."""

import asyncio
import socket
import sqlite3
import subprocess
import urllib.error
from email.message import Message

import aiohttp
import httpx2
import pytest
from aiohttp import web
from stepping_loop import run_stepping

from rollout_sidecar.errors import DeadlineError, ToolError, boundary
from rollout_sidecar.formats.base import ParsedCall
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.tool_session import ToolSession
from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.faults import RaisedError, is_infrastructure, is_timeout
from rollout_sidecar.tools.function_tool import FunctionTool, function_tool
from rollout_sidecar.tools.gate import GateOptions, ToolGate
from rollout_sidecar.tools.http import HttpFailure
from rollout_sidecar.tools.python_sandbox.errors import WorkerLostError
from rollout_sidecar.tools.search import SearchTool


class OfAnotherLibrary(Exception):
    """Looks like requests' HTTPError."""

    def __init__(self, status: int):
        self.response = type("Response", (), {"status_code": status})()


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://x", status, "no", Message(), None)


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


OF_THE_CALL = [
    sqlite3.OperationalError("near 'SELEKT': syntax error"),
    RuntimeError("the theorem is wrong"),
    KeyError("x"),
    FileNotFoundError("no such file"),
    PermissionError("not allowed"),
    subprocess.TimeoutExpired("python", 5),
    http_error(404),
    OfAnotherLibrary(422),
    caused(RuntimeError("no such page"), http_error(404)),
    ToolFailure("no such table"),
]
OF_THE_TOOL = [
    ConnectionRefusedError("refused"),
    OSError(28, "No space left on device"),
    socket.gaierror("unknown host"),
    aiohttp.ServerDisconnectedError(),
    httpx2.ConnectError("refused"),
    http_error(503),
    OfAnotherLibrary(429),
    caused(RuntimeError("search failed"), ConnectionResetError("reset")),
    ExceptionGroup("both", [ConnectionResetError("reset"), ValueError("x")]),
    WorkerLostError("the sandbox broke"),
    ToolError("the server is gone"),
]
OF_TIME = [
    DeadlineError("late"),
    TimeoutError(),
    httpx2.ReadTimeout("late"),
    HttpFailure("no answer", "timeout"),
    caused(RuntimeError("search failed"), TimeoutError()),
]


def call(name: str, **arguments: object) -> ParsedCall:
    return ParsedCall(name, arguments, raw="")


def crossed(error: Exception) -> ToolError | DeadlineError:
    """The failure of a tool that raised this."""
    try:
        with boundary(RaisedError):
            raise error
    except (ToolError, DeadlineError) as failure:
        return failure


@pytest.mark.parametrize("error", OF_THE_CALL, ids=repr)
def test_what_a_call_leads_to_is_no_fault_of_the_tool(error):
    failure = crossed(error)
    assert (is_infrastructure(failure), is_timeout(failure)) == (False, False)


@pytest.mark.parametrize("error", OF_THE_TOOL, ids=repr)
def test_what_a_service_does_is_the_tools(error):
    failure = crossed(error)
    assert (is_infrastructure(failure), is_timeout(failure)) == (True, False)


@pytest.mark.parametrize("error", OF_TIME, ids=repr)
def test_what_does_not_answer_in_time_is_a_timeout(error):
    failure = crossed(error)
    assert (is_infrastructure(failure), is_timeout(failure)) == (True, True)


async def test_bad_sql_of_a_whole_group_leaves_the_database_to_the_others():
    @function_tool
    def sql(query: str) -> str:
        """Runs a query."""
        with sqlite3.connect(":memory:") as database:
            return str(database.execute(query).fetchall())

    tool = FunctionTool(sql)
    gates = {"sql": ToolGate("sql")}
    session = ToolSession({"sql": tool}, "t", {}, timeout_s=10, metrics=Metrics(), gates=gates)
    await session.open()
    bad = await asyncio.gather(*(session.call(call("sql", query="SELEKT 1")) for _ in range(32)))
    assert {record.status for record in bad} == {"error"}
    assert 'near "SELEKT": syntax error' in bad[-1].result
    good = await session.call(call("sql", query="SELECT 1"))
    assert (good.status, good.result) == ("ok", "[(1,)]")
    await session.close()


def test_the_policy_is_told_the_limit_that_was_met():
    """A tool with a limit of 3 s has a gate of 13 s: what the tool says about its limit is what the policy reads."""

    async def own(timeout_s: float) -> str:
        await asyncio.sleep(3)
        raise DeadlineError("the server did not answer within 3 s")

    async def hangs(timeout_s: float) -> str:
        await asyncio.sleep(timeout_s)
        raise DeadlineError(f"no result within {timeout_s:g} s")

    async def main() -> list[str]:
        options = GateOptions.of({"timeout": 3})
        passages = [await ToolGate("slow", options).run(way, 80) for way in (own, hangs)]
        return [str(passage.error) for passage in passages]

    assert run_stepping(main()) == [
        "the server did not answer within 3 s",
        "no result within 13 s",
    ]


async def test_a_service_that_keeps_silent_is_a_timeout_and_is_asked_once():
    asked = 0

    async def keep_silent(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_post("/retrieve", keep_silent)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = {"retrieval_service_url": f"http://127.0.0.1:{port}", "timeout": 0.2}
    tool = SearchTool(config, None)
    gates = {"search": ToolGate("search", GateOptions.of(config, idempotent=tool.idempotent))}
    session = ToolSession({"search": tool}, "t", {}, timeout_s=10, metrics=Metrics(), gates=gates)
    try:
        await session.open()
        record = await session.call(call("search", query_list=["x"]))
        assert (record.status, record.attempts, asked) == ("timeout", 1, 1)
        assert record.result == f"http://127.0.0.1:{port}/retrieve gave no answer within 0.2 s"
    finally:
        await session.close()
        await tool.shutdown()
        await runner.cleanup()
