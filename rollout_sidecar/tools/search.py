"""Search on a retrieval server with Search-R1's wire format. Reads verl's stock config unchanged:

    config:
      type: native
      retrieval_service_url: http://127.0.0.1:8000/retrieve    # "/retrieve" is added if there is no path
      num_workers: 120           # calls at once, read by the tool's gate
      rate_limit: 120
      timeout: 30                # seconds for a request
      topk: 3

    POST retrieval_service_url {"queries": [text], "topk": n, "return_scores": true}
    -> {"result": [[{"document": {"contents": "Title\\nText"}, "score": x}, ...], ...]}, a list for each query

`python -m rollout_sidecar.tools.bm25 serve` is such a server. The text that the policy sees is verl's, for every search
tool here: {"result": "Doc 1 (Title: T)\\nText\\n\\nDoc 2 ...\\n---\\n<second query>"}.

Differs from verl: a search that fails is a failed call with the reason, not a result that says so; the gate tries again
within the call's deadline (verl: ten times, 45 s of pauses); a query without results says so even if others have some.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_sidecar.tools.base import BaseTool, ToolFailure, ToolResponse
from rollout_sidecar.tools.http import (
    HttpClient,
    HttpFailure,
    checked_url,
    expand_environment,
    positive_count,
    positive_seconds,
    with_default_path,
)

NO_RESULTS = "No search results found."
MAX_QUERIES = 64
"""Of one call."""

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches for documents about each of the queries.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "Queries that are answered independently of each other",
                }
            },
            "required": ["query_list"],
        },
    },
}


class Document(NamedTuple):
    """One result, as the policy sees it."""

    title: str
    text: str

    @classmethod
    def from_contents(cls, contents: str) -> "Document":
        """Search-R1's convention: the first line is the title."""
        title, _, text = contents.partition("\n")
        return cls(title, text)


class SearchToolBase(BaseTool):
    """A tool that looks up queries. Subclasses implement `find`."""

    idempotent = True
    stateless = True

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema of the file's entry, else the built-in one."""
        return getattr(self, "tool_schema", None) or SCHEMA

    async def find(self, queries: list[str]) -> list[list[Document]]:
        """The documents for each query, best first."""
        raise NotImplementedError(f"{type(self).__name__} does not implement find")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Looks up parameters["query_list"], or the one in "query". ToolFailure if that is not possible."""
        queries = queries_of(parameters)
        found = await self.find(queries)
        documents = sum(map(len, found))
        metrics = {
            "queries": len(queries),
            "documents": documents,
            "status": "success" if documents else "no_results",
        }
        return ToolResponse(text=results_text(found)), 0.0, metrics


class SearchTool(SearchToolBase):
    """Stateless client of a retrieval server."""

    config_keys = ("retrieval_service_url", "topk", "headers")

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """ValueError for an address or a limit that is none."""
        url = checked_url(config.get("retrieval_service_url"), "retrieval_service_url")
        self._url = with_default_path(url, "/retrieve")
        self._timeout_s = positive_seconds(config, "timeout", "default_timeout", default=30.0)
        self._topk = positive_count(config, "topk", 3)
        headers, secrets = expand_environment(config.get("headers") or {}, "headers")
        self._http = HttpClient(headers=headers, secrets=secrets)
        super().__init__(config, tool_schema)

    async def startup(self) -> None:
        """Opens the connection pool. The server may start later."""
        await self._http.open()

    async def shutdown(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def find(self, queries: list[str]) -> list[list[Document]]:
        """Asks the server. HttpFailure if it gives no usable answer."""
        body = {"queries": queries, "topk": self._topk, "return_scores": True}
        answer = await self._http.request_json(
            "POST", self._url, body=body, timeout_s=self._timeout_s
        )
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list) or (result and len(result) != len(queries)):
            got = f"{len(result)} lists" if isinstance(result, list) else f"{result!r:.80}"
            raise HttpFailure(
                f"the retrieval server's answer has {got} under 'result', expected"
                f" {len(queries)} lists of documents",
                "broken",
            )
        return [[_document(item) for item in _items(each)] for each in result]


def queries_of(parameters: Mapping[str, Any]) -> list[str]:
    """The queries of a call. ToolFailure for anything but a list of texts with something in them."""
    name = "query" if "query_list" not in parameters and "query" in parameters else "query_list"
    queries = parameters.get(name)
    if isinstance(queries, str):  # a list of one, written as models often do
        queries = [queries]
    if not isinstance(queries, list) or not queries:
        raise ToolFailure(f"{name} must be a list of at least one query, got {queries!r:.80}")
    if len(queries) > MAX_QUERIES:
        raise ToolFailure(f"{name} has {len(queries)} queries, at most {MAX_QUERIES} are allowed")
    for i, query in enumerate(queries):
        if not isinstance(query, str) or not query.strip():
            raise ToolFailure(f"{name}[{i}] must be a text that is not empty, got {query!r:.80}")
    return queries


def results_text(found: Sequence[Sequence[Document]]) -> str:
    """Documents as verl shows them."""
    if not any(found):
        return json.dumps({"result": NO_RESULTS})
    parts = [
        "".join(
            f"Doc {i} (Title: {document.title})\n{document.text}\n\n"
            for i, document in enumerate(documents, 1)
        ).strip()
        or NO_RESULTS
        for documents in found
    ]
    return json.dumps({"result": "\n---\n".join(parts)}, ensure_ascii=False)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _document(item: Any) -> Document:
    """With scores, documents are wrapped; without, they are not."""
    document = item.get("document", item) if isinstance(item, dict) else {}
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        raise HttpFailure(
            f"the retrieval server's answer has a document without contents: {item!r:.80}", "broken"
        )
    return Document.from_contents(contents)
