"""Search in a JSONL file of your own, with no server: an embedded BM25 index; see bm25_index.py.

    config:
      type: native
      corpus: corpus.jsonl          # lines of {"id", "contents"} or {"title", "text"}; beside this file, or a path
      topk: 3
      cache: true                   # keep the index beside the file
      k1: 1.5                       # BM25's
      b: 0.75

The policy sees the same text as from a retrieval server. The other way round, this is such a server, with Search-R1's
wire format, for rollout_sidecar/tools/search.py or verl:

    python -m rollout_sidecar.tools.bm25 serve --corpus data/corpus.jsonl --port 8000
"""

import argparse
import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from rollout_sidecar.tools.bm25_index import K1, B, Bm25Index, open_index
from rollout_sidecar.tools.http import positive_count
from rollout_sidecar.tools.search import MAX_QUERIES, Document, SearchToolBase

MAX_TOPK = 1000


class Bm25SearchTool(SearchToolBase):
    """Stateless. The index is opened or built when the sidecar starts."""

    config_keys = ("corpus", "topk", "cache", "k1", "b")
    path_keys = ("corpus",)

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """ValueError for settings that are none; the file is read in `startup`."""
        if not isinstance(config.get("corpus"), str) or not config["corpus"]:
            raise ValueError(
                f"corpus is {config.get('corpus')!r}, expected the path of a JSONL file"
            )
        self._corpus: str = config["corpus"]
        self._topk = positive_count(config, "topk", 3)
        self._use_cache = _flag(config, "cache", True)
        self._k1, self._b = _number(config, "k1", K1, 100.0), _number(config, "b", B, 1.0)
        self._index: Bm25Index | None = None
        self._opening = asyncio.Lock()
        super().__init__(config, tool_schema)

    async def startup(self) -> None:
        """Opens or builds the index. ValueError for a file that cannot be read."""
        async with self._opening:
            if self._index is None:
                self._index = await asyncio.to_thread(
                    open_index, self._corpus, k1=self._k1, b=self._b, use_cache=self._use_cache
                )

    async def shutdown(self) -> None:
        """Lets go of the index."""
        self._index = None

    async def find(self, queries: list[str]) -> list[list[Document]]:
        """Looks up each query."""
        await self.startup()  # nothing to do, unless nobody called it
        index = self._index
        assert index is not None, "startup opens the index"

        def look_up() -> list[list[Document]]:
            return [
                [
                    Document.from_contents(entry.contents)
                    for entry, _ in index.search(query, self._topk)
                ]
                for query in queries
            ]

        return await asyncio.to_thread(look_up)


def make_app(index: Bm25Index, topk: int = 3) -> web.Application:
    """A retrieval server: POST /retrieve as in search.py, GET /healthz. A request that does not fit is 422."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError as error:
            return _refused(f"the body is not JSON: {error}")
        queries = body.get("queries") if isinstance(body, dict) else None
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            return _refused("queries must be a list of texts")
        if len(queries) > MAX_QUERIES:
            return _refused(f"at most {MAX_QUERIES} queries are answered at once")
        wanted = body.get("topk") or topk
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 < wanted <= MAX_TOPK:
            return _refused(f"topk must be a whole number from 1 to {MAX_TOPK}")
        found = await asyncio.to_thread(lambda: [index.search(query, wanted) for query in queries])
        scored = bool(body.get("return_scores"))
        result = [[_shown(*hit, scored) for hit in hits] for hits in found]
        return web.json_response({"result": result})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"documents": len(index.entries)})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    app.router.add_get("/healthz", health)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """`serve --corpus FILE [--host H] [--port P] [--topk N]`; port 0 takes a free one, and the address is printed."""
    parser = argparse.ArgumentParser(prog="python -m rollout_sidecar.tools.bm25")
    serve = parser.add_subparsers(required=True).add_parser(
        "serve", help="answer Search-R1's retrieval requests from a JSONL file"
    )
    serve.add_argument("--corpus", required=True, help="JSONL: {id, contents} or {title, text}")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument("--topk", type=int, default=3, help="where a request names none")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        index = open_index(options.corpus)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    _serve(make_app(index, options.topk), options.host, options.port, len(index.entries))


def _serve(app: web.Application, host: str, port: int, documents: int) -> None:

    async def run() -> None:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        address, bound = runner.addresses[0][:2]
        print(f"{documents} documents at http://{address}:{bound}/retrieve", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        pass


def _shown(entry: Any, score: float, scored: bool) -> dict[str, Any]:
    document = {"id": entry.id, "contents": entry.contents}
    return {"document": document, "score": score} if scored else document


def _refused(detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=422)


def _flag(config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected true or false")
    return value


def _number(config: dict[str, Any], name: str, default: float, most: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r}, expected a number from 0 to {most:g}")
    return float(value)


if __name__ == "__main__":
    main()
