"""Values of formats that write them without their type: `<parameter=days>3</parameter>` is 3 or "3", as the tool's
schema says.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_sidecar.formats.base import Tools
from rollout_sidecar.formats.literals import read_python
from rollout_sidecar.formats.reading import decode_json, skip_space

_JSON_TYPES = {
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def parameters_of(tools: Tools | None, name: str) -> dict[str, Any]:
    """The `parameters` of the tool of that name; {} if there is none or it has none."""
    for tool in tools or ():
        function = tool.get("function") or tool
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return dict(parameters) if isinstance(parameters, Mapping) else {}
    return {}


def read_value(text: str, parameters: Mapping[str, Any], argument: str) -> tuple[Any, str]:
    """The value of an argument that was written as `text`, and what is wrong with it.

    A text where the schema says string stays as it is. Where it says something else, the text is read as JSON, or as a
    Python literal, which some templates write; a scalar that is neither stays text, for the check of the arguments to
    speak of. Where it says nothing, JSON that is not a string is read, and all else stays text.
    """
    allowed = _types(_property(parameters, argument), parameters)
    value, error = read_literal(text)
    if error and allowed & {"array", "object"} and "string" not in allowed:
        return None, not_json(argument, error)
    if error or isinstance(value, str) or ("string" in allowed and not _fits(value, allowed)):
        return text, ""
    return value, ""


def not_json(argument: str, error: str) -> str:
    """That an argument's value cannot be read."""
    return f"the value of {argument!r} is not valid JSON: {error.removeprefix('invalid JSON: ')}"


def read_literal(text: str) -> tuple[Any, str]:
    """The JSON value, or the Python literal, that is all of `text`; and what is wrong with it."""
    value, end, error = decode_json(text, 0)
    if not error and skip_space(text, end) == len(text):
        return value, ""
    value, no_python = read_python(text)
    if not no_python and not isinstance(value, str):
        return value, ""
    return None, error or f"text follows the value: {text[end : end + 20].strip()!r}"


def _fits(value: Any, allowed: set[str]) -> bool:
    name = _JSON_TYPES[type(value)]
    return name in allowed or (name == "integer" and "number" in allowed)


def _property(parameters: Mapping[str, Any], argument: str) -> Any:
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and argument in properties:
        return properties[argument]
    return parameters.get("additionalProperties")


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, (list, tuple)):
        return {name for name in declared if isinstance(name, str)}
    choices = (
        schema.get("enum") if "enum" in schema else [schema["const"]] if "const" in schema else None
    )
    if isinstance(choices, (list, tuple)):
        return {_JSON_TYPES.get(type(choice), "") for choice in choices}
    found: set[str] = set()
    for alternative in _alternatives(schema, root):
        types = _types(alternative, root, depth + 1)
        if not types:
            return set()
        found |= types
    return found


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    for key in ("anyOf", "oneOf"):
        yield from schema.get(key) or ()
    yield from (schema.get("allOf") or ())[:1]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield target
