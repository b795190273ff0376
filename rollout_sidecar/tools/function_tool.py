"""Tools from plain functions: `@function_tool` on a function, sync or async, gives it the schema of its signature.

    @function_tool
    def convert(amount: float, to: Literal["EUR", "USD"] = "EUR") -> str:
        '''Converts an amount of money.

        Args:
            amount: in the other currency.
            to: the currency wanted.
        '''

The description is the docstring's text before its first section; arguments are described by its Args section (Google's
style) or by `Annotated[float, "..."]`. The function answers with a ToolResponse, text, a dict (shown as JSON), or a
tuple of such an answer, a reward and metrics. The decorated function can still be called as before.

Differs from verl: defaults, items, enums and optional arguments reach the schema, and an argument needs no description.
"""

import collections.abc
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

from rollout_sidecar.foreign import invoke
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from rollout_sidecar.tools.schemas import OpenAIFunctionToolSchema, read_schema

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "tool_schema"
"""Attribute of a decorated function that holds its schema."""


@typing.overload
def function_tool(name: F, *, schema: Mapping[str, Any] | None = None) -> F: ...
@typing.overload
def function_tool(
    name: str | None = None, *, schema: Mapping[str, Any] | None = None
) -> Callable[[F], F]: ...
def function_tool(name: Any = None, *, schema: Mapping[str, Any] | None = None) -> Any:
    """Marks a function as a tool: `@function_tool`, `@function_tool("name")` or `@function_tool(schema={...})`.

    Args:
        name: of the tool, if it is not the function's.
        schema: used instead of the signature's.

    ValueError if the signature has something that no schema can say, such as *args.
    """
    if callable(name):
        return function_tool(schema=schema)(name)

    def mark(function: F) -> F:
        if schema is None:
            found = function_schema(function, name)
        else:
            found = read_schema(schema, f"the schema of {function.__name__}")
            if name is not None:
                found.function.name = name
        setattr(function, _MARK, found)
        return function

    return mark


def is_function_tool(value: Any) -> bool:
    """It is a function that was decorated."""
    return inspect.isroutine(value) and hasattr(value, _MARK)


class FunctionTool(BaseTool):
    """A function as a tool. Stateless: what all calls share is the function's own affair."""

    config_keys = ()

    def __init__(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        tool_schema: Mapping[str, Any] | None = None,
    ):
        """As BaseTool; a function that was not decorated gets the schema of its signature."""
        self.function = function
        super().__init__(config or {}, tool_schema)

    def get_openai_tool_schema(self) -> Mapping[str, Any]:
        """The schema of the file's entry, else the function's."""
        given = getattr(self, "tool_schema", None)
        return given or getattr(self.function, _MARK, None) or function_schema(self.function)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls the function where it holds up nobody."""
        arguments = _with_enums(self.function, parameters)
        answer = await invoke(self.function, **arguments)
        return read_answer(answer)


def read_answer(answer: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Response, reward and metrics from what a function returned. TypeError for a tuple of another size than 1 to 3."""
    if not isinstance(answer, tuple):
        answer = (answer,)
    if not 1 <= len(answer) <= 3:
        raise TypeError(
            f"the function returned a tuple of {len(answer)}; expected (response,), (response, reward) or "
            "(response, reward, metrics)"
        )
    response, reward, metrics = (*answer, None, None)[:3]
    return _response(response), float(reward or 0.0), dict(metrics or {})


def _response(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return ToolResponse(text=value)
    if hasattr(value, "text") and hasattr(value, "image"):  # a ToolResponse, ours or verl's
        return value
    if isinstance(value, (dict, list)):
        return ToolResponse(text=json.dumps(value, ensure_ascii=False, default=str))
    return ToolResponse(text=str(value))


# --- the schema of a signature ----------------------------------------------------------------------------------


def function_schema(
    function: Callable[..., Any], name: str | None = None
) -> OpenAIFunctionToolSchema:
    """The OpenAI schema of a function. ValueError names the argument that cannot be described."""
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required = []
    for argument in inspect.signature(function).parameters.values():
        where = f"argument {argument.name!r} of {function.__name__}"
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            raise ValueError(f"{where} takes any number of values; give each a name of its own")
        if argument.kind == argument.POSITIONAL_ONLY:
            raise ValueError(f"{where} is positional only, but calls name their arguments")
        properties[argument.name] = _property(
            argument, hints.get(argument.name, Any), described.get(argument.name, ""), where
        )
        if argument.default is argument.empty:
            required.append(argument.name)
    return OpenAIFunctionToolSchema(
        type="function",
        function={
            "name": name or function.__name__,
            "description": summary,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    )


def _property(
    argument: inspect.Parameter, hint: Any, description: str, where: str
) -> dict[str, Any]:
    if typing.get_origin(hint) is Annotated:
        texts = [part for part in hint.__metadata__ if isinstance(part, str)]
        hint, description = hint.__origin__, texts[0] if texts else description
    schema = _type_schema(hint, where)
    if description:
        kind = {"type": schema.pop("type")} if "type" in schema else {}
        schema = {**kind, "description": description, **schema}
    default = argument.default
    if isinstance(default, enum.Enum):
        default = default.value
    if default is None or isinstance(default, (str, int, float, list, dict)):
        schema["default"] = default
    if default is None:
        schema = _or_null(schema)
    return schema


_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON Schema of an annotation."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin is Annotated:
        texts = [part for part in hint.__metadata__ if isinstance(part, str)]
        return {**_type_schema(arguments[0], where), **({"description": texts[0]} if texts else {})}
    if origin is Literal:
        return _choice(list(arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint])
    if origin in (Union, types.UnionType):
        return _union([part for part in arguments if part is not type(None)], arguments, where)
    if origin in _DICTS:
        values = _type_schema(arguments[1], where) if len(arguments) == 2 else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if origin in _LISTS:
        kinds = [part for part in arguments if part is not Ellipsis]
        same = origin is not tuple or Ellipsis in arguments
        if not kinds or not same:
            return {"type": "array", "items": {}} if same else _fixed(kinds, where)
        return {"type": "array", "items": _type_schema(kinds[0], where)}
    if typing.is_typeddict(hint):
        fields = typing.get_type_hints(hint, include_extras=True)
        properties = {name: _type_schema(part, where) for name, part in fields.items()}
        required = [name for name in fields if name in hint.__required_keys__]
        return {"type": "object", "properties": properties, "required": required}
    raise ValueError(
        f"{where} has the type {getattr(hint, '__name__', hint)}, which has no JSON Schema here; "
        "use str, int, float, bool, list, dict, Literal, an Enum or a TypedDict, or give function_tool a schema"
    )


def _fixed(kinds: list[Any], where: str) -> dict[str, Any]:
    """A tuple of a fixed length."""
    return {
        "type": "array",
        "prefixItems": [_type_schema(kind, where) for kind in kinds],
        "minItems": len(kinds),
        "maxItems": len(kinds),
    }


def _choice(values: list[Any]) -> dict[str, Any]:
    kinds = {_SIMPLE.get(type(value)) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {**({"type": kind} if kind else {}), "enum": values}


def _union(parts: list[Any], arguments: tuple[Any, ...], where: str) -> dict[str, Any]:
    schemas = [_type_schema(part, where) for part in parts]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return _or_null(schema) if len(arguments) > len(parts) else schema


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with null allowed too."""
    if "anyOf" in schema:
        null = {"type": "null"}
        alternatives = schema["anyOf"]
        return {**schema, "anyOf": alternatives if null in alternatives else [*alternatives, null]}
    kind = schema.get("type")
    if isinstance(kind, str):
        schema = {**schema, "type": [kind, "null"]}
    if "enum" in schema and None not in schema["enum"]:
        schema = {**schema, "enum": [*schema["enum"], None]}
    return schema


def _with_enums(function: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with the values of Enum arguments turned into their members."""
    hints = typing.get_type_hints(function)
    arguments = dict(parameters)
    for name, value in parameters.items():
        hint = hints.get(name)
        for kind in (hint, *typing.get_args(hint)):
            if isinstance(kind, type) and issubclass(kind, enum.Enum) and value is not None:
                arguments[name] = kind(value)
    return arguments


# --- docstrings -------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"^(\w+(?: \w+)?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what the section Args says of each argument."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, indent, current = "", -1, ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading[1].lower()
        elif not section:
            summary.append(line.strip())
        elif section in ("args", "arguments", "parameters", "params") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent < 0 else indent
            entry = _ARGUMENT.match(line.strip()) if depth <= indent else None
            if entry:
                current = entry[1]
                described[current] = entry[2]
            elif current:
                described[current] = f"{described[current]} {line.strip()}".strip()
    paragraphs = re.split(r"\n{2,}", "\n".join(summary).strip())
    return "\n\n".join(part.replace("\n", " ") for part in paragraphs), described
