"""Search on the web, through a provider of your choice; see search_providers.py.

    config:
      type: native
      provider: json            # or an import path of your own, module.Class
      options: {...}            # the provider's
      topk: 3
      num_workers: 8            # and rate_limit, timeout_s, ...: the tool's gate

The policy sees the same text as from a retrieval server, with each page's address in front of its snippet. Queries of
one call are looked up at the same time.
"""

import asyncio
from typing import Any

from rollout_sidecar.tools.http import positive_count
from rollout_sidecar.tools.search import Document, SearchToolBase
from rollout_sidecar.tools.search_providers import SearchResult, make_provider


class WebSearchTool(SearchToolBase):
    """Stateless. One provider serves all trajectories."""

    config_keys = ("provider", "options", "topk")

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None):
        """ValueError for a provider or options that are none."""
        options = config.get("options") or {}
        if not isinstance(options, dict):
            raise ValueError(f"options must be a mapping, got {options!r:.80}")
        self._topk = positive_count(config, "topk", 3)
        self._provider: Any = make_provider(config.get("provider"), options)
        super().__init__(config, tool_schema)

    async def startup(self) -> None:
        """Starts the provider, if it has something to start."""
        if hasattr(self._provider, "startup"):
            await self._provider.startup()

    async def shutdown(self) -> None:
        """Stops the provider."""
        if hasattr(self._provider, "shutdown"):
            await self._provider.shutdown()

    async def find(self, queries: list[str]) -> list[list[Document]]:
        """Looks up all queries; if one fails, the others are given up and the call fails."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._provider.search(query, self._topk)) for query in queries
                ]
        except ExceptionGroup as errors:
            # One reason is enough for the policy, and its type tells the gate whose fault it was.
            raise errors.exceptions[0] from None
        return [[_document(result) for result in task.result()[: self._topk]] for task in tasks]


def _document(result: SearchResult) -> Document:
    return Document(result.title, f"{result.url}\n{result.snippet}".strip())
