"""docs/curriculum.md says what is there: its settings are taken, its sampler runs, its fields and metrics exist."""

import re
from pathlib import Path

import numpy as np
import pytest

from rollout_sidecar.protocol import Task, Trajectory
from tooljax.config import Config, load_config
from tooljax.config.gin import SECTIONS
from tooljax.curriculum.source import open_source
from tooljax.curriculum.stages import FIELDS
from tooljax.metrics import describe

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "curriculum.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"```gin\n(.*?)```", PAGE, re.DOTALL)
(SAMPLER,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

TASKS = [
    Task(
        task_id=f"{name}:{i}",
        messages=[{"role": "user", "content": "x"}],
        extra_info={"level": level, "index": i + 4 * (level - 1)},
    )
    for level, name in enumerate(("low", "high"), start=1)
    for i in range(4)
]


def config(tmp_path: Path, text: str) -> Config:
    (tmp_path / "sampler.py").write_text(SAMPLER)
    (tmp_path / "run.gin").write_text(text.replace("sampler.py", str(tmp_path / "sampler.py")))
    return load_config([tmp_path / "run.gin"], ["data.prompts_per_step=2"])


def test_there_is_a_block_for_each_kind():
    assert len(SETTINGS) == 3


@pytest.mark.parametrize("text", SETTINGS)
def test_settings_are_taken(tmp_path, text):
    source = open_source(config(tmp_path, text), TASKS)
    assert source.kind != "uniform"
    assert len(source.next(0, 0)) == 2


def test_the_sampler_takes_what_scores_least(tmp_path):
    """What was drawn has at least 0.01 more than what was not."""
    source = open_source(config(tmp_path, SETTINGS[2]), TASKS)
    seen = []
    for step in range(4):
        tasks = source.next(step, 0)
        seen += [task.extra_info["index"] for task in tasks]
        groups = [[trajectory(task)] for task in tasks]
        source.observe(step, groups, np.zeros((2, 1)))
    assert seen == list(range(8))


def trajectory(task: Task) -> Trajectory:
    return Trajectory(
        task_index=0,
        sample_index=0,
        task_id=task.task_id,
        seed=0,
        status="completed",
        token_ids=[1, 2],
        prompt_tokens=1,
        loss_mask=[False, True],
        rollout_log_probs=[0.0, -1.0],
        reward=1.0,
    )


def test_settings_and_metrics_exist():
    settings = set(re.findall(r"`(\w+)\.(\w+)(?: = [^`]+)?`", PAGE))
    named = {(s, n) for s, n in settings if s in SECTIONS and s != "batch"}  # update's argument
    assert named >= {("curriculum", "explore"), ("grpo", "zero_variance")}
    assert all(name in SECTIONS[section] for section, name in named)
    metrics = re.findall(r"`(curriculum/[^`]+)`", PAGE)
    assert len(metrics) == 4
    assert all(describe(name) for name in metrics)


def test_fields_of_conditions_are_told():
    assert all(f"`{field}`" in PAGE for field in FIELDS)
