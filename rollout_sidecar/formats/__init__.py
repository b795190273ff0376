"""Tool-call formats by name."""

from rollout_sidecar.formats.base import ParsedCall, ToolFormat
from rollout_sidecar.formats.hermes import HermesFormat

__all__ = ["ParsedCall", "ToolFormat", "get_format"]

_FORMATS: dict[str, ToolFormat] = {"hermes": HermesFormat()}


def get_format(name: str) -> ToolFormat:
    """The format of that name."""
    if name not in _FORMATS:
        raise ValueError(f"unknown tool format {name!r}; there are: {', '.join(sorted(_FORMATS))}")
    return _FORMATS[name]
