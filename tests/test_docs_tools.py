"""docs/tools.md says what is there: its Python runs, and every class, config file and setting that it names exists."""

import importlib
import re
from pathlib import Path

import pytest

from rollout_sidecar.tools.gate import GateOptions
from rollout_sidecar.tools.registry import read_entries
from tooljax.config import Config
from tooljax.metrics import REGISTRY

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_its_python_runs(block):
    exec(compile(block, "docs/tools.md", "exec"), {})


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`(rollout_sidecar(?:\.\w+)+\.[A-Z]\w+)`", PAGE)))
)
def test_every_class_is_there(path):
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_every_tool_config_is_readable():
    files = sorted((ROOT / "configs" / "tools").glob("*.yaml"))
    assert len(files) >= 8
    for file in files:
        assert read_entries(file)


def test_the_gates_keys_are_those_of_the_code():
    listed = PAGE.split("gate's keys:")[1].split("A call waits")[0]
    keys = set(re.findall(r"`(\w+)`", listed))
    assert keys == {name for name in GateOptions.__dataclass_fields__ if name in keys}
    assert len(keys) == 8


@pytest.mark.parametrize(
    "setting", sorted(set(re.findall(r"`((?:reward|sidecar)\.[a-z_]+)", PAGE)))
)
def test_every_setting_is_in_the_config(setting):
    section, field = setting.split(".")
    assert hasattr(getattr(Config(), section), field)


def test_the_statistics_are_registered():
    listed = PAGE.split("per tool `calls`")[1]
    for name in ["calls", *re.findall(r"`([a-z]\w+_(?:rate|s|mean|trajectory))`", listed)]:
        assert f"tools/{{name}}/{name}" in REGISTRY, name
    for name in re.findall(r"`((?:tools|rollout)/\w+)`", listed):
        assert name in REGISTRY, name
