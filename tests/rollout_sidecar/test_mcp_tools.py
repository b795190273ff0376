"""MCP tools on real servers, over each transport: schemas, results, errors, selection."""

import json
import logging
import sys
from typing import Any

import pytest
from mcp_cases import (
    SERVERS,
    assert_nothing_left,
    entry,
    http_server,
    opened,
    play_all,
    raw,
    say,
    sdk_stdio,
)
from sidecar_cases import call, statuses, tool_messages

from rollout_sidecar.errors import ToolError
from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.mcp import McpTool, open_mcp_tools
from rollout_sidecar.tools.registry import open_tools


@pytest.fixture(scope="module")
def http():
    with http_server("http") as server:
        yield server


@pytest.fixture(scope="module")
def sse():
    with http_server("sse") as server:
        yield server


@pytest.fixture(params=["stdio", "http", "sse"])
def server(request: pytest.FixtureRequest) -> dict[str, Any]:
    """An entry of the MCP JSON for the same server over each transport; that of SSE has to be found out."""
    if request.param == "stdio":
        return sdk_stdio()
    return {"url": request.getfixturevalue(request.param).url}


# --- over each transport ----------------------------------------------------------------------------------------


async def test_a_session_lasts_for_the_trajectory_and_is_its_own(server, tmp_path, tiny_tokenizer):
    """Pain point 14: a counter on the server gives 1, 2 in one trajectory and 1, 1 in two."""
    async with opened(tmp_path, {"s": server}, select=["inc"]) as tools:
        scripts = [call("inc"), call("inc"), "#### 2"], [call("inc"), "#### 2"]
        trajectories = await play_all(tiny_tokenizer, tools, scripts)
        assert statuses(trajectories[0]) == [["ok"], ["ok"], []]
        assert [tool_messages(trajectory) for trajectory in trajectories] == [["1", "2"], ["1"]]
        assert tools["inc"].remote.pool.live == 0


async def test_answers_reach_the_policy_as_text(server, tmp_path):
    async with opened(tmp_path, {"s": server}) as tools:
        assert await say(tools, "a", "chatty") == "done"  # progress and logs are no answer
        assert await say(tools, "a", "echo", text="naïve 表 😀\n<|im_end|>") == (
            "naïve 表 😀\n<|im_end|>"
        )
        assert await say(tools, "a", "echo", text="half \ud83d") == "half ?"
        assert await say(tools, "a", "huge", characters=400_000) == "x" * 400_000
        assert await say(tools, "a", "parts") == (
            "first\nsecond\n[An image (image/png, 3 bytes) that cannot be shown.]\na note\n"
            "[A link to the resource 'paper' at file:///paper.pdf]"
        )
        assert await say(tools, "a", "only_structured") == '{"naïve": [1, 2]}'
        assert await say(tools, "a", "nothing") == "The tool ran and returned nothing."
        with pytest.raises(ToolFailure, match="no such table: 表\nline 2"):
            await tools["fail"].execute("a", {"reason": "no such table: 表\nline 2"})
        with pytest.raises(ToolFailure, match="place"):  # the server's own check of the arguments
            await tools["wide"].execute("a", {})


async def test_a_result_too_long_for_an_sse_event_is_an_error_with_the_reason(sse, http, tmp_path):
    long = 2_000_000  # the SDK's SSE transport takes events of up to 1 MiB
    async with opened(tmp_path, {"s": {"url": sse.url}}, select=["huge", "inc"]) as tools:
        with pytest.raises(ToolError, match=r"lost \(.*event exceeded the 1048576 byte limit"):
            await say(tools, "a", "huge", characters=long)
        assert await say(tools, "a", "inc") == "1"
    async with opened(tmp_path, {"s": {"url": http.url}}, select=["huge"]) as tools:
        assert len(await say(tools, "a", "huge", characters=long)) == long


# --- schemas and names ------------------------------------------------------------------------------------------


def raw_schema() -> dict[str, Any]:
    """What raw_server.py declares for its tool `wide`, read from its source."""
    source = (SERVERS / "raw_server.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(source[source.index("SCHEMA = ") : source.index("EMPTY = ")], names)  # noqa: S102
    return names["SCHEMA"]


async def test_schemas_are_passed_on_unchanged(tmp_path):
    async with opened(tmp_path, {"s": raw()}) as tools:
        assert tools["wide"].tool_schema == {
            "type": "function",
            "function": {"name": "wide", "description": "Wide.", "parameters": raw_schema()},
        }
        assert tools["pid"].tool_schema["function"]["description"] == ""


async def test_tools_of_all_pages_are_there(tmp_path):
    async with opened(tmp_path, {"s": raw("pages")}) as tools:
        assert list(tools) == ["inc", *(f"tool{i}" for i in range(5))]


async def test_a_tool_config_with_an_mcp_entry_is_opened(tmp_path):
    made = entry(tmp_path, {"s": raw()})
    made["mcp"]["tool_selected_list"] = ["pid", "inc"]
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [made]}))  # JSON is YAML
    tools = await open_tools(tmp_path / "tools.yaml")
    assert list(tools) == ["inc", "pid"]  # in the server's order
    assert_nothing_left()


async def test_a_users_subclass_parses_results(http, tmp_path, monkeypatch):
    (tmp_path / "my_mcp_tool.py").write_text(
        "from verl.tools.mcp_base_tool import MCPBaseTool\n"
        "class Shouting(MCPBaseTool):\n"
        "    def _parse_tool_result(self, content: list) -> tuple[str, dict]:\n"
        "        parts = [part.text.upper() for part in content if part.type == 'text']\n"
        "        return ' '.join(parts), {'parts': len(parts)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = {**entry(tmp_path, {"s": {"url": http.url}}), "class_name": "my_mcp_tool.Shouting"}
    tools = await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    response, reward, metrics = await tools["parts"].execute("a", {})
    assert (response.text, reward, metrics["parts"]) == ("FIRST SECOND", 0.0, 2)
    await tools["parts"].release("a")
    assert_nothing_left()


async def test_tools_of_one_name_on_two_servers(tmp_path):
    servers = {"first one": raw(), "second": raw()}
    made = entry(tmp_path, servers)
    with pytest.raises(
        ValueError,
        match=r"tools\[0\]: the servers 'first one' and 'second' both have a tool 'inc'; set config.prefix: true",
    ):
        await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    select = ["first_one__inc", "second__inc"]
    async with opened(tmp_path, servers, prefix=True, select=select) as tools:
        assert list(tools) == select
        assert [await say(tools, "a", name) for name in select] == ["1", "1"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"mcp": {"tool_selected_list": ["incr"]}},
            "tool_selected_list names 'incr', which no server has; there are: inc, pid, hang",
        ),
        ({"mcp": {"tool_selected_list": "inc"}}, "must be a list of names, got 'inc'"),
        ({"mcp": {"tool_select": []}}, "unknown key mcp.tool_select; there are mcp_servers"),
        ({"mcp": {"mcp_servers_config_path": None}}, "mcp_servers_config_path is missing"),
        ({"config": {"session": "turn"}}, "config.session is 'turn', expected trajectory, run or"),
        ({"config": {"timeout": 0}}, "config.timeout must be a number above 0, got 0"),
        ({"config": {"max_sessions": 1.5}}, "config.max_sessions must be a whole number from 1 on"),
        (
            {"config": {"prestart": 300}},
            "config.prestart=300 must be smaller than max_sessions=256",
        ),
        ({"config": {"idempotent": "yes"}}, "config.idempotent must be true or false, got 'yes'"),
        ({"class_name": "collections.Counter"}, "class_name 'collections.Counter' is no MCP tool"),
    ],
)
async def test_a_bad_entry_is_one_sentence(tmp_path, change, problem):
    made = entry(tmp_path, {"s": raw()})
    for key, value in change.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=rf"tools\[0\].*{problem}"):
        await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    assert_nothing_left()


# --- servers that cannot be used --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (
            raw("exit"),
            r"MCP server 's' of .*mcp\.json \(.*raw_server\.py exit\) cannot be used: stdio: its process"
            r" ended with exit code 1; it said: cannot find the database",
        ),
        (raw("silent"), r"MCP server 's' .*: no answer within 0\.5 s \(connect_timeout_s\)"),
        (raw("no_tools"), "these servers have no tools: s"),
        (raw("pages", "endless"), "MCP server 's' .* does not list its tools: .*1000 pages"),
        (
            {"command": "/no/such/command"},
            "its command '/no/such/command' cannot be started: No such",
        ),
        ({"command": sys.executable, "cwd": "/no/dir"}, "in the folder '/no/dir': No such"),
        (
            {"url": "http://127.0.0.1:9/mcp"},
            r"\(http://127\.0\.0\.1:9/mcp\) cannot be used: .*connected to",
        ),
    ],
)
async def test_a_server_that_cannot_be_used_is_named(tmp_path, server, problem):
    made = entry(tmp_path, {"s": server}, connect_timeout_s=0.5 if "silent" in str(server) else 2)
    with pytest.raises(ValueError, match=rf"tools\[0\]: .*{problem}"):
        await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    assert_nothing_left()


async def test_a_type_that_json_schema_does_not_have_is_told_and_left(tmp_path, caplog):
    made = entry(tmp_path, {"s": raw("mistyped")})
    found = await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    properties = found["inc"].tool_schema["function"]["parameters"]["properties"]
    assert properties == {"x": {"type": "strin"}}
    assert "tools[0]: tool 'inc' of MCP server 's'" in caplog.text
    assert "properties.x.type is 'strin', expected one of array" in caplog.text


async def test_one_bad_server_leaves_nothing_of_the_others(tmp_path):
    made = entry(tmp_path, {"good": raw(), "bad": raw("exit")})
    with pytest.raises(ValueError, match="MCP server 'bad'"):
        await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    assert_nothing_left()


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_token_is_sent_and_a_wrong_one_is_named(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("MCP_TOKEN", "t0k")
    with http_server(kind, token="t0k") as server:
        remote = {"url": server.url, "auth_token": "${MCP_TOKEN}"}
        async with opened(tmp_path, {"s": remote}, select=["inc"]) as tools:
            assert await say(tools, "a", "inc") == "1"
        made = entry(tmp_path, {"s": {**remote, "auth_token": "wrong"}})
        with pytest.raises(ValueError, match="HTTP status 401 \\(see auth_token and headers\\)"):
            await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    assert_nothing_left()


# --- odd servers, and what they are given -----------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "lines"), [("garbage", 6), ("noisy", 400)])
async def test_stray_output_does_no_harm(tmp_path, caplog, mode, lines):
    caplog.set_level(logging.DEBUG, "rollout_sidecar")
    async with opened(tmp_path, {"s": raw(mode)}, select=["inc"]) as tools:
        assert await say(tools, "a", "inc") == "1"
    stray = {"garbage": "stderr: (on stdout, and no message:)", "noisy": "stderr: noise"}[mode]
    # Of two processes (one to list the tools), the first 200 lines of each; 200,000 were written.
    assert sum(stray in record.message for record in caplog.records) == lines


async def test_a_server_without_handshakes_is_spoken_to_in_the_newer_protocol(tmp_path):
    async with opened(tmp_path, {"s": raw("modern_only")}) as tools:
        assert [await say(tools, "a", "inc") for _ in range(2)] == ["1", "2"]


async def test_a_server_gets_its_own_environment_and_not_the_sidecars(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDECAR_SECRET", "t0k")
    server = {**raw(), "env": {"DEBUG": "1"}, "cwd": str(tmp_path)}
    async with opened(tmp_path, {"s": server}, select=["environment"]) as tools:
        lines = (await say(tools, "a", "environment")).split("\n")
    assert "DEBUG=1" in lines
    assert f"folder {tmp_path}" in lines
    assert [line for line in lines if line.startswith("PATH=")]
    assert "SIDECAR_SECRET=t0k" not in lines


async def test_an_answer_that_is_no_result_is_an_error(tmp_path):
    async with opened(tmp_path, {"s": raw()}) as tools:
        with pytest.raises(ToolError, match="the answer of the MCP server 's' is not valid"):
            await say(tools, "a", "bad_result")
        with pytest.raises(ToolFailure, match="^no such table$"):
            await say(tools, "a", "refuse")
        assert await say(tools, "a", "inc") == "1"


async def test_libraries_do_not_fill_the_log(http, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with opened(tmp_path, {"s": {"url": http.url}}, select=["inc"]) as tools:
        await say(tools, "a", "inc")
        await tools["inc"].release("a")
    assert [record.name for record in caplog.records] == []


@pytest.mark.parametrize("installed", ["1.30.0", "2.2.0", "3.0.0b1"])
async def test_without_the_sdk_the_way_out_is_named(tmp_path, monkeypatch, installed):
    made = entry(tmp_path, {"s": raw()})
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda _: installed)
        with pytest.raises(
            ValueError, match=rf"mcp {installed} is installed, and .*mcp>=2\.3,<3: pip"
        ):
            await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(
        ValueError, match=r"tools\[0\]: .*the MCP SDK, .*pip install 'tooljax\[tools\]'"
    ):
        await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)


@pytest.mark.parametrize("config", [{"session": "run"}, {"prestart": 2}])
async def test_a_server_that_is_gone_at_startup_is_named(tmp_path, config):
    with http_server("http") as server:
        made = entry(tmp_path, {"s": {"url": server.url}}, **config)
        [tool, *_] = (await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)).values()
        server.kill()
        with pytest.raises(ValueError, match=rf"{server.url}\) cannot be used: .*connected to"):
            await tool.startup()
    assert_nothing_left()


def test_a_tool_without_a_server_says_so():
    schema = {"type": "function", "function": {"name": "x", "parameters": {}}}
    with pytest.raises(RuntimeError, match="tool 'x' has no server; open_mcp_tools gives it one"):
        _ = McpTool({}, schema).remote
