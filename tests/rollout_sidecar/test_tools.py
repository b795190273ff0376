import textwrap
from pathlib import Path

import pytest

from rollout_sidecar.tools.arguments import check_arguments
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from rollout_sidecar.tools.registry import load_tools

# --- contract ---------------------------------------------------------------------------------------------------


def test_tool_response_takes_lists_of_images():
    assert ToolResponse(text="x").is_text_only()
    assert not ToolResponse(text="x", image=[1]).is_text_only()
    assert ToolResponse().is_empty()
    with pytest.raises(ValueError, match="image must be a list, got a bytes"):
        ToolResponse(image=b"png")  # type: ignore
    with pytest.raises(ValueError, match="video must be a list"):
        ToolResponse(video="clip")  # type: ignore
    with pytest.raises(ValueError, match="text must be a string, got a int"):
        ToolResponse(text=3)  # type: ignore


async def test_base_tool_has_a_default_for_everything_but_execute():
    tool = BaseTool({"a": 1}, {"type": "function", "function": {"name": "f"}})
    assert (tool.name, tool.config) == ("f", {"a": 1})
    first, _ = await tool.create()
    second, _ = await tool.create()
    assert first != second
    with pytest.raises(NotImplementedError, match="BaseTool does not implement execute"):
        await tool.execute(first, {})
    with pytest.raises(ValueError, match="BaseTool has no schema of its own"):
        BaseTool({}, None)


# --- tool_config ------------------------------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tools.yaml"
    file.write_text(textwrap.dedent(text))
    return file


@pytest.fixture
def user_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of a tool as users of verl write it."""
    name = f"user_tool_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from rollout_sidecar.tools.base import BaseTool\n"
        "class Echo(BaseTool):\n"
        "    def __init__(self, config, tool_schema):\n"
        "        super().__init__(config, tool_schema)\n"
        "        self.times = config['times']\n"
        "NOT_A_TOOL = dict\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_reads_a_verl_file(tmp_path: Path, user_tool: str):
    file = write(
        tmp_path,
        f"""
        tools:
          - class_name: "{user_tool}.Echo"
            config: {{type: native, times: 2}}
            mcp: null
            tool_schema:
              type: function
              function:
                name: echo
                description: "Says it again."
                parameters:
                  type: object
                  properties:
                    words: {{type: array, items: {{type: string}}, default: [], minItems: 1}}
                  required: [words]
                strict: false
          - class_name: rollout_sidecar.tools.calculator.CalculatorTool
            config: null
        """,
    )
    tools = load_tools(file)
    assert list(tools) == ["echo", "calculator"]
    assert tools["echo"].config == {"type": "native", "times": 2}
    # Unchanged: verl would drop items, default and minItems.
    assert tools["echo"].tool_schema["function"] == {
        "name": "echo",
        "description": "Says it again.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {
                    "type": "array",
                    "items": {"type": "string"},
                    "default": [],
                    "minItems": 1,
                }
            },
            "required": ["words"],
        },
        "strict": False,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: [", r"tools\.yaml is not valid YAML"),
        ("a: 1", "expected a list under the key `tools`"),
        ("tools: [3]", r"tools\.yaml: tools\[0\]: expected a mapping with class_name, got 3"),
        ("tools: [{config: {type: native}}]", r"tools\[0\]: class_name is missing"),
        ("tools: [{class_name: null}]", r"class_name is missing"),
        ("tools: [{class_name: a.B, schema: {}}]", "unknown key 'schema'"),
        ("tools: [{class_name: a.B, config: 3}]", "config must be a mapping, got 3"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "config.type is mcp, so the entry needs the key mcp"),
        ("tools: [{class_name: a.B, config: {type: native}, mcp: {}}]", "so config.type must be mcp"),
        ("tools: [{mcp: {mcp_servers_config_path: a.json}}]", "MCP servers need a running event loop; use open_tools"),
        ("tools: [{class_name: a.B, function: a.py:f}]", "class_name and function are both there; keep one"),
        ("tools: [{function: a.py:f}]", r"tools\[0\]: a.py: no such file \(looked in /"),
        ("tools: [{function: a.f}]", "function 'a.f' must be path/to/file.py:name"),
        ("tools: [{class_name: a.B, config: {type: other}}]", "config.type is 'other', expected native"),
        ("tools: [{class_name: a.B, tool_schema: {type: function}}]", r"tool_schema\.function\.name is missing"),
        ("tools: [{class_name: Calculator}]", "'Calculator' must be an import path, module.Class"),
        ("tools: [{class_name: no_such.Tool}]", "cannot import no_such .*is it on PYTHONPATH"),
        ("tools: [{class_name: USER.Other}]", "has no class or function Other"),
        ("tools: [{class_name: USER.NOT_A_TOOL}]", "is not a tool: it lacks create"),
        (
            "tools: [{class_name: USER.Echo, tool_schema: {function: {name: f}}}]",
            r"Echo could not be made: KeyError\('times'\)",
        ),
        ("tools: [{class_name: USER.Echo, config: {times: 1}}]", "has no schema of its own: give the entry"),
        (
            "tools: [{class_name: rollout_sidecar.tools.calculator.CalculatorTool},"
            " {class_name: rollout_sidecar.tools.calculator.CalculatorTool}]",
            r"tools\[1\]: a tool named 'calculator' comes earlier",
        ),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_its_entry(
    tmp_path: Path, user_tool: str, text: str, message: str
):
    with pytest.raises(ValueError, match=message) as caught:
        load_tools(write(tmp_path, text.replace("USER", user_tool)))
    assert "tools.yaml" in str(caught.value)


def test_missing_file():
    with pytest.raises(ValueError, match=r"nowhere\.yaml: no such tool_config file"):
        load_tools("nowhere.yaml")


# --- arguments --------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "queries": {"type": "array", "items": {"type": "string"}},
                "topk": {"type": "integer"},
                "kind": {"type": "string", "enum": ["web", "news"]},
                "when": {"type": ["string", "null"]},
                "range": {
                    "type": "object",
                    "properties": {"low": {"type": "number"}},
                    "required": ["low"],
                    "additionalProperties": False,
                },
                "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            },
            "required": ["queries"],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        {"queries": []},
        {"queries": ["a", "b"], "topk": 3, "kind": "web", "when": None, "range": {"low": 1.5}},
        {"queries": [], "topk": 3.0, "either": [1, 2]},
        {"queries": [], "either": "x"},
    ],
)
def test_fitting_arguments(arguments: dict):
    assert check_arguments(SCHEMA, arguments) is None
    assert check_arguments(SCHEMA["function"]["parameters"], arguments) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "missing required argument 'queries'"),
        ({"query": "a"}, "unknown argument 'query'; the arguments are: queries, topk, kind, when, range, either"),
        ({"queries": "a"}, "argument 'queries' must be of type array, got \"a\""),
        ({"queries": ["a", 2]}, "argument 'queries[1]' must be of type string, got 2"),
        ({"queries": [], "topk": 1.5}, "argument 'topk' must be of type integer, got 1.5"),
        ({"queries": [], "topk": True}, "argument 'topk' must be of type integer, got true"),
        ({"queries": [], "topk": None}, "argument 'topk' must be of type integer, got null"),
        ({"queries": [], "kind": "images"}, 'argument \'kind\' must be one of "web", "news", got "images"'),
        ({"queries": [], "when": 5}, "argument 'when' must be of type string or null, got 5"),
        ({"queries": [], "range": {}}, "missing required argument 'range.low'"),
        ({"queries": [], "range": {"low": 1, "up": 2}}, "unknown argument 'range.up'"),
        ({"queries": [], "range": {"low": "1"}}, "argument 'range.low' must be of type number, got \"1\""),
        ({"queries": [], "either": 1.5}, "argument 'either' must be of type string, got 1.5"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(arguments: dict, problem: str):
    assert check_arguments(SCHEMA, arguments) == problem


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        None,
        {"type": "object"},
        {"type": "object", "properties": {}, "additionalProperties": True},
    ],
)
def test_schemas_that_name_no_arguments_take_any(parameters):
    assert check_arguments({"function": {"name": "f", "parameters": parameters}}, {"x": 1}) is None


def test_a_schema_with_no_arguments_takes_none():
    parameters = {"type": "object", "properties": {}}
    assert check_arguments(parameters, {}) is None
    assert check_arguments(parameters, {"x": 1}) == "unknown argument 'x'; the arguments are: none"


def test_long_values_are_shortened():
    problem = check_arguments(SCHEMA, {"queries": "a" * 500})
    assert problem is not None
    assert len(problem) < 150
