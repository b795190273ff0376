"""Functions as tools: what the policy is shown of a signature, and what becomes of an answer."""

import enum
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest

from rollout_sidecar.tools.arguments import check_arguments
from rollout_sidecar.tools.base import ToolResponse
from rollout_sidecar.tools.function_tool import (
    FunctionTool,
    function_schema,
    function_tool,
    read_answer,
)
from rollout_sidecar.tools.registry import load_tools, open_tools


class Unit(enum.Enum):
    CELSIUS = "C"
    KELVIN = "K"


class Place(TypedDict, total=False):
    city: str


def properties(function) -> dict[str, Any]:
    """The arguments of a function's schema."""
    return function_schema(function)["function"]["parameters"]["properties"]


def test_signature_and_docstring_become_the_schema():
    @function_tool
    async def weather(city: str, days: int = 3, unit: Literal["C", "K"] = "C") -> str:
        """Looks up the weather
        of a city.

        Slow at night.

        Args:
            city: name of the city,
                in English
            days (int): how many
        Returns:
            city: not an argument
        """
        return f"{city} {days} {unit}"

    assert weather.tool_schema == {  # type: ignore[attr-defined]
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Looks up the weather of a city.\n\nSlow at night.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "name of the city, in English"},
                    "days": {"type": "integer", "description": "how many", "default": 3},
                    "unit": {"type": "string", "enum": ["C", "K"], "default": "C"},
                },
                "required": ["city"],
            },
        },
    }


def test_annotations_become_types():
    def f(
        a: float,
        b: bool,
        c: list[int],
        d: dict[str, list[str]],
        e: Annotated[str, "an e"],
        f: Unit,
        g: Literal[1, 2],
        h: int | str,
        i: tuple[int, ...],
        j: tuple[int, str],
        k: Place,
        m: list,
        n: dict,
        o: Any,
        p,
        q: list[Annotated[int, "each"]],
    ): ...

    assert properties(f) == {
        "a": {"type": "number"},
        "b": {"type": "boolean"},
        "c": {"type": "array", "items": {"type": "integer"}},
        "d": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
        "e": {"type": "string", "description": "an e"},
        "f": {"type": "string", "enum": ["C", "K"]},
        "g": {"type": "integer", "enum": [1, 2]},
        "h": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "i": {"type": "array", "items": {"type": "integer"}},
        "j": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        "k": {"type": "object", "properties": {"city": {"type": "string"}}, "required": []},
        "m": {"type": "array", "items": {}},
        "n": {"type": "object"},
        "o": {},
        "p": {},
        "q": {"type": "array", "items": {"type": "integer", "description": "each"}},
    }  # fmt: skip


def test_what_may_be_none_is_null():
    def f(
        a: Optional[int],  # noqa: UP045
        b: str | None = None,
        c: Literal["x"] | None = None,
        d: int | str | None = 1,
        e: str = None,  # type: ignore # noqa: RUF013
        g: Unit = Unit.KELVIN,
    ): ...

    assert properties(f) == {
        "a": {"type": ["integer", "null"]},
        "b": {"type": ["string", "null"], "default": None},
        "c": {"type": ["string", "null"], "enum": ["x", None], "default": None},
        "d": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}], "default": 1},
        "e": {"type": ["string", "null"], "default": None},
        "g": {"type": "string", "enum": ["C", "K"], "default": "K"},
    }
    assert function_schema(f)["function"]["parameters"]["required"] == ["a"]
    assert check_arguments(function_schema(f), {"a": None, "b": None, "c": None}) is None


def _starred(*args): ...
def _keywords(**kwargs): ...
def _positional(a, /): ...
def _odd(a: bytes): ...
def _nested(a: list[complex]): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_starred, "argument 'args' of _starred takes any number of values; give each a name"),
        (_keywords, "argument 'kwargs' of _keywords takes any number of values"),
        (_positional, "argument 'a' of _positional is positional only"),
        (_odd, "argument 'a' of _odd has the type bytes, which has no JSON Schema here; use str"),
        (_nested, "argument 'a' of _nested has the type complex"),
    ],
)
def test_what_no_schema_can_say_is_named(function, message):
    with pytest.raises(ValueError, match=message):
        function_tool(function)


def test_the_name_or_the_whole_schema_can_be_given():
    @function_tool("search")
    def f(q: str): ...

    assert f.tool_schema.function.name == "search"  # type: ignore[attr-defined]
    given = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}

    @function_tool(schema=given)
    def g(*args): ...

    assert g.tool_schema == given  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"the schema of g: tool_schema\.function\.name is missing"
    ):
        function_tool(schema={"type": "function"})(g)


async def test_a_call_runs_sync_and_async_functions():
    def double(x: int, unit: Unit = Unit.CELSIUS) -> str:
        assert isinstance(unit, Unit)
        return f"{2 * x} {unit.name}"

    async def answer(text: str):
        return {"ü": text}, None

    tool = FunctionTool(double)
    assert (tool.name, tool.config) == ("double", {})
    assert await tool.execute("i", {"x": 2}) == (ToolResponse(text="4 CELSIUS"), 0.0, {})
    assert await tool.execute("i", {"x": 2, "unit": "K"}) == (
        ToolResponse(text="4 KELVIN"),
        0.0,
        {},
    )
    done = await FunctionTool(answer).execute("i", {"text": "a"})
    assert done == (ToolResponse(text='{"ü": "a"}'), 0.0, {})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("a", ("a", 0.0, {})),
        (None, (None, 0.0, {})),
        ({"a": [1]}, ('{"a": [1]}', 0.0, {})),
        (7, ("7", 0.0, {})),
        (("a",), ("a", 0.0, {})),
        (("a", 0.5), ("a", 0.5, {})),
        (("a", None, None), ("a", 0.0, {})),
        ((ToolResponse(text="b"), True, {"n": 1}), ("b", 1.0, {"n": 1})),
    ],
)
def test_answers_are_read(answer, expected):
    response, reward, metrics = read_answer(answer)
    assert (response.text, reward, metrics) == expected


@pytest.mark.parametrize("answer", [(), (1, 2, 3, 4)])
def test_tuples_of_another_size_are_refused(answer):
    with pytest.raises(TypeError, match=f"returned a tuple of {len(answer)}; expected"):
        read_answer(answer)


# --- in files ---------------------------------------------------------------------------------------------------

FILE = """
    from verl.tools.function_tool import function_tool

    @function_tool
    def first(x: int) -> str:
        "Says it."
        return str(x)

    @function_tool("second")
    def other(x: int) -> str:
        return str(x)

    def plain(x: int = 1) -> str:
        return str(x)
"""


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    """A file of function tools."""
    file = tmp_path / "my_functions.py"
    file.write_text(textwrap.dedent(FILE))
    return file


async def test_a_file_of_function_tools(tools_file: Path):
    tools = load_tools(tools_file)
    assert list(tools) == ["first", "second"]
    assert (await tools["first"].execute("i", {"x": 3}))[0].text == "3"
    assert list(await open_tools(str(tools_file))) == ["first", "second"]


async def test_functions_in_a_tool_config(tools_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tools_file.parent))
    config = tools_file.with_name("tools.yaml")
    config.write_text(
        "tools:\n"
        "  - function: my_functions.py:plain\n"
        "    config: {idempotent: true, timeout_s: 2}\n"
        "  - class_name: my_functions.other\n"
        "  - class_name: my_functions.first\n"
        "    tool_schema: {type: function, function: {name: third}}\n"
    )
    tools = load_tools(config)
    assert list(tools) == ["plain", "second", "third"]
    assert tools["plain"].config == {"idempotent": True, "timeout_s": 2}
    assert (await tools["plain"].execute("i", {}))[0].text == "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X = 1\n", r"f\.py: the file has no function decorated with @function_tool"),
        (
            "import nothing_there\n",
            r"f\.py: .*f\.py could not be loaded: No module named 'nothing_there'",
        ),
    ],
)
def test_a_file_without_function_tools_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tools(tmp_path / "f.py")


def test_a_missing_function_is_named(tools_file: Path):
    config = tools_file.with_name("tools.yaml")
    config.write_text("tools: [{function: 'my_functions.py:nothing'}]")
    with pytest.raises(ValueError, match=r"tools\[0\]: my_functions.py has no function 'nothing'"):
        load_tools(config)
