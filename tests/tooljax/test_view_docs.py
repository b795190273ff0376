"""docs/viewer.md says what is there: its commands work, its API is the server's, its settings exist."""

import json
import re
import shlex
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from view_cases import served, write_run

from tooljax.config.gin import SECTIONS
from tooljax.view import conversation, query, server
from tooljax.view.__main__ import parser
from tooljax.view.library import Library

PAGE = (Path(__file__).parents[2] / "docs" / "viewer.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
FILTERS = set(query.Filters.__struct_fields__)
PARAMETERS = {
    "runs": set(),
    "steps": set(server.Run.__struct_fields__),
    "metrics": set(server.Curves.__struct_fields__),
    "step": set(server.Step.__struct_fields__),
    "trajectories": {*server.Step.__struct_fields__, *FILTERS, *query.Page.__struct_fields__},
    "trajectory": {*server.One.__struct_fields__, *FILTERS},
    "tokens": set(server.Tokens.__struct_fields__),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the run that the page speaks of."""
    return write_run(tmp_path_factory.mktemp("runs") / "quickstart").parent


@pytest.mark.parametrize("command", [c for c in COMMANDS if "tooljax.view" in c])
def test_the_viewer_takes_its_commands(command):
    words = shlex.split(command)
    parsed = parser().parse_args(words[words.index("tooljax.view") + 1 :])
    assert str(parsed.run).startswith("runs")
    if "-L" in words:
        assert words[words.index("-L") + 1] == f"{parsed.port}:127.0.0.1:{parsed.port}"


def test_what_curl_asks_for_is_answered(runs):
    asked = [shlex.split(c)[1] for c in COMMANDS if c.startswith("curl")]
    assert len(asked) == 2
    with served(runs) as address:
        for url in asked:
            here = url.replace("http://127.0.0.1:8000", address)
            with urllib.request.urlopen(here, timeout=20) as answer:
                assert "error" not in json.load(answer)


def test_the_table_of_the_api_is_the_servers(runs):
    app = server.make_app(Library(runs))
    paths = {resource.canonical for resource in app.router.resources()}
    rows = dict(re.findall(r"^\| `/api/(\w+)` \| ([^|]*)\|", PAGE, re.MULTILINE))
    assert {f"/api/{name}" for name in rows} == {p for p in paths if p.startswith("/api/")}
    (filters,) = re.findall(r"^Filters: (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", filters)))
    assert named == FILTERS
    for name, row in rows.items():
        told = set(re.findall(r"`(\w+)`", row)) | (FILTERS if "filters" in row else set())
        assert told == PARAMETERS[name], name


def test_limits_and_settings_are_as_it_says():
    assert f"up to {query.MAX_LIMIT}, default {query.Page().limit}" in PAGE
    assert f"up to {conversation.MAX_TOKENS} tokens" in PAGE
    assert f"({server.Curves(run='').points})" in PAGE
    for section, field in re.findall(r"`(store)\.(\w+)`", PAGE):
        assert field in SECTIONS[section]
