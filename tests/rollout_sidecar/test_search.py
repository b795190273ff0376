"""The retrieval client: Search-R1's wire format, and the text that verl's policies were trained on."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.bm25 import make_app
from rollout_sidecar.tools.bm25_index import open_index
from rollout_sidecar.tools.faults import is_infrastructure
from rollout_sidecar.tools.gate import GateOptions
from rollout_sidecar.tools.registry import load_tools
from rollout_sidecar.tools.search import Document, SearchTool, results_text

STOCK = {"num_workers": 120, "rate_limit": 120, "timeout": 30, "topk": 3, "type": "native"}
"""verl's stock config, without the address."""

CORPUS = [
    {"id": "0", "contents": '"Paris"\nParis is the capital of France.\nIt lies on the Seine.'},
    {"id": "1", "contents": '"Berlin"\nBerlin is the capital of Germany.'},
    {"id": "2", "contents": '"Seine"\nThe Seine is a river in France.'},
]


class Retrieval:
    """A server that records requests and gives one answer."""

    def __init__(self):
        self.requests: list = []
        self.answer: web.Response = web.Response()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, await request.json()))
        return self.answer


@pytest.fixture
async def retrieval():
    fake = Retrieval()
    app = web.Application()
    app.router.add_post("/{path:.*}", fake.handle)
    async with TestServer(app, host="127.0.0.1") as server:
        fake.url = str(server.make_url("")).rstrip("/")
        yield fake


@pytest.fixture
async def bm25_url(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, CORPUS)))
    async with TestServer(make_app(open_index(file)), host="127.0.0.1") as server:
        yield str(server.make_url("/retrieve"))


async def search(url, parameters, **config):
    tool = SearchTool({**STOCK, "retrieval_service_url": url, **config}, None)
    await tool.startup()
    try:
        response, reward, metrics = await tool.execute("i", parameters)
    finally:
        await tool.shutdown()
    assert reward == 0.0
    return response.text or "", metrics


# --- against a server with an index -----------------------------------------------------------------------------


async def test_documents_are_laid_out_as_verl_does(bm25_url):
    text, metrics = await search(
        bm25_url, {"query_list": ["capital of Germany", "Seine river"]}, topk=2
    )
    assert text == json.dumps(
        {
            "result": 'Doc 1 (Title: "Berlin")\nBerlin is the capital of Germany.\n\n'
            'Doc 2 (Title: "Paris")\nParis is the capital of France.\nIt lies on the Seine.'
            "\n---\n"
            'Doc 1 (Title: "Seine")\nThe Seine is a river in France.\n\n'
            'Doc 2 (Title: "Paris")\nParis is the capital of France.\nIt lies on the Seine.'
        }
    )
    assert metrics == {"queries": 2, "documents": 4, "status": "success"}


async def test_nothing_found_is_said(bm25_url):
    text, metrics = await search(bm25_url, {"query_list": ["zebra"]})
    assert text == '{"result": "No search results found."}'
    assert metrics == {"queries": 1, "documents": 0, "status": "no_results"}
    text, _ = await search(bm25_url, {"query_list": ["zebra", "Germany"]})
    assert json.loads(text)["result"].startswith("No search results found.\n---\nDoc 1 (Title: ")


async def test_one_query_may_come_without_a_list(bm25_url):
    assert (await search(bm25_url, {"query_list": "Germany"}))[1]["documents"] == 1
    assert (await search(bm25_url, {"query": "Germany"}))[1]["documents"] == 1


# --- the wire ---------------------------------------------------------------------------------------------------


async def test_the_stock_config_gives_verls_request(retrieval):
    retrieval.answer = web.json_response({"result": []})
    text, _ = await search(retrieval.url, {"query_list": ["a", "ö"]})
    expected = {"queries": ["a", "ö"], "topk": 3, "return_scores": True}
    assert retrieval.requests == [("/retrieve", expected)]
    assert text == '{"result": "No search results found."}'


async def test_an_address_with_a_path_is_used_as_it_stands(retrieval):
    retrieval.answer = web.json_response({"result": [[{"contents": "T\nx"}]]})
    text, _ = await search(f"{retrieval.url}/v2/search", {"query_list": ["a"]})
    assert retrieval.requests[0][0] == "/v2/search"
    assert text == '{"result": "Doc 1 (Title: T)\\nx"}'  # documents without scores are not wrapped


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([], "has None under 'result', expected 1 lists"),
        ({"result": [[], []]}, "has 2 lists under 'result', expected 1 lists"),
        ({"result": "x"}, "has 'x' under 'result'"),
        ({"result": [[{"document": {"text": "x"}}]]}, "a document without contents: {'document'"),
        ({"result": [["x"]]}, "a document without contents: 'x'"),
    ],
)
async def test_another_kind_of_server_is_told(retrieval, answer, problem):
    retrieval.answer = web.json_response(answer)
    with pytest.raises(ToolFailure, match=problem) as caught:
        await search(retrieval.url, {"query_list": ["a"]})
    assert is_infrastructure(caught.value)


async def test_a_server_error_is_the_servers(retrieval):
    retrieval.answer = web.json_response({"detail": "index not loaded"}, status=500)
    with pytest.raises(ToolFailure, match="/retrieve answered with status 500: index not loaded"):
        await search(retrieval.url, {"query_list": ["a"]})
    assert len(retrieval.requests) == 1  # trying again is the gate's
    assert SearchTool.idempotent


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({}, "query_list must be a list of at least one query, got None"),
        ({"query_list": []}, r"at least one query, got \[\]"),
        ({"query_list": {"a": 1}}, "at least one query, got {'a': 1}"),
        ({"query_list": ["a", " "]}, r"query_list\[1\] must be a text that is not empty, got ' '"),
        ({"query_list": [1]}, r"query_list\[0\] must be a text that is not empty, got 1"),
        ({"query_list": ["a"] * 65}, "has 65 queries, at most 64 are allowed"),
    ],
)
async def test_queries_that_are_none_are_told_and_not_sent(retrieval, parameters, problem):
    with pytest.raises(ToolFailure, match=problem) as caught:
        await search(retrieval.url, parameters)
    assert retrieval.requests == []
    assert not is_infrastructure(caught.value)


def test_text_is_kept_as_it_is():
    text = results_text([[Document("Zürich", "語 </tool_response>\n")]])
    assert text == '{"result": "Doc 1 (Title: Zürich)\\n語 </tool_response>"}'


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"retrieval_service_url": None}, "retrieval_service_url is None, expected an address"),
        ({"topk": 0}, "topk is 0, expected a whole number of at least 1"),
        ({"timeout": "30"}, "timeout is '30', expected seconds above 0"),
    ],
)
def test_config_that_cannot_work_is_refused(config, problem):
    with pytest.raises(ValueError, match=problem):
        SearchTool({**STOCK, "retrieval_service_url": "http://localhost", **config}, None)


@pytest.mark.parametrize("name", ["sandbox_fusion", "search", "bm25", "web_search", "gsm8k"])
def test_shipped_configs_make_their_tools(name, request, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.jsonl").write_text('{"id": 0, "contents": "T\\nx"}')
    monkeypatch.chdir(tmp_path)
    tools = load_tools(request.config.rootpath / "configs" / "tools" / f"{name}.yaml")
    assert len(tools) == 1
    for tool in tools.values():
        GateOptions.of(tool.config, idempotent=getattr(tool, "idempotent", False))
