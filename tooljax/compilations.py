"""Counts what is compiled while training: each compilation stops a step for up to minutes, and a few are enough."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger("tooljax")

Kind = tuple[tuple[int, ...], bool]
"""The shape of a microbatch, and whether prompts are shared in it."""


class Compilations:
    """Of the programs that updates run, for the shapes of microbatches that they run on."""

    def __init__(self, programs: Sequence[Callable[..., Any]]):
        self._programs = programs
        self._counted = 0
        self._known: set[Kind] = set()
        self._used: set[Kind] = set()

    def used_for(self, shape: tuple[int, ...], *, shared_prompts: bool = False) -> None:
        """A microbatch of this shape was computed."""
        self._used.add((shape, shared_prompts))

    def since_last(self) -> int:
        """How many programs were compiled since the last call; call it once a step.

        After the first step, a warning says for which microbatches.
        """
        total = sum(program._cache_size() for program in self._programs)  # type: ignore[attr-defined]
        compiled, self._counted = total - self._counted, total
        if compiled and self._known:
            log.warning("%d programs of the update were compiled %s", compiled, self._why())
        self._known |= self._used
        self._used = set()
        return compiled

    def _why(self) -> str:
        new = self._used - self._known
        if new:
            return f"for microbatches not seen before: {_listed(new)}; fewer batch.row_lengths give fewer shapes"
        return f"again, for microbatches seen before: {_listed(self._used)}; dtypes or placements have changed"


def _listed(kinds: set[Kind]) -> str:
    listed = [
        " x ".join(map(str, shape)) + " with shared prompts" * shared
        for shape, shared in sorted(kinds)
    ]
    return ", ".join(listed) + " (rows x tokens)"
