"""What a list of trajectories is asked for: filters, order and page, from the query of a URL."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from tooljax.view.index import Row, StepIndex

MAX_LIMIT = 500
"""Rows of a page, at most."""


class Filters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of a step's trajectories, in which order. Empty strings filter nothing."""

    order: Literal["stored", "worst", "best"] = "stored"
    status: str = ""
    """Why the trajectory ended."""
    tool: str = ""
    """A tool that it called."""
    error: str = ""
    """Status of a call that failed; "any" for one of them, "none" for trajectories without."""
    dropped: str = ""
    """Why it was left out of the loss; "any" for one of the reasons, "none" for what was trained on."""
    min_reward: float | None = None
    max_reward: float | None = None
    group: int | None = None
    text: str = ""
    """In its messages, tool results, error or task id; upper and lower case are the same."""

    def select(self, step: StepIndex) -> list[Row]:
        """The rows, in order."""
        places = range(len(step.rows)) if self.order == "stored" else step.worst
        if self.order == "best":
            unknown = [row.reward is None for row in step.rows]  # these come last here too
            backwards = step.worst[::-1]
            places = sorted(backwards, key=unknown.__getitem__)
        rows = [row for row in map(step.rows.__getitem__, places) if self._takes(row)]
        if self.text and rows:
            found = step.holding(self.text)
            rows = [row for row in rows if row.index in found]
        return rows

    def _takes(self, row: Row) -> bool:
        low, high = self.min_reward, self.max_reward
        bounded = low is not None or high is not None
        return (
            self.status in ("", row.status)
            and (not self.tool or self.tool in row.tools)
            and _among(self.error, row.errors)
            and _among(self.dropped, [row.dropped] if row.dropped else [])
            and (self.group is None or self.group == row.group)
            and not (bounded and row.reward is None)
            and (low is None or row.reward is None or row.reward >= low)
            and (high is None or row.reward is None or row.reward <= high)
        )


class Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of a list."""

    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)] = 100


def parse(query: Mapping[str, str], *kinds: type[msgspec.Struct]) -> tuple[Any, ...]:
    """A struct of each kind, from a query that holds nothing else. ValueError names what is wrong."""
    names = [set(kind.__struct_fields__) for kind in kinds]
    unknown = sorted(set(query) - set().union(*names))
    if unknown:
        known = ", ".join(sorted(set().union(*names)))
        raise ValueError(f"unknown parameter {unknown[0]!r}; there are: {known}")
    parts = []
    for kind, mine in zip(kinds, names, strict=True):
        given = {name: value for name, value in query.items() if name in mine and value != ""}
        parts.append(msgspec.convert(given, kind, strict=False))
    return tuple(parts)


def _among(wanted: str, have: list[str]) -> bool:
    if wanted == "any":
        return bool(have)
    if wanted == "none":
        return not have
    return not wanted or wanted in have
