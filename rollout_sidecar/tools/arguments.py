"""Checks the arguments of a tool call against the tool's schema, and says what is wrong in a sentence for the policy.

Covers what function schemas use: type, enum, const, required, properties, additionalProperties, items, anyOf, oneOf.
Other JSON Schema keywords are accepted unread. Stricter than JSON Schema in one place: an argument that the schema does
not name is an error unless additionalProperties allows it, because it is nearly always a misspelt name.
"""

import json
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """None if the arguments fit, else what is wrong.

    Args:
        schema: an OpenAI function schema, or the `parameters` of one.
        arguments: as parsed from the call.
    """
    parameters = (
        schema.get("function", schema).get("parameters") if "function" in schema else schema
    )
    if not parameters:
        return None
    properties = parameters.get("properties") or {}
    if parameters.get("properties") is not None and not parameters.get("additionalProperties"):
        unknown = [name for name in arguments if name not in properties]
        if unknown:
            known = ", ".join(properties) or "none"
            return f"unknown argument {unknown[0]!r}; the arguments are: {known}"
    return _check({**parameters, "type": "object"}, dict(arguments), "")


def _check(schema: Any, value: Any, where: str) -> str | None:
    if not isinstance(schema, Mapping):
        return None
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        problems = [_check(alternative, value, where) for alternative in alternatives]
        if None not in problems:
            return problems[0]
    return (
        _check_type(schema.get("type"), value, where)
        or _check_choice(schema, value, where)
        or (_check_object(schema, value, where) if isinstance(value, dict) else None)
        or (_check_items(schema, value, where) if isinstance(value, list) else None)
    )


def _check_type(type_: Any, value: Any, where: str) -> str | None:
    allowed = [type_] if isinstance(type_, str) else list(type_ or ())
    if not allowed or any(_is(value, name) for name in allowed):
        return None
    return f"argument {where!r} must be of type {' or '.join(allowed)}, got {_short(value)}"


def _is(value: Any, name: str) -> bool:
    if name not in _TYPES:
        return True
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _check_choice(schema: Mapping[str, Any], value: Any, where: str) -> str | None:
    choices = schema.get("enum")
    if choices is None and "const" in schema:
        choices = [schema["const"]]
    if choices is None or any(value == c and type(value) is type(c) for c in choices):
        return None
    listed = ", ".join(map(_short, choices))
    return f"argument {where!r} must be one of {listed}, got {_short(value)}"


def _check_object(schema: Mapping[str, Any], value: dict[str, Any], where: str) -> str | None:
    prefix = f"{where}." if where else ""
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            return f"missing required argument {prefix + name!r}"
    others = schema.get("additionalProperties")
    for name, item in value.items():
        if name in properties:
            problem = _check(properties[name], item, prefix + name)
        elif others is False:
            problem = f"unknown argument {prefix + name!r}"
        else:
            problem = _check(others, item, prefix + name)
        if problem:
            return problem
    return None


def _check_items(schema: Mapping[str, Any], value: list[Any], where: str) -> str | None:
    for i, item in enumerate(value):
        problem = _check(schema.get("items"), item, f"{where}[{i}]")
        if problem:
            return problem
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
