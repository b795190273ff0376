"""OpenAI function schemas, read as dicts and as verl's objects: the same value is both.

verl's tools are given an OpenAIFunctionToolSchema and read `tool_schema.function.name`; chat templates and the wire
need dicts. So the classes here are dicts whose keys can be read and set as attributes, under verl's names.

Differs from verl: nothing is dropped or rejected (items, nested properties, anyOf, default, enums of numbers), and
`required`, `description` and `parameters` may be left out.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, Self

SchemaFields = Literal["as_written", "set_fields", "all_fields"]
"""Which fields reach the chat template: as written; in verl's order without nulls (its model_dump with exclude_unset
and exclude_none); or in verl's order with the fields it fills in (its plain model_dump)."""

_MAY_BE_NULL = {"default", "const"}
"""Keys of JSON Schema whose null is a value. Any other null means that the key is absent."""


TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
"""JSON Schema's."""
_PYTHON_TYPES = {
    "bool": "boolean",
    "dict": "object",
    "float": "number",
    "int": "integer",
    "list": "array",
    "str": "string",
}


class _Model(dict[str, Any]):
    """A dict with verl's fields as attributes. A field that is absent reads as its default."""

    fields: ClassVar[dict[str, Any]] = {}
    """verl's fields in its order, with their defaults; `...` for none."""
    parts: ClassVar[dict[str, type["_Model"]]] = {}
    """Fields that hold such a dict themselves."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name, part in self.parts.items():
            value = self.get(name)
            if isinstance(value, Mapping) and not isinstance(value, part):
                self[name] = part(value)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        default = type(self).fields.get(name, ...)
        if default is ...:
            raise AttributeError(f"this {type(self).__name__} has no {name!r}; it has {list(self)}")
        return copy.copy(default)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)({key: copy.deepcopy(value, memo) for key, value in self.items()})

    @classmethod
    def model_validate(cls, value: Any, **kwargs: Any) -> Self:
        """From a mapping, or from an object with model_dump, such as verl's own. ValueError for anything else."""
        if hasattr(value, "model_dump") and not isinstance(value, dict):
            value = value.model_dump(exclude_unset=True)
        if not isinstance(value, Mapping):
            raise ValueError(f"{cls.__name__} takes a mapping, got {value!r}")
        return cls(copy.deepcopy(dict(value)))

    @classmethod
    def model_validate_json(cls, text: str | bytes, **kwargs: Any) -> Self:
        """From JSON text."""
        return cls.model_validate(json.loads(text))

    def model_dump(
        self, *, exclude_unset: bool = False, exclude_none: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Plain dicts, verl's fields first and in its order. Other options of pydantic are accepted unread."""
        dumped: dict[str, Any] = {}
        for name in [*self.fields, *(key for key in self if key not in self.fields)]:
            if name in self:
                value = self[name]
            elif exclude_unset or self.fields[name] is ...:
                continue
            else:
                value = self.fields[name]
            if value is not None or not exclude_none or name in _MAY_BE_NULL:
                dumped[name] = _dump(value, exclude_unset=exclude_unset, exclude_none=exclude_none)
        return dumped

    def model_dump_json(self, *, indent: int | None = None, **kwargs: Any) -> str:
        """model_dump as JSON text."""
        return json.dumps(self.model_dump(**kwargs), ensure_ascii=False, indent=indent)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with some fields changed."""
        return type(self)({**(copy.deepcopy(self) if deep else self), **(update or {})})


def _dump(value: Any, **kwargs: bool) -> Any:
    if isinstance(value, _Model):
        return value.model_dump(**kwargs)
    if isinstance(value, Mapping):
        return {key: _dump(part, **kwargs) for key, part in value.items()}
    if isinstance(value, list):
        return [_dump(part, **kwargs) for part in value]
    return value


class OpenAIFunctionPropertySchema(_Model):
    """One argument. The JSON Schema key `items` is read as schema["items"]: `.items` is the method of dicts."""

    fields: ClassVar[dict[str, Any]] = {"type": ..., "description": None, "enum": None}


class _Properties(dict[str, Any]):
    """Arguments by name."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name, value in self.items():
            if isinstance(value, Mapping) and not isinstance(value, OpenAIFunctionPropertySchema):
                self[name] = OpenAIFunctionPropertySchema(value)


class OpenAIFunctionParametersSchema(_Model):
    """All arguments: a JSON Schema of type object."""

    fields: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}, "required": []}
    parts: ClassVar[dict[str, Any]] = {"properties": _Properties}


class OpenAIFunctionSchema(_Model):
    """Name, description and arguments."""

    fields: ClassVar[dict[str, Any]] = {
        "name": ...,
        "description": "",
        "parameters": OpenAIFunctionParametersSchema(),
        "strict": False,
    }
    parts: ClassVar[dict[str, Any]] = {"parameters": OpenAIFunctionParametersSchema}


class OpenAIFunctionToolSchema(_Model):
    """What a tool is given, and shows to the policy."""

    fields: ClassVar[dict[str, Any]] = {"type": "function", "function": ...}
    parts: ClassVar[dict[str, Any]] = {"function": OpenAIFunctionSchema}


class OpenAIFunctionParsedSchema(_Model):
    """A call whose arguments are still JSON text."""

    fields: ClassVar[dict[str, Any]] = {"name": ..., "arguments": ...}


class OpenAIFunctionCallSchema(_Model):
    """A call with its arguments."""

    fields: ClassVar[dict[str, Any]] = {"name": ..., "arguments": ...}

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: Mapping[str, Any],
    ) -> tuple["OpenAIFunctionCallSchema", bool]:
        """The call, and whether its arguments were no JSON object; they are {} then."""
        try:
            arguments = json.loads(parsed_schema["arguments"])
        except ValueError:
            arguments = None
        failed = not isinstance(arguments, dict)
        call = OpenAIFunctionCallSchema(
            name=parsed_schema["name"], arguments={} if failed else arguments
        )
        return call, failed


class OpenAIFunctionToolCall(_Model):
    """A call with its id."""

    fields: ClassVar[dict[str, Any]] = {"id": ..., "type": "function", "function": ...}
    parts: ClassVar[dict[str, Any]] = {"function": OpenAIFunctionCallSchema}


def read_schema(value: Any, where: str) -> OpenAIFunctionToolSchema:
    """A tool's schema, without keys that are null. ValueError, starting with `where`, if it names no function."""
    try:
        schema = OpenAIFunctionToolSchema.model_validate(_without_null(_plain(value)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    function = schema.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: tool_schema.function.name is missing")
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise ValueError(
            f"{where}: tool_schema.function.parameters must be a mapping with properties, a mapping of names, "
            f"got {parameters!r}"
        )
    return schema


def wrong_types(schema: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the types in a tool's schema, each a sentence: JSON Schema has no others than TYPES."""
    function = schema.get("function")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    yield from _wrong_types(parameters, "parameters")


def _wrong_types(schema: Any, place: str) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]:
        if kind not in TYPES:
            near = [_PYTHON_TYPES.get(str(kind)), *get_close_matches(str(kind), TYPES, 1)]
            meant = next((f"; did you mean {name!r}?" for name in near if name), "")
            yield (
                f"tool_schema.function.{place}.type is {kind!r}, expected one of {', '.join(TYPES)}{meant}"
            )
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        parts = schema.get(key)
        for name, part in parts.items() if isinstance(parts, Mapping) else ():
            yield from _wrong_types(part, f"{place}.{key}.{name}")
    for key in ("items", "additionalProperties", "not", "anyOf", "oneOf", "allOf", "prefixItems"):
        parts = schema.get(key)
        if isinstance(parts, list):
            for i, part in enumerate(parts):
                yield from _wrong_types(part, f"{place}.{key}[{i}]")
        else:
            yield from _wrong_types(parts, f"{place}.{key}")


def shown_schema(
    schema: OpenAIFunctionToolSchema, fields: SchemaFields
) -> OpenAIFunctionToolSchema:
    """The schema as the chat template is to see it."""
    if fields == "as_written":
        return schema
    if fields == "set_fields":
        return OpenAIFunctionToolSchema(schema.model_dump(exclude_unset=True, exclude_none=True))
    return OpenAIFunctionToolSchema(schema.model_dump())


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump") and not isinstance(value, dict):
        return value.model_dump(exclude_unset=True)
    return value


def _without_null(value: Any, *, names: bool = False) -> Any:
    """Leaves out keys that are null, at every level.

    Args:
        names: the mapping's keys are names of arguments, so that one called "default" is no keyword.
    """
    if isinstance(value, Mapping):
        kept = {} if names else _MAY_BE_NULL
        return {
            key: _without_null(part, names=not names and key in ("properties", "$defs"))
            if key not in _MAY_BE_NULL or names
            else copy.deepcopy(part)
            for key, part in value.items()
            if part is not None or key in kept
        }
    if isinstance(value, list):
        return [_without_null(part) for part in value]
    return value
