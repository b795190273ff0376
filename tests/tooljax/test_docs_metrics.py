"""docs/metrics.md has every metric that anything logs, and no other: compared with the registry, with the source, and
with what a real run and its sidecar write."""

import ast
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from gate_cases import make_config, make_folder, serve_model
from sources import sources

from rollout_sidecar.metrics import COUNTERS, HISTOGRAMS, PREFIX
from rollout_sidecar.protocol import InteractionReply, ToolCallRecord
from rollout_sidecar.statistics import KEPT, Facts, prometheus_name, statistics
from tooljax.config.schema import (
    DataConfig,
    EvaluateConfig,
    GateConfig,
    GrpoConfig,
    GuardConfig,
    RunConfig,
    TrackConfig,
)
from tooljax.metrics import REGISTRY
from tooljax.rollouts import Sidecars
from tooljax.store import stored_steps
from tooljax.store.evaluations import DURING
from tooljax.train import train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
CELL = r"((?:[^|\\]|\\.)*)"
ROWS = {
    name: [cell.strip().replace("\\|", "|") for cell in cells]
    for name, *cells in re.findall(
        rf"^\| `([^`]+)` \|{CELL}\|{CELL}\|{CELL}\|$", PAGE, re.MULTILINE
    )
}
TRAINERS = {name for name in ROWS if "/" in name}
SIDECARS = {name.removeprefix(PREFIX) for name in ROWS if name.startswith(PREFIX)}

pytestmark = pytest.mark.timeout(180)
"""The run compiles a model, which a busy machine does slowly."""

READERS = ("tooljax/metrics.py", "tooljax/plots.py", "tooljax/progress.py", "tooljax/view/")
"""Where names are read or declared, not logged."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[set[str], str]:
    """Names of a step with reference policy, importance weights and evaluation; and the sidecar's /metrics after it."""
    place = tmp_path_factory.mktemp("run")
    folder = make_folder(place / "model", layers=1)
    rows: list[dict[str, Any]] = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Problem {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(2)
    ]
    (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = (str(place / "train.jsonl"),)
    config = make_config(
        folder,
        run=RunConfig(dir=str(place / "run"), steps=1, progress="off"),
        data=DataConfig(train=files, eval=files, prompts_per_step=2),
        grpo=GrpoConfig(group_size=2, zero_variance="keep", rollout_is="token"),
        track=TrackConfig(tensorboard=False),
        gate=GateConfig(every_pushes=1, prompts=2, max_tokens=8),
        guard=GuardConfig(action="skip", max_truncated_frac=0.0),
        evaluate=EvaluateConfig(every_steps=1, samples=2, temperature=1.0),
    )
    with (
        serve_model(folder) as served,
        Sidecars([served.url], token=None, timeout_s=60.0) as sidecars,
    ):
        assert train(config, sidecars) == 1
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
    assert stored_steps(place / "run" / "evaluation" / DURING) == [0, 1]
    return {name for line in lines for name in json.loads(line)} - {"step"}, text


def braceless(name: str) -> str:
    return re.sub(r"\{\w+\}", "{}", name)


def missing_row(name: str) -> str:
    metric = REGISTRY[name]
    return (
        f"| `{name}` | {metric.unit} | {metric.meaning} | what is normal, and what to do if not |"
    )


def test_every_registered_metric_has_its_row():
    lacking = [missing_row(name) for name in REGISTRY if name not in TRAINERS]
    assert not lacking, "docs/metrics.md lacks these rows:\n" + "\n".join(lacking)


def test_every_row_is_of_a_registered_metric_in_its_unit():
    assert sorted(TRAINERS - set(REGISTRY)) == []
    for name in TRAINERS:
        unit, meaning, reading = ROWS[name]
        assert unit == REGISTRY[name].unit, name
        assert len(meaning) > 5, name
        assert len(reading) > 5, name


def test_a_run_logs_what_the_page_has(run):
    names, _ = run
    assert len(names) >= 60
    patterns = [
        re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+(?:/[^/]+)?", re.escape(name))) for name in TRAINERS
    ]
    for name in names:
        told = name in TRAINERS or re.match(r"eval/(reward|rollout|tools|interaction)/", name)
        bare = name.removeprefix("eval/") if told else name
        assert any(p.fullmatch(bare) or p.fullmatch(name) for p in patterns), name


def test_something_logs_each_row(run):
    """By name in a run, or as a literal in the source, or as a statistic of trajectories."""
    names, _ = run
    logged = {braceless(each) for each in names} | literals() | statistic_names()

    def is_logged(name: str) -> bool:
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name)))
        return braceless(name) in logged or any(pattern.fullmatch(each) for each in names)

    unlogged = sorted(name for name in TRAINERS if not is_logged(name))
    assert not unlogged, f"docs/metrics.md has {', '.join(unlogged)}, which nothing logs"


def literals() -> set[str]:
    """Strings of the source that could be a metric's name, with {} for what an f-string fills in."""
    found = set()
    for source in sources():
        declared = source.path == "tooljax/metrics.py"
        if source.path.startswith(READERS) and not declared:
            continue
        for statement in source.tree.body:
            if isinstance(statement, ast.AnnAssign) and declared:
                continue  # the registry itself
            for node in ast.walk(statement):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        str(part.value) if isinstance(part, ast.Constant) else "{}"
                        for part in node.values
                    ]
                    found.add("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(braceless(node.value))
    return found


def statistic_names() -> set[str]:
    """Of trajectories with a call of each kind."""
    record = {"name": "tool", "result": "", "metrics": {"failed": 0.0, "timed_out": 0.0}}
    calls = [ToolCallRecord(status=status, **record) for status in ("ok", "error", "parse_error")]
    reply = InteractionReply(text="", done=True)
    played = [
        Facts("completed", calls, [reply], 1.0, {"tool": 1.0}),
        Facts("completed", [], [], 0.0, {}),
    ]
    return {braceless(each.name) for each in statistics(played)}


def test_the_sidecars_metrics_are_told(run):
    _, text = run
    families = set(re.findall(rf"^# TYPE {PREFIX}(\w+) ", text, re.MULTILINE))
    gauges = families - set(COUNTERS) - set(HISTOGRAMS)
    of_trajectories = {prometheus_name(name) for name in REGISTRY}
    own = gauges - of_trajectories
    assert len(own) >= 8
    swaps = {"weight_pause_seconds", "weight_swap_seconds"}
    assert {*COUNTERS, *HISTOGRAMS, *own, *swaps} == SIDECARS - of_trajectories
    assert f"its last {KEPT} trajectories" in PAGE
