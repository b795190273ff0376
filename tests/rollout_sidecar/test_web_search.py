"""Web search through providers: four services as configuration, a provider of the user's own, what goes wrong."""

import asyncio
import json
import time

import pytest
import yaml
from servers_web_search import KEY, WebSearchServer

from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.search_providers import JsonProvider, SearchResult, make_provider
from rollout_sidecar.tools.web_search import WebSearchTool

SERPER = {
    "headers": {"X-API-KEY": "${TOOLJAX_TEST_KEY}"},
    "body": {"q": "{query}", "num": "{topk}"},
    "results": "organic",
    "fields": {"url": "link"},
}
TAVILY = {
    "headers": {"Authorization": "Bearer ${TOOLJAX_TEST_KEY}"},
    "body": {"query": "{query}", "max_results": "{topk}"},
    "results": "results",
    "fields": {"snippet": "content"},
}
BRAVE = {
    "headers": {"X-Subscription-Token": "${TOOLJAX_TEST_KEY}"},
    "params": {"q": "{query}", "count": "{topk}"},
    "results": "web.results",
    "fields": {"snippet": "description"},
}
SEARXNG = {
    "params": {"q": "{query}", "format": "json", "safe": True},
    "results": "results",
    "fields": {"snippet": "content"},
}


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("TOOLJAX_TEST_KEY", KEY)


@pytest.fixture
async def server():
    async with WebSearchServer() as server:
        yield server


async def search(options, queries, topk=3, provider="json"):
    tool = WebSearchTool({"provider": provider, "options": options, "topk": topk}, None)
    await tool.startup()
    try:
        response, _, metrics = await tool.execute("i", {"query_list": queries})
        return json.loads(response.text or "")["result"], metrics
    finally:
        await tool.shutdown()


@pytest.mark.parametrize(
    ("service", "options", "request_"),
    [
        ("serper", SERPER, {"q": 'a & "b" {topk}', "num": 3}),
        ("tavily", TAVILY, {"query": 'a & "b" {topk}', "max_results": 3}),
        ("brave", BRAVE, {"q": 'a & "b" {topk}', "count": "3"}),
        ("searxng", SEARXNG, {"q": 'a & "b" {topk}', "format": "json", "safe": "true"}),
    ],
)
async def test_services_are_configuration(server, service, options, request_):
    options = {"url": f"{server.url}/{service}", **options}
    query = 'a & "b" {topk}'  # a query is no template
    text, metrics = await search(options, [query])
    assert server.requests == [(service, request_)]
    assert text == (
        f"Doc 1 (Title: {query} 1)\nhttps://example.org/1\nPage 1.\n\n"
        f"Doc 2 (Title: {query} 2)\nhttps://example.org/2\nPage 2."
    )
    assert metrics == {"queries": 1, "documents": 2, "status": "success"}
    assert await search(options, ["nothing"]) == (
        "No search results found.",
        {"queries": 1, "documents": 0, "status": "no_results"},
    )


async def test_a_query_in_the_address_is_quoted(server):
    options = {**SEARXNG, "url": f"{server.url}/searxng?q={{query}}&n={{topk}}", "params": None}
    text, _ = await search(options, ["a&q=b/c ö"], topk=1)
    assert server.requests == [("searxng", {"q": "a&q=b/c ö", "n": "1"})]
    assert text.startswith("Doc 1 (Title: a&q=b/c ö 1)")
    assert "Doc 2" not in text  # also where a service gives more than it was asked for


async def test_keys_stay_out_of_failures(server, monkeypatch, caplog):
    monkeypatch.setenv("TOOLJAX_TEST_KEY", "wrong-key-7")
    with caplog.at_level("DEBUG"), pytest.raises(ToolFailure) as caught:
        await search({"url": f"{server.url}/serper?key=${{TOOLJAX_TEST_KEY}}", **SERPER}, ["a"])
    assert str(caught.value) == f"{server.url}/serper answered with status 401: unknown key ***"
    ours = [record for record in caplog.records if record.name != "aiohttp.access"]  # the server's
    assert "wrong-key-7" not in "".join(record.getMessage() for record in ours)


async def test_an_answer_of_another_shape_is_told(server):
    options = {"url": f"{server.url}/searxng", **SEARXNG, "results": "results.0.title"}
    with pytest.raises(ToolFailure, match="answer has no list at 'results.0.title'"):
        await search(options, ["a"])
    options["results"] = "results"
    options["fields"] = {"title": "no.such", "snippet": "content.deeper"}
    text, _ = await search(options, ["a"])
    assert text.startswith("Doc 1 (Title: )\nhttps://example.org/1\n\nDoc 2")


class SlowProvider:
    """A user's own: waits, fails for "bad", and answers."""

    def __init__(self, options):
        self.pause_s = options["pause_s"]

    async def search(self, query, topk):
        if query == "bad":
            raise RuntimeError("quota used up")
        await asyncio.sleep(self.pause_s)
        return [SearchResult(query, "u", "s")] * (topk + 5)


async def test_a_provider_of_ones_own_and_queries_at_once():
    started = time.monotonic()
    text, metrics = await search({"pause_s": 0.2}, list("abcdef"), 1, f"{__name__}.SlowProvider")
    assert time.monotonic() - started < 1.0
    assert [part.split("\n")[0] for part in text.split("\n---\n")] == [
        f"Doc 1 (Title: {query})" for query in "abcdef"
    ]
    assert metrics["documents"] == 6


async def test_one_failed_query_fails_the_call_at_once():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="^quota used up$"):
        await search({"pause_s": 30}, ["a", "bad"], 1, f"{__name__}.SlowProvider")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "options.url is None, expected an address"),
        ({"url": "http://a"}, "{query} is in none of options.url"),
        ({"url": "http://a?{query}", "header": {}}, "unknown option 'header' of provider json"),
        ({"url": "http://a?{query}", "method": "PUT"}, "options.method is 'PUT'"),
        ({"url": "http://a?{query}", "fields": {"link": "x"}}, "options.fields names"),
        ({"url": "http://a?{query}", "params": "q"}, "options.params must be a mapping"),
        ({"url": "http://a?{query}", "headers": {"k": "${TOOLJAX_UNSET}"}}, "TOOLJAX_UNSET, which"),
    ],
)
def test_options_that_cannot_work_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        JsonProvider(options)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (None, "provider is None, expected one of .'json'. or an import path"),
        ("no.such.Thing", "provider 'no.such.Thing' cannot be imported"),
        ("json.nothing", "json has no class nothing"),
        ("collections.OrderedDict", r"has no method search\(query, topk\)"),
    ],
)
def test_a_provider_that_is_none_is_refused(name, problem):
    with pytest.raises(ValueError, match=problem):
        make_provider(name, {})


def test_the_shipped_services_are_valid(monkeypatch, request):
    """Those that are commented out too."""
    file = request.config.rootpath / "configs" / "tools" / "web_search.yaml"
    text = file.read_text()
    blocks = text.replace("      # options:", "      options:").replace("      #   ", "        ")
    blocks = blocks.split("      options:\n")[1:]
    for name in ("SERPER", "TAVILY", "BRAVE"):
        monkeypatch.setenv(f"{name}_API_KEY", "k")
    assert len(blocks) == 4
    for block in blocks:
        options = yaml.safe_load(block.split("      #")[0].split("    tool_schema")[0])
        JsonProvider(options)
