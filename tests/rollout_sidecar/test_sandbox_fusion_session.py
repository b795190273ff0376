"""verl's stock tool files, written anew, from the file to the tool message: registry, session, gate, client, server."""

import asyncio
import json

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from servers_sandbox_fusion import SandboxFusionServer

from rollout_sidecar.formats.base import ParsedCall
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.tool_session import ToolSession
from rollout_sidecar.tools.gate import GateOptions, ToolGate
from rollout_sidecar.tools.registry import load_tools

SANDBOX = {
    "class_name": "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
    "config": {
        "num_workers": 10,
        "enable_global_rate_limit": True,
        "rate_limit": 10,
        "default_timeout": 30,
        "default_language": "python",
        "memory_limit_mb": 1024,
        "type": "native",
    },
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "A tool for executing code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code."}},
                "required": ["code"],
            },
        },
    },
}

SEARCH = {
    "class_name": "verl.tools.search_tool.SearchTool",
    "config": {"num_workers": 120, "rate_limit": 120, "timeout": 30, "type": "native"},
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches for information.",
            "parameters": {
                "type": "object",
                # The slip is in verl's own file.
                "properties": {"query_list": {"type": "array", "item": {"type": "string"}}},
                "required": ["query_list"],
            },
        },
    },
}


@pytest.fixture
async def open_session(tmp_path):
    """open_session(entry, **config) -> a session of the one tool of a file with that entry."""
    started = []

    async def start(entry, **config):
        file = tmp_path / "tools.yaml"
        entry = {**entry, "config": {**entry["config"], **config}}
        file.write_text(yaml.safe_dump({"tools": [entry]}))
        tools = load_tools(file)
        (name,) = tools
        await tools[name].startup()
        options = GateOptions.of(
            tools[name].config, idempotent=getattr(tools[name], "idempotent", False)
        )
        gates = {name: ToolGate(name, options)}
        session = ToolSession(tools, "i", {}, timeout_s=60, metrics=Metrics(), gates=gates)
        await session.open()
        started.append((session, tools[name]))
        return session

    yield start
    for session, tool in started:
        await session.close()
        await tool.shutdown()


def run(session, code):
    return session.call(ParsedCall(name="code_interpreter", arguments={"code": code}, raw=""))


async def test_what_the_policy_is_told_of_its_programs(open_session):
    async with SandboxFusionServer() as server:
        url = f"{server.url}/run_code"
        session = await open_session(SANDBOX, sandbox_fusion_url=url, default_timeout=1)
        good = await run(session, "print(6 * 7)")
        assert (good.status, good.result, good.attempts) == ("ok", "42\n", 1)
        assert 0 < good.metrics["execution_s"] <= good.latency_s
        # A program that fails is an answer: buggy code must not open the breaker of a healthy server.
        late = await run(session, "print('a')\nimport sys; sys.stdout.flush()\nwhile True: pass")
        assert (late.status, late.metrics["timed_out"]) == ("ok", 1.0)
        assert late.result == (
            "a\nThe program was stopped: it ran longer than the time limit of 1 s."
        )
        server.faults = ["SandboxError"]
        failed = await run(session, "print(1)")
        assert failed.status == "error"
        assert failed.result.endswith("the sandbox could not run the program: no free worker")


async def test_waiting_for_a_place_is_not_time_in_the_tool(open_session):
    """Pain point 16."""
    async with SandboxFusionServer() as server:
        session = await open_session(
            SANDBOX, sandbox_fusion_url=server.url, num_workers=2, enable_global_rate_limit=False
        )
        code = "import time; time.sleep(0.3); print('done')"
        records = await asyncio.gather(*(run(session, code) for _ in range(6)))
    assert [record.result for record in records] == ["done\n"] * 6
    assert server.peak == 2
    queued = sorted(record.queue_s for record in records)
    assert queued[1] < 0.1  # two at once
    assert queued[2] >= 0.29
    assert queued[4] >= 0.59
    assert all(record.metrics["execution_s"] >= 0.3 for record in records)


async def test_searches_are_tried_again_by_the_gate_within_the_calls_deadline(open_session):
    answers = [
        web.Response(status=502, text="bad gateway"),
        web.json_response({"result": [[{"document": {"contents": "T\ntext"}, "score": 1.0}]]}),
    ]

    async def retrieve(request):
        return answers.pop(0) if answers else web.Response(status=500, text="down")

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    async with TestServer(app, host="127.0.0.1") as server:
        url = str(server.make_url("/retrieve"))
        session = await open_session(SEARCH, retrieval_service_url=url)
        call = ParsedCall(name="search", arguments={"query_list": ["a"]}, raw="")
        record = await session.call(call)
        assert (record.status, record.attempts) == ("ok", 2)
        assert json.loads(record.result) == {"result": "Doc 1 (Title: T)\ntext"}
        assert record.metrics == {"queries": 1.0, "documents": 1.0}
        record = await session.call(call)
        assert record.status == "error"
        assert record.result.endswith(f"{url} answered with status 500: down")
        assert record.latency_s + record.queue_s < 5


async def test_a_server_that_is_away_is_told(open_session):
    session = await open_session(SEARCH, retrieval_service_url="http://127.0.0.1:9/retrieve")
    call = ParsedCall(name="search", arguments={"query_list": ["a"]}, raw="")
    record = await session.call(call)
    assert (record.status, record.attempts) == ("error", 3)
    assert "the connection was refused (is the service running?)" in record.result
