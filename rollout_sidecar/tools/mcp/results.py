"""What an MCP tool answered, as text for the policy."""

import json
from collections.abc import Sequence
from typing import Any

from rollout_sidecar.errors import safe_text


def text_of(content: Sequence[Any]) -> str:
    """The parts of a result: texts as they are, one sentence for each that is none. Joined by line breaks (verl: by
    spaces, which runs tables and lists together)."""
    return safe_text("\n".join(_part(part) for part in content))


def structured_text(structured: Any) -> str:
    """Structured content, for a result without parts."""
    return safe_text(json.dumps(structured, ensure_ascii=False))


def _part(part: Any) -> str:
    kind = getattr(part, "type", type(part).__name__)
    if kind == "text":
        return part.text
    if kind in ("image", "audio"):
        size = len(part.data) * 3 // 4  # base64
        what = "An image" if kind == "image" else "A sound"
        return f"[{what} ({part.mime_type}, {size} bytes) that cannot be shown.]"
    if kind == "resource_link":
        about = f": {part.description}" if part.description else ""
        return f"[A link to the resource {part.name!r} at {part.uri}{about}]"
    if kind == "resource":
        resource = part.resource
        text = getattr(resource, "text", None)
        if text is not None:
            return text
        size = len(getattr(resource, "blob", "")) * 3 // 4
        return f"[The resource {resource.uri} ({resource.mime_type}, {size} bytes) that cannot be shown.]"
    return f"[Content of the kind {kind!r} that cannot be shown.]"
