"""The viewer answers its own page on this machine and nobody else, and reads nothing but the runs it was given."""

import asyncio
import http.client

import pytest
from aiohttp.test_utils import TestClient, TestServer
from view_cases import HOSTILE, write_run
from yarl import URL

from tooljax.view.__main__ import main, serve
from tooljax.view.library import Library
from tooljax.view.server import STATIC, make_app


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a run, and beside it one that is nobody's business."""
    folder = tmp_path_factory.mktemp("all")
    write_run(folder / "runs" / "demo")
    write_run(folder / "private")
    (folder / "runs" / "link").symlink_to(folder / "private")
    return folder / "runs"


@pytest.fixture
async def client(root):
    """Of the server."""
    async with TestClient(TestServer(make_app(Library(root)))) as client:
        yield client


@pytest.mark.parametrize(
    "host", ["localhost:9", "127.0.0.1", "127.0.0.1:8000", "[::1]:80", "[::1]", "127.1.2.3:1"]
)
async def test_a_host_header_of_this_machine_is_answered(client, host):
    assert (await client.get("/api/runs", headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"),
        *("192.168.0.1:80", "[::]:80", "0.0.0.0", "evil.example:127.0.0.1", "@127.0.0.1:1", ""),
    ],
)
@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/runs", "/nowhere"])
async def test_any_other_host_header_is_refused(client, host, path):
    answer = await client.get(path, headers={"Host": host})
    assert answer.status == 403
    assert "Host header names another machine" in await answer.text()


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/runs", "/api/step", "/nowhere"])
async def test_every_answer_tells_the_browser_to_trust_nothing(client, path):
    headers = (await client.get(path)).headers
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_but_reading_is_answered(client, method):
    assert (await client.request(method, "/api/runs")).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/%2e%2e%2f%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/main.js%00.css",
        "/static/..",
        "/../pyproject.toml",
    ],
)
async def test_no_path_leads_out_of_the_page_files(client, path):
    # As bytes: clients of a higher kind would tidy the path up.
    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", client.port)
        connection.request("GET", path)
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        finally:
            connection.close()

    status, body = await asyncio.to_thread(ask)
    assert status in (400, 404)
    assert b"import" not in body
    assert b"root:" not in body


@pytest.mark.parametrize(
    "run", ["../private", "/etc", "demo/../../private", "..", ".", "", "link", "demo/"]
)
async def test_no_name_leads_out_of_the_runs(client, root, run):
    if run not in ("", "..", "."):
        assert (root / run).exists()
    answer = await client.get("/api/steps", params={"run": run})
    assert answer.status == (404 if run else 400)
    assert "private" not in str(await (await client.get("/api/runs")).json())


@pytest.mark.parametrize("step", ["../step_1", "1/../1", "-1", "1x", "%2e"])
async def test_a_step_is_a_number(client, step):
    answer = await client.get(URL(f"/api/step?run=demo&step={step}", encoded=True))
    assert answer.status == 400


async def test_hostile_text_leaves_as_json_that_no_browser_takes_for_a_page(client):
    answer = await client.get("/api/trajectory", params={"run": "demo", "step": "1", "index": "1"})
    assert answer.content_type == "application/json"
    assert (await answer.json())["turns"][0]["calls"][0]["result"] == HOSTILE


def test_the_page_makes_no_markup_of_texts_and_names_nobody_outside():
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{file.name} has {word}"
        for word in ("DOMParser", "srcdoc", "createContextualFragment", "new Function"):
            assert word not in text, f"{file.name} has {word}"
        outside = text.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
        assert "http:" not in outside, file.name
        assert "https:" not in outside, file.name
        assert "//cdn" not in outside, file.name
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert '<script type="module" src="/static/main.js"></script>' in page
    assert page.count("<script") == 1
    assert "style=" not in page


@pytest.mark.parametrize("cut", [7, 400])
async def test_a_torn_step_says_what_is_lost(tmp_path, cut):
    file = write_run(tmp_path / "demo") / "trajectories" / "step_1.log"
    file.write_bytes(file.read_bytes()[:-cut])
    async with TestClient(TestServer(make_app(Library(tmp_path)))) as client:
        found = await (await client.get("/api/step", params={"run": "demo", "step": "1"})).json()
    assert 0 < found["trajectories"] < 6
    assert "cut short or damaged, and were dropped" in found["notes"][0]
    assert f"{found['trajectories']} of 6 trajectories are left" in found["notes"][1]


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"", "does not begin as"), (b"tooljax trajectories 1\n", "empty")]
)
async def test_a_step_of_which_nothing_is_left_is_a_sentence(tmp_path, content, sentence):
    file = write_run(tmp_path / "demo") / "trajectories" / "step_1.log"
    file.write_bytes(content)
    async with TestClient(TestServer(make_app(Library(tmp_path)))) as client:
        answer = await client.get("/api/step", params={"run": "demo", "step": "1"})
        assert answer.status == 422
        assert sentence in (await answer.json())["error"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "example.com", "::"])
async def test_it_serves_this_machine_only(root, host):
    with pytest.raises(ValueError, match="can be reached from other machines"):
        await serve(Library(root), host, 0)


async def test_a_port_in_use_is_a_sentence(root):
    runner = await serve(Library(root), "127.0.0.1", 0)
    try:
        port = runner.addresses[0][1]
        with pytest.raises(ValueError, match=f"cannot serve on 127.0.0.1:{port}: "):
            await serve(Library(root), "127.0.0.1", port)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("name", "sentence"), [("nowhere", "is not a folder"), (".", "holds no run: neither it nor")]
)
def test_a_folder_without_runs_is_a_sentence(tmp_path, capsys, name, sentence):
    assert main([str(tmp_path / name)]) == 1
    assert sentence in capsys.readouterr().err
