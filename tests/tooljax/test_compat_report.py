"""The report on a verl user's files: each is recognised and read as a run would, and what cannot run is said."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_sidecar.profiles import PROFILES
from tooljax.compat.__main__ import main
from tooljax.compat.files import read_file
from tooljax.compat.points import POINTS, points_for
from tooljax.compat.report import make_report, to_text

STOCK = Path(__file__).parents[1] / "data" / "verl"


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stock files as the working folder, with records as Parquet too."""
    folder = tmp_path / "verl"
    shutil.copytree(STOCK, folder)
    for rows in folder.glob("*_rows.json"):
        table = pa.Table.from_pylist(json.loads(rows.read_text()))
        pq.write_table(table, rows.with_suffix(".parquet"))
    monkeypatch.chdir(folder)
    return folder


def words(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gsm8k_tool_config.yaml", "tool_config"),
        ("mcp_tool_config.yaml", "tool_config"),
        ("mcp_server.json", "mcp"),
        ("gsm8k_interaction_config.yaml", "interaction"),
        ("gsm8k_rows.json", "records"),
        ("gsm8k_rows.parquet", "records"),
        ("multiturn_options.yaml", "options"),
        ("run_gsm8k_multiturn.sh", "options"),
    ],
)
def test_every_stock_file_is_recognised_and_can_run(stock, name, kind):
    reading = read_file(Path(name), profile="B")
    assert (reading.kind, reading.problems) == (kind, [])


def test_python_files_are_told_apart(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "from verl.utils.reward_score import gsm8k\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return gsm8k.compute_score(solution_str, ground_truth)\n"
    )
    tools = tmp_path / "functions.py"
    tools.write_text(
        "from verl.tools.function_tool import function_tool\n"
        "@function_tool('shout')\n"
        "def f(text: str) -> str:\n    return text.upper()\n"
    )
    found = read_file(reward, profile="C")
    assert (found.kind, found.problems, found.facts) == ("reward", [], ["compute_score, async"])
    found = read_file(tools, profile="C")
    assert (found.kind, found.problems, found.tools) == ("function_tools", [], {"shout"})


BROKEN = {
    "nowhere.yaml": (None, "nowhere.yaml: no such file (looked from "),
    "a.txt": ("x", "a.txt: files of type .txt are none of verl's"),
    "a.yaml": ("x: [", "a.yaml is not valid YAML"),
    "b.yaml": ("x: 1", "b.yaml: no file of verl's: expected the key tools, interaction, or options"),
    "c.yaml": ("mcpServers: {}", "c.yaml: MCP servers are named in a JSON file"),
    "d.yaml": ("- {name: mine, _target_: my.Loop}", "d.yaml: agent loops of your own cannot run here"),
    "e.yaml": ("tools: [{class_name: no_such.Tool}]", "e.yaml: tools[0]: cannot import no_such"),
    "f.yaml": ("interaction: [{name: x}]", "f.yaml: interaction[0]: class_name is missing"),
    "a.json": ('{"mcpServers": {"s": {}}}', "server 's'"),
    "b.json": ("[{}]", "b.json, row 0 (the first is 0): prompt is missing"),
    "a.jsonl": ('{"prompt": 3}', "a.jsonl, row 0 (the first is 0; line 1): prompt must be a list"),
    "a.py": ("x = 1", "a.py: neither a function compute_score nor functions with @function_tool"),
    "b.py": ("def compute_score(:", "b.py: not valid Python"),
    "c.py": (
        "def compute_score(solution_str, ground_truth): return 1",
        "c.py: compute_score cannot be called with data_source, solution_str, ground_truth, extra_info",
    ),
    "d.py": ("import nothing_there\ndef compute_score(): ...", "No module named 'nothing_there'"),
    "a.sh": ("echo hello\n", "a.sh: no option of verl (option=value) in it"),
    "b.sh": ("echo 'a\n", "b.sh: No closing quotation"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_a_sentence(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    content, message = BROKEN[name]
    if content is not None:
        Path(name).write_text(content)
    assert any(message in problem for problem in read_file(Path(name), profile="B").problems)
    assert main(["report", name]) == 1
    printed = words(capsys.readouterr().out)
    assert f"CANNOT RUN {name}" in printed
    assert message in printed


def test_the_report_follows_the_files_that_a_script_names(stock, capsys):
    assert main(["report", "--profile", "B", "run_gsm8k_multiturn.sh"]) == 0
    text = words(capsys.readouterr().out)
    assert text.startswith(
        "profile B: verl 0.5.0 to 0.7.1 files ok run_gsm8k_multiturn.sh (options)"
    )
    assert (
        "ok gsm8k_tool_config.yaml (tool_config) calc_gsm8k_reward: rollout_sidecar.tools.gsm8k.Gsm8kTool"
        in text
    )
    assert (
        "ok gsm8k_rows.json (records) 1 rows, 1 rows with tools_kwargs tools: calc_gsm8k_reward"
        in text
    )
    assert "data.prompts_per_step = 256 <- data.train_batch_size" in text
    assert "(no setting) <- trainer.total_epochs: a run is as long as run.steps says" in text
    assert (
        "not used here: actor_rollout_ref.rollout.gpu_memory_utilization, trainer.n_gpus_per_node"
        in text
    )
    assert (
        "lifetime of a tool's instance verl B: create, execute, release for each call: state is lost between calls"
        " tooljax: one a call, as there; release always runs, also when it is aborted" in text
    )
    assert text.endswith("everything here can run")


def test_only_the_differences_that_matter_are_listed(stock):
    names = {
        name: {point.name for point in points_for(make_report([name], profile="B").readings[0].subjects)}
        for name in ("search_tool_config.yaml", "mcp_tool_config.yaml", "gsm8k_interaction_config.yaml")
    }  # fmt: skip
    assert "rate limits and workers" in names["search_tool_config.yaml"]
    assert "sessions with an MCP server" not in names["search_tool_config.yaml"]
    assert "sessions with an MCP server" in names["mcp_tool_config.yaml"]
    assert "lifetime of a tool's instance" not in names["gsm8k_interaction_config.yaml"]


def test_what_verl_left_out_of_the_prompt_is_named(stock):
    (reading,) = make_report(["search_tool_config.yaml"], profile="B").readings
    assert (
        "search: the policy sees what verl left out of the prompt: query_list.item" in reading.facts
    )


def test_files_are_compared_with_each_other(stock):
    report = make_report(
        ["gsm8k_interaction_config.yaml", "search_tool_config.yaml", "gsm8k_rows.json"]
    )
    assert report.problems == []
    assert report.warnings == [
        "gsm8k_rows.json: rows name the tools calc_gsm8k_reward, which no file here brings"
    ]
    text = Path("gsm8k_interaction_config.yaml").read_text()
    Path("other.yaml").write_text(text.replace('"gsm8k"', '"tutor"'))
    report = make_report(["other.yaml", "interaction_rows.parquet"])
    assert report.problems == [
        "interaction_rows.parquet: rows name the interactions gsm8k, which no file here brings"
    ]


def test_a_data_source_without_a_reward_cannot_run(stock):
    rows = json.loads(Path("gsm8k_rows.json").read_text())
    Path("mine.json").write_text(json.dumps([{**rows[0], "data_source": "mine"}]))
    (problem,) = make_report(["mine.json"]).problems
    assert problem.startswith("mine.json: no built-in reward for data_source 'mine'")
    Path("reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
    )
    assert make_report(["mine.json", "reward.py"]).problems == []


@pytest.mark.parametrize("profile", list(PROFILES))
def test_every_point_has_its_text_in_every_profile(stock, profile):
    text = words(
        to_text(
            make_report([p.name for p in STOCK.iterdir() if p.suffix != ".md"], profile=profile)
        )
    )
    assert text.endswith("everything here can run")
    for point in POINTS:
        assert point.name in text
        # Where nothing conflicts, the profile's semantics are that release's own.
        assert point.of(profile)
        assert point.ours(PROFILES[profile])  # type: ignore[index]


def test_the_points_of_a_profile_follow_its_fields():
    """The texts come from the profile itself, so that they cannot say something else than a run does."""
    by_name = {point.name: point for point in POINTS}
    said = {
        name: by_name["how create gets its kwargs"].ours(profile)
        for name, profile in PROFILES.items()
    }
    assert said == {
        "default": "create(instance_id, **create_kwargs)",
        "A": "create(instance_id, **create_kwargs)",
        "B": "create(create_kwargs={...})",
        "C": "create(create_kwargs={...})",
    }
    for name in ("A", "B"):
        point = by_name["the text with which an interaction ends"]
        assert point.of(name) == point.ours(PROFILES[name])


def test_an_unknown_profile_is_refused(stock, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["report", "--profile", "D", "gsm8k_rows.json"])
    assert caught.value.code == 2
    with pytest.raises(ValueError, match="unknown compat profile 'D'"):
        make_report([], profile="D")


def test_the_command_runs(stock):
    command = [sys.executable, "-m", "tooljax.compat", "config", "multiturn_options.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "limits.max_turns = 5  # actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
        in done.stdout
    )
