"""Reads demonstrations: whole conversations to imitate, from JSON Lines or Parquet.

A row is {"messages": [...], "tools": [OpenAI function schemas] or null}. Assistant messages may carry tool_calls, or
the calls as text in their content. In Parquet, write tools (and a call's arguments) as JSON text: Arrow would give all
schemas the fields of each other; those that come back as None are left out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_sidecar.protocol import Message
from tooljax.data.records import Row, StrPath, read_all, read_messages, shown
from tooljax.data.source import RowSource


@dataclass(frozen=True)
class Demonstration:
    """One conversation to imitate, and the tools that it was held with."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    row_id: str
    """"<file name without suffix>:<row in the file>"."""


class DemonstrationSource(RowSource[Demonstration]):
    """The demonstrations of each step of the cold start."""

    rows_name = "demonstrations"
    files_setting = "sft.demonstrations"
    per_step_setting = "sft.conversations_per_step"


def read_demonstrations(paths: Sequence[StrPath]) -> list[Demonstration]:
    """The demonstrations of all files, in order. ValueError names file, row and field of what cannot be read."""
    return [_demonstration(row_id, row) for row_id, row in read_all(paths)]


def _demonstration(row_id: str, row: Row) -> Demonstration:
    if row.values.get("messages") is None:
        raise ValueError(
            f"{row.where}: messages is missing (the row has: {', '.join(row.values) or 'nothing'}); "
            'a demonstration is {"messages": [...], "tools": [...] or null}'
        )
    messages = read_messages(row.values["messages"], field="messages", where=row.where)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"{row.where}: messages has no assistant message, so there is nothing to imitate; leave the row out"
        )
    return Demonstration(messages, _schemas(row.values.get("tools"), row.where), row_id)


def _schemas(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"{where}: tools is text, but not valid JSON: {error}") from error
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"{where}: tools must be a list of function schemas, got {shown(tools)}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{where}: tools[{i}] must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, '
                f"got {shown(tool)}"
            )
    return tools or None
