"""Tool-call formats by name, and the format that a chat template asks for."""

from rollout_sidecar.formats.base import ParsedCall, ToolFormat
from rollout_sidecar.formats.choice import Choice, choose_format, explain_choice
from rollout_sidecar.formats.registry import format_names, get_format

__all__ = [
    "Choice",
    "ParsedCall",
    "ToolFormat",
    "choose_format",
    "explain_choice",
    "format_names",
    "get_format",
]
