"""What the report calls able to run can run: files together, files beside files, and the config that comes out."""

import json
import shutil
from pathlib import Path

import pytest

from tooljax.compat.__main__ import main
from tooljax.compat.report import make_report, to_gin
from tooljax.config import load_config
from tooljax.launch import check_files
from tooljax.train import main as train

STOCK = Path(__file__).parents[1] / "data" / "verl"
ROW = {"prompt": [{"role": "user", "content": "1+1?"}], "data_source": "openai/gsm8k"}
CALCULATOR = "tools: [{class_name: rollout_sidecar.tools.calculator.CalculatorTool}]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(name: str, **fields: object) -> str:
    Path(name).write_text(json.dumps({**ROW, **fields}))
    return name


def write_script(*options: str, name: str = "run.sh") -> str:
    Path(name).write_text("python3 -m verl.trainer.main_ppo " + " ".join(options) + "\n")
    return name


# --- files together -----------------------------------------------------------------------------------------------


def test_an_interaction_that_nobody_brings_cannot_run(folder):
    rows = write_rows("rows.jsonl", extra_info={"interaction_kwargs": {"name": "bar"}})
    sentence = "rows.jsonl: rows name the interactions bar, which no file here brings"
    alone = make_report([rows])
    assert (alone.problems, alone.warnings) == ([], [sentence])
    # A launch script is a whole run, with or without a file of interactions.
    assert make_report([write_script(f"data.train_files={rows}")]).problems == [sentence]
    Path("i.yaml").write_text(
        "interaction: [{name: foo, class_name: rollout_sidecar.interactions.gsm8k.Gsm8kInteraction}]"
    )
    assert make_report([rows, "i.yaml"]).problems == [sentence]


def test_tools_that_a_row_offers_and_nobody_brings_cannot_run(folder):
    Path("tools.yaml").write_text(CALCULATOR)
    offered = write_rows("offered.jsonl", extra_info={"tool_selection": ["calculator", "search"]})
    sentence = "rows name the tools search, which no file here brings"
    assert make_report([offered, "tools.yaml"]).problems == [f"offered.jsonl: {sentence}"]
    kwargs = write_rows("kwargs.jsonl", extra_info={"tools_kwargs": {"search": {}}})
    report = make_report([kwargs, "tools.yaml"])
    assert (report.problems, report.warnings) == ([], [f"kwargs.jsonl: {sentence}"])
    # There the tools of a row are those that its tools_kwargs name.
    report = make_report([kwargs, "tools.yaml"], profile="A")
    assert report.problems == [f"kwargs.jsonl: {sentence}"]


def test_a_data_source_that_nobody_scores_cannot_run(folder):
    rows = write_rows("rows.jsonl", data_source="nosuch")
    (problem,) = make_report([write_script(f"data.train_files={rows}")]).problems
    assert problem.startswith("rows.jsonl: no built-in reward for data_source 'nosuch'")


@pytest.mark.parametrize("given", [["run.sh"], ["run.sh", "r.py"], ["r.py", "run.sh"]])
def test_the_reward_function_that_the_options_name_is_the_one_that_is_read(folder, given):
    code = "def score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
    Path("r.py").write_text(code + "def compute_score(*args, **kwargs): return 0.0\n")
    rows = write_rows("rows.jsonl", data_source="mine")
    options = (f"data.train_files={rows}", "custom_reward_function.path=r.py")
    write_script(*options, "custom_reward_function.name=score")
    report = make_report(given)
    assert report.problems == []
    assert ["score, sync"] in [reading.facts for reading in report.readings]
    assert [reading.path.name for reading in report.readings].count("r.py") == 1
    write_script(*options, "custom_reward_function.name=scor")
    assert make_report(given).problems == [
        "r.py has no function 'scor'; it has: score, compute_score"
    ]


@pytest.mark.parametrize("name", ["mcp.json", "tools.yaml"])
def test_an_mcp_server_whose_command_is_not_there_cannot_run(folder, name):
    servers = {"there": {"command": "python3"}, "gone": {"command": "no-such-server"}}
    Path("mcp.json").write_text(json.dumps({"mcpServers": servers}))
    Path("tools.yaml").write_text(
        "tools: [{config: {type: mcp}, mcp: {mcp_servers_config_path: mcp.json}}]"
    )
    (problem,) = make_report([name]).problems
    assert "MCP server 'gone' of mcp.json: its command 'no-such-server' is not there" in problem


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("i.yaml", b"interaction:\n - {class_name: x.Y, 1: 2, foo: 3}\n", "unknown key '1'"),
        ("i.yaml", b"interaction: \xff", "i.yaml is not valid YAML: it is not UTF-8 text"),
        ("t.yaml", b"tools: []\ntools: []\n", "t.yaml:2: the key 'tools' is there twice"),
        ("t.yaml", b"tools: [{class_name: os.system}]", "is a function that is not decorated"),
        (
            "r.py",
            b"import sys\ndef compute_score(): ...\nsys.exit(3)\n",
            "could not be loaded: SystemExit(3)",
        ),
    ],
)
def test_what_a_run_would_refuse_is_told(folder, name, content, problem):
    Path(name).write_bytes(content)
    (found,) = make_report([name]).problems
    assert problem in found


def test_settings_that_no_run_could_have_at_once_are_told(folder):
    script = write_script("data.max_response_length=8192", "actor_rollout_ref.rollout.top_p=0.9")
    (problem,) = make_report([script]).problems
    assert problem.startswith("sampling.top_p=0.9 samples from a truncated support")


# --- files beside files -------------------------------------------------------------------------------------------


def test_files_are_found_beside_the_script_that_names_them(folder, capsys):
    verl = folder / "verl"
    shutil.copytree(STOCK, verl)
    (folder / "gsm8k_rows.json").write_text("not this one")
    assert main(["report", "--profile", "B", "verl/run_gsm8k_multiturn.sh"]) == 0
    report = make_report(["verl/run_gsm8k_multiturn.sh"], profile="B")
    assert report.translation.settings["data.train"] == ("verl/gsm8k_rows.json",)
    assert report.translation.settings["sidecar.tool_config"] == ("verl/gsm8k_tool_config.yaml",)
    # From the folder of the .gin file, or from the working folder.
    Path("run.gin").write_text(to_gin(report))
    check_files(load_config(["run.gin"]))
    (folder / "other").mkdir()
    Path("other/run.gin").write_text(to_gin(report))
    check_files(load_config(["other/run.gin"]))


def test_paths_of_a_config_are_looked_for_beside_it_first(folder):
    sub = folder / "sub"
    sub.mkdir()
    Path("sub/run.gin").write_text(
        "data.train = ('a.jsonl', 'b.jsonl')\nreward.function = 'r.py:score'\n"
        "sidecar.interaction_config = '/no/where.yaml'\nrun.dir = 'a.jsonl'\n"
    )
    for name in ("sub/a.jsonl", "a.jsonl", "b.jsonl", "sub/r.py"):
        Path(name).touch()
    config = load_config(["sub/run.gin"])
    assert config.data.train == ("sub/a.jsonl", "b.jsonl")
    assert config.reward.function == "sub/r.py:score"
    assert config.sidecar.interaction_config == "/no/where.yaml"
    assert config.run.dir == "a.jsonl"  # it need not be there
    # The command line is in no file.
    assert load_config([], ["data.train=('sub/../a.jsonl',)"]).data.train == ("sub/../a.jsonl",)


# --- the dry run ------------------------------------------------------------------------------------------------------


def test_a_dry_run_looks_for_the_files(folder, capsys):
    arguments = ["--dry_run", "--set", "sidecar.tool_config=('no.yaml',)"]
    arguments += ["--set", "reward.function=no.py:f", "--set", "data.train=('no.jsonl',)"]
    with pytest.raises(SystemExit) as exit_:
        train(arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith(
        "tooljax.train: data.train: no.jsonl: no such file; sidecar.tool_config: no.yaml: no such file;"
        f" reward.function: no.py: no such file (looked from {folder})\n"
    )
    # Sidecars elsewhere have files of their own.
    write_rows("no.jsonl")
    with pytest.raises(SystemExit) as exit_:
        train([*arguments, "--set", "sidecar.urls=('http://there:8000',)"])
    assert exit_.value.code == 0


def test_a_run_looks_for_the_files_before_it_makes_anything(folder, capsys):
    arguments = ["--set", "sidecar.tool_config=('no.yaml',)", "--set", "run.dir=made"]
    assert train(arguments) == 1
    assert "sidecar.tool_config: no.yaml: no such file" in capsys.readouterr().err
    assert not Path("made").exists()
