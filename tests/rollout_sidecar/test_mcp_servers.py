"""The MCP JSON: what verl and other clients write is read, and every bad entry is one sentence."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollout_sidecar.tools import registry
from rollout_sidecar.tools.mcp.entry import read_entry
from rollout_sidecar.tools.mcp.servers import McpServer, read_servers


def read(folder: Path, content: Any, **environ: str) -> dict[str, McpServer]:
    """The servers of a file in the folder."""
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "mcp.json").write_text(text)
    return read_servers("mcp.json", where="tools[0]", base_dir=folder, environ=environ)


def one(folder: Path, **keys: Any) -> McpServer:
    """The only server of a file, called s."""
    return read(folder, {"mcpServers": {"s": keys}}, TOKEN="t0k", EMPTY="")["s"]


def test_verls_file_is_read_as_it_is(tmp_path):
    servers = read(
        tmp_path,
        {
            "mcpServers": {
                "Tavily Expert": {"url": "https://host/mcp/", "auth_token": "secret"},
                "Local": {"command": "python", "args": ["server.py"], "env": {}},
                "Plain": {"url": "http://host:1/x"},
            }
        },
    )
    assert list(servers) == ["Tavily Expert", "Local", "Plain"]
    assert servers["Tavily Expert"].headers == (("Authorization", "Bearer secret"),)
    assert servers["Tavily Expert"].transport == "http_or_sse"
    assert (servers["Local"].command, servers["Local"].args) == ("python", ("server.py",))
    assert servers["Local"].transport == "stdio"
    assert servers["Plain"].headers == ()


@pytest.mark.parametrize(
    ("keys", "transport"),
    [
        ({"url": "http://h/mcp"}, "http_or_sse"),
        ({"url": "http://h/sse"}, "sse"),
        ({"url": "http://h/sse/?key=1"}, "sse"),
        ({"url": "http://h/sse", "type": "streamable-http"}, "http"),
        ({"url": "http://h/x", "type": "http"}, "http"),
        ({"url": "http://h/x", "transport": "sse"}, "sse"),
        ({"command": "x", "type": "stdio"}, "stdio"),
        ({"command": "x", "type": None}, "stdio"),
    ],
)
def test_the_transport_is_that_of_the_entry_or_of_the_url(tmp_path, keys, transport):
    assert one(tmp_path, **keys).transport == transport


def test_variables_come_from_the_sidecars_environment(tmp_path):
    server = one(
        tmp_path, command="x", env={"A": "Bearer ${TOKEN}!", "B": "${UNSET:-b}", "C": "$TOKEN"}
    )
    assert dict(server.env) == {"A": "Bearer t0k!", "B": "b", "C": "$TOKEN"}
    remote = one(tmp_path, url="http://h/${TOKEN}", auth_token="${TOKEN}")
    assert (remote.url, dict(remote.headers)) == ("http://h/t0k", {"Authorization": "Bearer t0k"})
    # In arguments they are left to the command: sh -c 'echo ${TOKEN}'.
    assert one(tmp_path, command="sh", args=["${TOKEN}"]).args == ("${TOKEN}",)


def test_secrets_are_in_no_message(tmp_path):
    server = one(tmp_path, url="https://user:pa55@h/mcp?key=k3y", auth_token="t0k")
    assert server.address == "https://h/mcp"
    assert "t0k" not in repr(server)
    assert "t0k" not in repr(one(tmp_path, command="x", env={"A": "t0k"}))


def test_keys_of_other_clients_are_ignored_with_a_warning(tmp_path, caplog):
    one(tmp_path, command="x", autoApprove=["a"], timeout=3)
    assert "server 's': these keys are ignored: autoApprove, timeout" in caplog.text


def test_a_disabled_server_is_left_out_and_null_is_absent(tmp_path):
    servers = {"off": {"command": "x", "disabled": True}, "on": {"url": None, "command": "x"}}
    assert list(read(tmp_path, {"mcpServers": servers})) == ["on"]


def test_several_files_are_one(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"mcpServers": {name: {"command": name}}})
        )
    servers = read_servers(["a.json", "b.json"], where="tools[0]", base_dir=tmp_path)
    assert [server.command for server in servers.values()] == ["a", "b"]
    (tmp_path / "b.json").write_text(json.dumps({"mcpServers": {"a": {"command": "b"}}}))
    with pytest.raises(
        ValueError, match=r"b\.json: a server named 'a' is also in .*a\.json; rename"
    ):
        read_servers(["a.json", "b.json"], where="tools[0]", base_dir=tmp_path)


def test_a_path_is_looked_for_beside_the_tool_config_then_in_the_working_folder(
    tmp_path, monkeypatch
):
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder in (beside, working):
        folder.mkdir()
        (folder / "mcp.json").write_text(
            json.dumps({"mcpServers": {"s": {"command": folder.name}}})
        )
    monkeypatch.chdir(working)
    assert read_servers("mcp.json", where="", base_dir=beside)["s"].command == "beside"
    (beside / "mcp.json").unlink()
    assert read_servers("mcp.json", where="", base_dir=beside)["s"].command == "working"
    (working / "mcp.json").unlink()
    with pytest.raises(
        ValueError, match=r"tools\[0\]: .*path: mcp\.json: no such file \(looked in .*beside"
    ):
        read_servers("mcp.json", where="tools[0]", base_dir=beside)


def test_a_command_and_a_folder_are_looked_for_beside_the_json(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "serve").write_text("")
    found = one(tmp_path, command="bin/serve", cwd="bin")
    assert (found.command, found.cwd) == (str(tmp_path / "bin" / "serve"), str(tmp_path / "bin"))
    found = one(tmp_path, command="other/serve", cwd="other")
    assert (found.command, found.cwd) == ("other/serve", "other")
    # A bare name is a program on the PATH.
    assert one(tmp_path, command="bin").command == "bin"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", r"mcp\.json is not valid JSON: .*line 1"),
        ("[]", r"expected an object with a key `mcpServers`"),
        ({"servers": {}}, r"a key `mcpServers` .*; its keys are: servers"),
        ({"mcpServers": []}, r"an object of servers by name\); mcpServers is \[\]"),
        ('{"mcpServers": {"s": {}, "s": {}}}', r"mcp\.json: the key 's' is there twice"),
        ({"mcpServers": {}}, r"tools\[0\]: no server in mcp\.json that is not disabled"),
        (
            {"mcpServers": {"s": 1}},
            r"mcp\.json: server 's': expected an object with url or command",
        ),
        (
            {"mcpServers": {"s": {"comand": "x"}}},
            r"neither url nor command; .*unknown keys: comand",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, content, problem):
    with pytest.raises(ValueError, match=problem):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"url": "http://h", "command": "x"}, "has both url and command"),
        ({"url": "h/mcp"}, "url must start with http:// or https://, got 'h/mcp'"),
        ({"url": 3}, "url must be text, got 3"),
        ({"command": ["x"]}, r"command must be text, got \['x'\]"),
        ({"command": "x", "args": "a b"}, "args must be a list of texts, got 'a b'"),
        ({"command": "x", "args": [80]}, r"args must be a list of texts, got \[80\] .*\"8080\""),
        ({"command": "x", "env": {"PORT": 80}}, "env.PORT must be text, got 80"),
        ({"command": "x", "env": {"A": "${NO}"}}, r"env.A refers to \$\{NO\}, which is not set"),
        ({"url": "http://h", "auth_token": "${NO}"}, r"auth_token refers to \$\{NO\}"),
        ({"url": "http://h", "auth_token": "${EMPTY}"}, r"auth_token refers to \$\{EMPTY\}"),
        ({"url": "http://h", "auth_token": "a\nb"}, "header 'Authorization' must be one line"),
        ({"url": "http://h", "env": {}}, "env means nothing beside url; drop one"),
        ({"command": "x", "auth_token": "t"}, "auth_token means nothing beside command"),
        ({"command": "x", "type": "sse"}, "type is 'sse' and there is a command; drop one"),
        (
            {"url": "http://h", "type": "ws"},
            "type is 'ws', expected stdio, http, streamable-http or",
        ),
        (
            {"url": "http://h", "auth_token": "t", "headers": {"authorization": "x"}},
            "auth_token and headers.Authorization; drop one",
        ),
    ],
)
def test_a_bad_server_is_one_sentence(tmp_path, keys, problem):
    with pytest.raises(ValueError, match=rf"mcp\.json: server 's'.*{problem}"):
        one(tmp_path, **keys)


@pytest.mark.parametrize("paths", [None, 3, [], [""], [None]])
def test_paths_are_a_text_or_a_list_of_texts(tmp_path, paths):
    with pytest.raises(
        ValueError, match="must be the path of an MCP JSON file, or a list of paths"
    ):
        read_servers(paths, where="tools[0]", base_dir=tmp_path)


def test_the_shipped_files_are_read():
    configs = Path(__file__).parents[2] / "configs"
    for where, made, file in _mcp_entries(configs / "tools"):
        servers = read_entry(made, where=where, base_dir=file.parent).servers
        assert servers
    for file in (configs / "mcp").glob("*.json"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TAVILY_API_KEY", "t0k")
            assert read_servers(file, where=str(file), base_dir=configs, environ=os.environ)


def _mcp_entries(folder: Path) -> list[tuple[str, dict[str, Any], Path]]:
    entries = [
        (where, made, file)
        for file in folder.glob("*.yaml")
        for where, made in registry.read_entries(file)
        if "mcp" in made
    ]
    assert entries
    return entries
