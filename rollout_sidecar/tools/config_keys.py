"""Which keys the config of a tool or an interaction of ours may have: a misspelt one would be a setting that nobody
reads.

Classes of users may have any key; verl's keys are known wherever verl has them.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

from rollout_sidecar.tools.gate import CONFIG_KEYS

COMMON = (*CONFIG_KEYS, "type", "stateless")
"""Of every tool: its gate's, and those that say what kind of tool it is."""


def check_keys(
    config: Collection[Any], own: Iterable[str], where: str, common: Iterable[str] = COMMON
) -> None:
    """ValueError, starting with `where`, for a key that is neither in `own` nor in `common`."""
    known = {*own, *common}
    for key in config:
        if key in known:
            continue
        near = get_close_matches(str(key), sorted(known), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(known))}"
        raise ValueError(f"{where}: unknown key config.{key}; {hint}")
