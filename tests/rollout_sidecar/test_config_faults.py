"""What is misspelt or mistyped in a user's files is an error with its place, never taken for something else."""

import shutil
from pathlib import Path

import pytest

from rollout_sidecar.interactions.registry import load_interactions
from rollout_sidecar.rewards.registry import get_reward
from rollout_sidecar.tools.bm25 import Bm25SearchTool
from rollout_sidecar.tools.mcp.entry import read_entry
from rollout_sidecar.tools.registry import load_tools, read_entries
from rollout_sidecar.verl_names import load_user_file

CALCULATOR = "rollout_sidecar.tools.calculator.CalculatorTool"
SANDBOX = "rollout_sidecar.tools.python_sandbox.tool.PythonSandboxTool"


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def tools_yaml(folder: Path, entry: str) -> Path:
    return written(folder, "tools.yaml", f"tools:\n  - {entry}\n")


def parameters(schema: str) -> str:
    return (
        f"{{class_name: {CALCULATOR}, tool_schema: {{type: function, function: {{name: f, parameters:"
        f" {{type: object, properties: {{x: {schema}}}}}}}}}}}"
    )


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            f"{{class_name: {CALCULATOR}, config: {{max_concurency: 3}}}}",
            r"tools\[0\]: unknown key config.max_concurency; did you mean 'max_concurrency'\?",
        ),
        (
            "{class_name: verl.tools.search_tool.SearchTool, config: {retrieval_url: x}}",
            "unknown key config.retrieval_url; did you mean 'retrieval_service_url'",
        ),
        (
            f"{{class_name: {SANDBOX}, config: {{wal_s: 3}}}}",
            "unknown key config.wal_s; did you mean 'wall_s'",
        ),
        (
            f"{{class_name: {CALCULATOR}, config: {{zzzzzz: 3}}}}",
            "unknown key config.zzzzzz; there are: breaker_cooldown_s, ",
        ),
        (
            "{function: 'f.py:f', config: {timeout: 3, retrys: 3}}",
            "unknown key config.retrys; did you mean 'retries'",
        ),
        (f"{{class_name: {CALCULATOR}, config: {{1: 3}}}}", "unknown key config.1; there are"),
    ],
)
def test_a_misspelt_key_of_a_tool_of_ours_is_named(tmp_path, entry, problem):
    written(tmp_path, "f.py", "def f(x: int) -> int:\n    return x\n")
    with pytest.raises(ValueError, match=problem):
        load_tools(tools_yaml(tmp_path, entry))


@pytest.mark.parametrize("name", ["gsm8k", "search", "sandbox_fusion"])
def test_verls_own_keys_are_known(name):
    stock = Path(__file__).parents[1] / "data" / "verl" / f"{name}_tool_config.yaml"
    assert len(load_tools(stock)) == 1


def test_a_users_class_may_have_any_key_also_as_a_subclass_of_ours(tmp_path, monkeypatch):
    written(
        tmp_path,
        "my_calculator.py",
        f"from {CALCULATOR.rpartition('.')[0]} import CalculatorTool\n"
        "class Mine(CalculatorTool):\n    pass\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tools_yaml(tmp_path, "{class_name: my_calculator.Mine, config: {my_key: 3}}")
    (tool,) = load_tools(file).values()
    assert tool.config == {"my_key": 3}


def test_keys_of_an_mcp_entry_are_checked_unless_its_class_is_a_users():
    settings = {"mcp_servers_config_path": "none.json"}
    entry = {"config": {"sesion": "run"}, "mcp": settings}
    with pytest.raises(ValueError, match=r"t: unknown key config.sesion; did you mean 'session'"):
        read_entry(entry, where="t", base_dir=Path())
    stock = {**entry, "class_name": "verl.tools.mcp_base_tool.MCPBaseTool"}
    with pytest.raises(ValueError, match="unknown key config.sesion"):
        read_entry(stock, where="t", base_dir=Path())
    # Read on to the next problem.
    with pytest.raises(ValueError, match=r"none.json: no such file"):
        read_entry({**entry, "class_name": "mine.Tool"}, where="t", base_dir=Path())


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path):
    file = written(
        tmp_path,
        "tools.yaml",
        f"tools:\n  - class_name: {CALCULATOR}\n    config: {{}}\n    config: {{timeout_s: 3}}\n",
    )
    with pytest.raises(ValueError, match=r"tools.yaml:4: the key 'config' is there twice"):
        read_entries(file)
    file = written(tmp_path, "i.yaml", "interaction: []\ninteraction: []\n")
    with pytest.raises(ValueError, match=r"i.yaml:2: the key 'interaction' is there twice"):
        load_interactions(file)


# --- types and classes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("{type: strin}", r"parameters.properties.x.type is 'strin', .*; did you mean 'string'\?"),
        ("{type: float}", r"x.type is 'float', expected one of array, .*; did you mean 'number'\?"),
        ("{type: [string, nul]}", r"x.type is 'nul', .*; did you mean 'null'\?"),
        ("{type: array, items: {type: objekt}}", r"x.items.type is 'objekt', .* 'object'\?"),
        ("{anyOf: [{type: string}, {type: 3}]}", r"x.anyOf\[1\].type is 3, expected one of"),
        ("{type: object, properties: {type: {type: str}}}", r"x.properties.type.type is 'str'"),
    ],
)
def test_a_type_that_json_schema_does_not_have_is_named(tmp_path, schema, problem):
    with pytest.raises(ValueError, match=rf"tools\[0\]: tool_schema.function.{problem}|{problem}"):
        load_tools(tools_yaml(tmp_path, parameters(schema)))


def test_an_argument_may_be_called_type(tmp_path):
    schema = "{type: object, properties: {type: {type: string}}, default: {type: strin}}"
    assert list(load_tools(tools_yaml(tmp_path, parameters(schema)))) == ["f"]


def test_a_function_that_nobody_decorated_is_no_tool(tmp_path):
    with pytest.raises(ValueError, match=r"class_name 'os.system' is a function that is not decor"):
        load_tools(tools_yaml(tmp_path, "{class_name: os.system}"))
    with pytest.raises(ValueError, match="os.path is not a tool: it lacks create, execute"):
        load_tools(tools_yaml(tmp_path, "{class_name: os.path}"))


# --- users' Python --------------------------------------------------------------------------------------------------


def test_a_file_that_would_end_the_process_is_named(tmp_path, monkeypatch):
    file = written(tmp_path, "leaves.py", "import sys\nsys.exit(3)\n")
    with pytest.raises(ValueError, match=r"leaves.py could not be loaded: SystemExit\(3\)"):
        load_user_file(file, "tools")
    with pytest.raises(ValueError, match=r"leaves.py could not be loaded: SystemExit\(3\)"):
        get_reward(f"{file}:compute_score")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"the import of leaves for .* failed: SystemExit\(3\)"):
        load_tools(tools_yaml(tmp_path, "{class_name: leaves.Tool}"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "interaction:\n - class_name: x.Y\n   1: 2\n   foo: 3\n",
            r"i.yaml: interaction\[0\]: unknown key '1'",
        ),
        (
            "interaction: [{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction,"
            " config: {1: 2}}]",
            r"i.yaml: interaction\[0\]: the keys of config must be texts, got 1",
        ),
    ],
)
def test_a_key_of_an_interaction_file_that_is_no_text_is_named(tmp_path, content, problem):
    with pytest.raises(ValueError, match=problem):
        load_interactions(written(tmp_path, "i.yaml", content))


def test_an_interaction_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "i.yaml"
    file.write_bytes(b"interaction: \xff")
    with pytest.raises(ValueError, match="i.yaml is not valid YAML: it is not UTF-8 text"):
        load_interactions(file)


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_corpus_is_found_beside_the_file_that_names_it(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    entry = "{class_name: rollout_sidecar.tools.bm25.Bm25SearchTool, config: {corpus: c.jsonl}}"
    file = tools_yaml(folder, entry)
    with pytest.raises(ValueError, match=r"tools\[0\]: config.corpus: c.jsonl: no such file"):
        load_tools(file)
    written(elsewhere, "c.jsonl", "")
    (tool,) = load_tools(file).values()
    assert isinstance(tool, Bm25SearchTool)
    assert tool.config["corpus"] == "c.jsonl"
    written(folder, "c.jsonl", "")
    (tool,) = load_tools(file).values()
    assert tool.config["corpus"] == str(folder / "c.jsonl")
    shutil.rmtree(folder)
