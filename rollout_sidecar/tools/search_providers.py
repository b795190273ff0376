"""Where web searches go: the protocol of a provider, and one that speaks to any search API that answers JSON.

    provider: json
    options:
      url: https://google.serper.dev/search
      method: POST                            # or GET
      headers: {X-API-KEY: "${SERPER_API_KEY}"}
      body: {q: "{query}", num: "{topk}"}     # or params, for GET
      results: organic                        # where the list of results is: names and numbers, with dots between
      fields: {title: title, url: link, snippet: snippet}
      timeout: 20

"{query}" and "{topk}" are put in wherever they appear in url, params and body; a value that is "{topk}" alone becomes a
number. ${NAME} is read from the environment, and never shown. configs/tools/web_search.yaml has four services.
"""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote

from rollout_sidecar.tools.http import (
    HttpClient,
    HttpFailure,
    checked_url,
    expand_environment,
    positive_seconds,
)


class SearchResult(NamedTuple):
    """A page that was found."""

    title: str
    url: str
    snippet: str


@runtime_checkable
class SearchProvider(Protocol):
    """Made once, from the `options` of the tool's config. It may have `startup()` and `shutdown()`, as tools do."""

    async def search(self, query: str, topk: int) -> list[SearchResult]:
        """The best pages, best first, at most topk. Raises ToolFailure, or anything else, with the reason."""
        ...


class JsonProvider:
    """A search API that answers JSON, described by the options above."""

    def __init__(self, options: Mapping[str, Any]):
        """ValueError for options that are none, and for a variable that is not set."""
        known = {"url", "method", "headers", "params", "body", "results", "fields", "timeout"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(
                f"unknown option {unknown[0]!r} of provider json; there are: {sorted(known)}"
            )
        given, secrets = expand_environment(
            {key: value for key, value in options.items() if value is not None}, "options"
        )
        self._url = checked_url(given.get("url"), "options.url")
        self._params = _mapping(given, "params")
        self._body: Any = given.get("body")
        self._method = str(given.get("method") or ("GET" if self._body is None else "POST")).upper()
        if self._method not in ("GET", "POST"):
            raise ValueError(f"options.method is {self._method!r}, expected GET or POST")
        if "{query}" not in str((self._url, self._params, self._body)):
            raise ValueError("{query} is in none of options.url, options.params and options.body")
        self._results = str(given.get("results") or "")
        fields = {"title": "title", "url": "url", "snippet": "snippet", **_mapping(given, "fields")}
        self._fields = {name: str(path) for name, path in fields.items()}
        if set(fields) != {"title", "url", "snippet"}:
            raise ValueError(f"options.fields names {sorted(fields)}, expected title, url, snippet")
        self._timeout_s = positive_seconds(given, "timeout", default=20.0)
        self._http = HttpClient(
            headers={key: str(value) for key, value in _mapping(given, "headers").items()},
            secrets=secrets,
        )

    async def startup(self) -> None:
        """Opens the connection pool."""
        await self._http.open()

    async def shutdown(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def search(self, query: str, topk: int) -> list[SearchResult]:
        """Asks the service. HttpFailure if it gives no usable answer."""
        params = {key: _as_text(_filled(each, query, topk)) for key, each in self._params.items()}
        answer = await self._http.request_json(
            self._method,
            _filled(self._url, quote(query, safe=""), topk),
            params=params or None,
            body=None if self._body is None else _filled(self._body, query, topk),
            timeout_s=self._timeout_s,
        )
        found = _at(answer, self._results)
        if found is None:  # services leave the list out where they found nothing
            found = [] if isinstance(answer, dict) else None
        if not isinstance(found, list):
            place = f"at {self._results!r}" if self._results else "at its top"
            raise HttpFailure(f"the search service's answer has no list {place}", "broken")
        return [self._result(item) for item in found[:topk]]

    def _result(self, item: Any) -> SearchResult:
        values = {name: _at(item, path) for name, path in self._fields.items()}
        return SearchResult(
            **{name: "" if value is None else str(value) for name, value in values.items()}
        )


PROVIDERS = {"json": JsonProvider}


def make_provider(name: Any, options: Mapping[str, Any]) -> SearchProvider:
    """The provider of that name, or of that import path (module.Class). ValueError says what is wrong with it."""
    if name in PROVIDERS:
        return PROVIDERS[name](options)
    module_name, _, class_name = str(name or "").rpartition(".")
    if not module_name:
        raise ValueError(
            f"provider is {name!r}, expected one of {sorted(PROVIDERS)} or an import path, module.Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise ValueError(f"provider {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"provider {name!r}: {module_name} has no class {class_name}")
    provider = found(options)
    if not isinstance(provider, SearchProvider):
        raise ValueError(f"provider {name!r} has no method search(query, topk)")
    return provider


def _filled(value: Any, query: str, topk: int) -> Any:
    """The template with query and topk in it. A query is never read as a template."""
    if value == "{topk}":
        return topk
    if isinstance(value, str):
        before, *after = value.split("{query}")
        parts = [part.replace("{topk}", str(topk)) for part in (before, *after)]
        return query.join(parts)
    if isinstance(value, dict):
        return {key: _filled(item, query, topk) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, query, topk) for item in value]
    return value


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _at(value: Any, path: str) -> Any:
    """What is at a path as "web.results" or "items.0.link"; None if it leads nowhere."""
    for name in path.split(".") if path else ():
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _mapping(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = options.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"options.{name} must be a mapping, got {value!r:.80}")
    return value
