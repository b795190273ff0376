"""What tools' services can do wrong, and the sentence for each."""

import asyncio
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_sidecar.tools.http import (
    HttpClient,
    HttpFailure,
    checked_url,
    expand_environment,
    with_default_path,
)


@pytest.fixture
async def serve():
    """serve(handler) -> address of a server that answers every request with it."""
    servers = []

    async def start(handler) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        server = TestServer(app, host="127.0.0.1")
        servers.append(server)
        await server.start_server()
        return str(server.make_url("/api"))

    yield start
    for server in servers:
        await server.close()


async def failure(url, *, timeout_s=5.0, **client) -> HttpFailure:
    http = HttpClient(**client)
    try:
        with pytest.raises(HttpFailure) as caught:
            await http.request_json("POST", url, body={}, timeout_s=timeout_s)
        return caught.value
    finally:
        await http.close()


def answering(text, status=200, **headers):
    async def handler(request):
        return web.Response(status=status, text=text, headers=headers)

    return handler


async def test_json_comes_back_and_nothing_is_remembered(serve):
    async def handler(request):
        response = web.json_response(
            {"got": await request.json(), "cookies": dict(request.cookies)}
        )
        response.set_cookie("session", "1")
        return response

    url = await serve(handler)
    http = HttpClient()
    for _ in range(2):
        answer = await http.request_json("POST", url, body={"ö": [1]}, timeout_s=5)
        assert answer == {"got": {"ö": [1]}, "cookies": {}}
    await http.close()
    await http.close()


async def test_a_refused_connection():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = await failure(f"http://user:password@127.0.0.1:{port}/a?key=k")
    assert str(error) == (
        f"http://127.0.0.1:{port}/a could not be reached: the connection was refused"
        " (is the service running?)"
    )
    assert (error.fault, error.not_processed) == ("refused", True)


async def test_proxies_of_the_environment_are_ignored(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    http = HttpClient()
    assert await http.request_json("GET", await serve(answering("[]")), timeout_s=5) == []
    await http.close()


async def test_a_server_that_never_answers(serve):
    async def handler(request):
        await asyncio.sleep(5)
        return web.Response()

    error = await failure(await serve(handler), timeout_s=0.2)
    assert (error.fault, error.not_processed) == ("timeout", False)
    assert str(error).endswith("/api gave no answer within 0.2 s")


async def test_a_server_that_trickles_is_bounded_in_total(serve):
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b" ")
            await asyncio.sleep(0.05)
        return response

    assert (await failure(await serve(handler), timeout_s=0.3)).fault == "timeout"


async def test_a_server_that_hangs_up(serve):
    async def handler(request):
        request.transport.abort()
        return web.Response()

    error = await failure(await serve(handler))
    assert (error.fault, error.not_processed) == ("broken", False)
    assert " broke off: " in str(error)


async def test_an_answer_without_end(serve):
    error = await failure(await serve(answering("x" * 5000)), max_response_bytes=4096)
    assert error.fault == "too_large"
    assert str(error).endswith("answered with more than 4096 bytes")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("out of\ncoffee", ": out of"),
        ('{"detail": "no such index"}', ": no such index"),
        ('{"error": {"message": "bad key"}}', ": bad key"),
        ('{"detail": [{"loc": ["body", "topk"], "msg": "Input should be >= 1"}]}', ": topk: Input should be >= 1"),
        ("", ""),
        ("y" * 5000, ": " + "y" * 297 + "..."),
    ],
)  # fmt: skip
async def test_a_status_is_told_with_what_the_body_says_first(serve, body, reason):
    error = await failure(await serve(answering(body, 418)))
    assert str(error).endswith(f"/api answered with status 418{reason}")
    assert (error.status, error.not_processed) == (418, False)


async def test_being_turned_away(serve):
    error = await failure(await serve(answering("", 429, **{"Retry-After": "7"})))
    assert (error.not_processed, error.retry_after_s) == (True, 7.0)


async def test_redirects_are_not_followed(serve):
    url = await serve(answering("", 307, Location="http://127.0.0.1:1/retrieve/?key=k"))
    assert str(await failure(url)).endswith(
        "status 307: redirects are not followed; set the address to http://127.0.0.1:1/retrieve/"
    )


async def test_what_is_not_json(serve):
    error = await failure(await serve(answering("<html>\n<body>")))
    assert (error.fault, str(error).endswith("something that is not JSON: '<html>'")) == (
        "not_json",
        True,
    )
    assert (await failure(await serve(answering("[" * 100_000)))).fault == "not_json"


async def test_secrets_are_never_repeated(serve, monkeypatch, caplog):
    async def handler(request):
        return web.Response(status=401, text=f"bad key {request.headers['X-Key']}")

    monkeypatch.setenv("TOOLJAX_TEST_KEY", "sesame-123")
    headers, secrets = expand_environment({"X-Key": "${TOOLJAX_TEST_KEY}"}, "headers")
    assert headers == {"X-Key": "sesame-123"}
    with caplog.at_level("DEBUG"):
        error = await failure(await serve(handler), headers=headers, secrets=secrets)
    assert str(error).endswith("status 401: bad key ***")
    assert "sesame" not in caplog.text


def test_environment_in_nested_values(monkeypatch):
    monkeypatch.setenv("TOOLJAX_TEST_KEY", "k")
    value = {"a": ["${TOOLJAX_TEST_KEY}x", 1], "b": {"c": "$no {query}"}}
    assert expand_environment(value, "v") == ({"a": ["kx", 1], "b": {"c": "$no {query}"}}, ("k",))
    monkeypatch.delenv("TOOLJAX_TEST_KEY")
    with pytest.raises(ValueError, match="v names the environment variable TOOLJAX_TEST_KEY"):
        expand_environment(value, "v")


def test_addresses():
    assert with_default_path("http://a:1", "/x") == "http://a:1/x"
    assert with_default_path("http://a:1/?k=1", "/x") == "http://a:1/x?k=1"
    assert with_default_path("http://a:1/y/z", "/x") == "http://a:1/y/z"
    for bad in (None, "", "localhost:80", "ftp://a", "http://", "http://[::1"):
        with pytest.raises(ValueError, match="the_url is .*expected an address as"):
            checked_url(bad, "the_url")
