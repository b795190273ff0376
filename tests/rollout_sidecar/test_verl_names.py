"""Users' files that import verl run where verl is not installed, and use it where it is."""

import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rollout_sidecar import verl_names
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from rollout_sidecar.tools.registry import load_tools
from rollout_sidecar.tools.schemas import OpenAIFunctionToolSchema
from rollout_sidecar.verl_rewards import (
    default_compute_score,
    gsm8k_compute_score,
    gsm8k_extract_solution,
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch):
    """Takes the finder and verl's modules away again."""
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not verl_names._FINDER])
    for name in list(sys.modules):
        if name.partition(".")[0] == "verl":
            del sys.modules[name]
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] == "verl":
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


USER_TOOL = """
    from typing import Any, Optional
    from uuid import uuid4

    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl.utils.reward_score import gsm8k
    from verl.utils.rollout_trace import rollout_trace_op

    class MyGsm8kTool(BaseTool):
        def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
            super().__init__(config, tool_schema)
            self.described = tool_schema.function.parameters.properties["answer"].description
            self.dumped = tool_schema.model_dump(exclude_unset=True, exclude_none=True)
            self._answers = {}

        def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
            return self.tool_schema

        async def create(self, instance_id: Optional[str] = None, ground_truth=None, **kwargs):
            instance_id = instance_id or str(uuid4())
            self._answers[instance_id] = ground_truth
            return instance_id, ToolResponse()

        @rollout_trace_op
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
            reward = gsm8k.compute_score("#### " + parameters["answer"], self._answers[instance_id],
                                         method="flexible", format_score=0.0, score=1.0)
            return ToolResponse(text=f"reward={reward}"), 0.0, {}
"""

ENTRY = """
    tools:
      - class_name: "{module}.MyGsm8kTool"
        config: {{type: native}}
        tool_schema:
          type: function
          function:
            name: calc
            description: A tool.
            parameters:
              type: object
              properties: {{answer: {{type: string, description: The answer., enum: null}}}}
              required: [answer]
"""


async def test_a_users_tool_runs_unmodified_without_verl(tmp_path, monkeypatch):
    write(tmp_path / "my_tool_a.py", USER_TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("verl") is None
    tool = load_tools(write(tmp_path / "t.yaml", ENTRY.format(module="my_tool_a")))["calc"]
    assert isinstance(tool, BaseTool)
    assert isinstance(tool.tool_schema, OpenAIFunctionToolSchema)
    assert (tool.described, tool.name) == ("The answer.", "calc")  # type: ignore[attr-defined]
    assert tool.dumped == tool.tool_schema  # type: ignore[attr-defined]
    assert "enum" not in tool.tool_schema.function.parameters.properties["answer"]
    instance_id, response = await tool.create(None, ground_truth="18")
    assert response == ToolResponse()
    answered, reward, metrics = await tool.execute(instance_id, {"answer": "18.0"})
    assert (answered.text, reward, metrics) == ("reward=1.0", 0.0, {})


def test_an_import_of_ours_brings_no_verl():
    assert verl_names._FINDER not in sys.meta_path
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl'"):
        importlib.import_module("verl")


def test_what_is_not_there_is_said():
    verl_names.install()
    with pytest.raises(ImportError, match=r"cannot import name 'Other' .*verl_names.py"):
        from verl.tools.schemas import Other  # type: ignore # noqa: F401
    with pytest.raises(
        ModuleNotFoundError,
        match="No module named 'verl.trainer': verl is not installed, and tool",
    ):
        import verl.trainer  # type: ignore # noqa: F401
    import verl.tools  # type: ignore

    assert not hasattr(verl.tools, "DataProto")


def test_a_file_says_which_of_its_imports_failed(tmp_path, monkeypatch):
    write(tmp_path / "my_tool_b.py", "from verl.workers import x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = write(tmp_path / "t.yaml", "tools: [{class_name: my_tool_b.T}]")
    with pytest.raises(
        ValueError,
        match=r"t.yaml: tools\[0\]: cannot import my_tool_b .*'verl.workers': verl is not",
    ):
        load_tools(file)
    write(tmp_path / "my_tool_e.py", "from verl.interactions.base import Other")
    file = write(tmp_path / "t.yaml", "tools: [{class_name: my_tool_e.T}]")
    with pytest.raises(
        ValueError, match="of verl.interactions.base tooljax has BaseInteraction only"
    ):
        load_tools(file)
    write(tmp_path / "my_tool_c.py", "1 / 0\n")
    file = write(tmp_path / "t.yaml", "tools: [{class_name: my_tool_c.T}]")
    with pytest.raises(ValueError, match=r"the import of my_tool_c .* failed: ZeroDivisionError"):
        load_tools(file)


def test_every_name_of_the_table_exists():
    verl_names.install()
    for module, names in verl_names.MODULES.items():
        for name in names:
            assert getattr(importlib.import_module(module), name) is not None, f"{module}.{name}"


async def test_verl_itself_comes_first_and_ours_stands_in_for_what_it_lost(tmp_path, monkeypatch):
    # A release that has tools but no interactions any more.
    write(tmp_path / "verl/__init__.py", "")
    write(tmp_path / "verl/tools/__init__.py", "")
    write(
        tmp_path / "verl/tools/schemas.py",
        """
        class ToolResponse:
            def __init__(self, text=None): self.text, self.image, self.video = text, None, None
        """,
    )
    write(
        tmp_path / "verl/tools/base_tool.py",
        """
        class BaseTool:
            real = True
            def __init__(self, config, tool_schema):
                self.config, self.tool_schema = config, tool_schema
                self.name = tool_schema.function.name
            async def create(self, instance_id=None, **kwargs): return instance_id
            async def calc_reward(self, instance_id, **kwargs): return 0.0
            async def release(self, instance_id, **kwargs): pass
        """,
    )
    write(
        tmp_path / "my_tool_d.py",
        """
        from verl.interactions.base import BaseInteraction
        from verl.tools.base_tool import BaseTool
        from verl.tools.schemas import ToolResponse
        class MyGsm8kTool(BaseTool):
            async def execute(self, instance_id, parameters, **kwargs):
                return ToolResponse("yes"), 0.0, {}
        """,
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = write(tmp_path / "t.yaml", ENTRY.format(module="my_tool_d"))
    tool: Any = load_tools(file)["calc"]
    assert tool.real
    assert not isinstance(tool, BaseTool)
    assert (await tool.execute("i", {"answer": "1"}))[0].text == "yes"
    module = sys.modules["my_tool_d"]
    assert module.BaseInteraction.__module__ == "rollout_sidecar.interactions.base"
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl.trainer'$"):
        import verl.trainer  # type: ignore # noqa: F401


# --- rewards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "method", "number"),
    [
        ("so #### 1,234 done", "strict", "1234"),
        ("#### 3\n#### $-4.50.", "strict", "3"),
        ("#### 3\n#### -$4.50.", "strict", "-4.50"),
        ("it is 7", "strict", None),
        ("first 3, then 7.", "flexible", "7"),
        ("none. At all, ...", "flexible", None),
    ],
)
def test_the_number_of_a_solution(text, method, number):
    assert gsm8k_extract_solution(text, method) == number


@pytest.mark.parametrize(
    ("text", "truth", "kwargs", "score"),
    [
        ("#### 18", "18", {}, 1.0),
        ("#### 18.00", 18, {"score": 2.0}, 2.0),
        ("#### 17", "18", {"format_score": 0.1}, 0.1),
        ("the answer is 18", "18", {"format_score": 0.1}, 0.0),
        ("the answer is 18", "18", {"method": "flexible"}, 1.0),
        ("#### 1", "one", {}, 0.0),
    ],
)
def test_gsm8k_scores_as_verls_signature_says(text, truth, kwargs, score):
    assert gsm8k_compute_score(text, truth, **kwargs) == score


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match="method='lax' must be strict or flexible"):
        gsm8k_compute_score("1", "1", method="lax")  # type: ignore[arg-type]


def test_the_default_score_is_the_built_in_reward_of_the_data_source():
    score: Any = default_compute_score("openai/gsm8k", "#### 2", "2", extra_info={"index": 0})
    assert score["score"] == 1.0
    with pytest.raises(ValueError, match="no built-in reward for data_source 'mine'"):
        default_compute_score("mine", "#### 2", "2")
