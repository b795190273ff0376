"""Search services on loopback with the request and answer shapes of four real ones, each checking its key:

POST /serper (X-API-KEY; {"q", "num"} -> {"organic": [{"title", "link", "snippet"}]}), POST /tavily (Authorization;
{"query", "max_results"} -> {"results": [{"title", "url", "content"}]}), GET /brave (X-Subscription-Token; q, count ->
{"web": {"results": [{"title", "url", "description"}]}}), GET /searxng (q, format=json -> {"results": [...]}).

They know two pages about any query. A query "nothing" finds none: the list is then left out, as Serper and Brave do.
"""

from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

KEY = "sesame-42"


class WebSearchServer:
    """`async with WebSearchServer() as server:`; server.url, server.requests."""

    def __init__(self):
        self.requests: list[tuple[str, dict[str, Any]]] = []
        app = web.Application()
        app.router.add_post("/serper", self._serper)
        app.router.add_post("/tavily", self._tavily)
        app.router.add_get("/brave", self._brave)
        app.router.add_get("/searxng", self._searxng)
        self._server = TestServer(app, host="127.0.0.1")

    async def __aenter__(self) -> "WebSearchServer":
        await self._server.start_server()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("/")).rstrip("/")

    async def _serper(self, request: web.Request) -> web.Response:
        body = await request.json()
        pages = self._pages("serper", body, body["q"], request.headers.get("X-API-KEY"))
        return web.json_response(
            {"organic": [{"title": t, "link": u, "snippet": s, "position": 1} for t, u, s in pages]}
            if pages
            else {"searchParameters": body}
        )

    async def _tavily(self, request: web.Request) -> web.Response:
        body = await request.json()
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        pages = self._pages("tavily", body, body["query"], key)
        return web.json_response(
            {"results": [{"title": t, "url": u, "content": s, "score": 0.5} for t, u, s in pages]}
        )

    async def _brave(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        pages = self._pages("brave", query, query["q"], request.headers.get("X-Subscription-Token"))
        found = [{"title": t, "url": u, "description": s} for t, u, s in pages]
        return web.json_response({"web": {"results": found}} if pages else {"type": "search"})

    async def _searxng(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        pages = self._pages("searxng", query, query["q"], KEY)
        return web.json_response(
            {"results": [{"title": t, "url": u, "content": s} for t, u, s in pages]}
        )

    def _pages(
        self, service: str, request: dict[str, Any], query: str, key: str | None
    ) -> list[tuple[str, str, str]]:
        self.requests.append((service, request))
        if key != KEY:
            raise web.HTTPUnauthorized(text=f"unknown key {key}")
        if query == "nothing":
            return []
        return [(f"{query} {n}", f"https://example.org/{n}", f"Page {n}.") for n in (1, 2)]
