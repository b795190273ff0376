"""docs/compile_check.md says what is there: its commands are taken, its names exist."""

import re
import shlex

import pytest
from docs_pages import ROOT, blocks, check_command, read, values, wrong_names

from tooljax.compile.chips import CHIPS
from tooljax.compile.shapes import shape_of
from tooljax.config import load_config

PAGE = read("compile_check.md")
COMMANDS = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
CHECKS = [line for line in COMMANDS if "compile_check" in line]


@pytest.mark.parametrize("command", CHECKS)
def test_checks_are_of_configs_that_load_and_shapes_that_are_known(command):
    words = shlex.split(command)
    files = [ROOT / file for file in values(words, "--config")]
    config = load_config(files, values(words, "--set"))
    assert shape_of(config.model.path, config.model.dtype).layers > 0
    (topology,) = values(words, "--topology")
    assert topology.partition(":")[0] in {*CHIPS, "cpu"}
    given = 2 * sum(len(values(words, flag)) for flag in ("--config", "--set", "--topology"))
    assert len(words) == 3 + given


def test_other_commands_are_taken():
    others = [line for line in COMMANDS if line not in CHECKS]
    assert len(others) == 1
    for command in others:
        check_command(command)


def test_names_exist():
    assert list(wrong_names(PAGE)) == []


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("tpu_*.gin")), ids=lambda f: f.name)
def test_configs_for_tpus_name_their_topology_and_model(file):
    text = file.read_text(encoding="utf-8")
    (topology,) = re.findall(rf"compile_check --topology (\S+) --config configs/{file.name}", text)
    assert "compiled only, not run" in text
    config = load_config([file])
    chips = 1
    for size in topology.partition(":")[2].split("x"):
        chips *= int(size)
    assert config.mesh.fsdp * config.mesh.tensor * config.mesh.data == chips
    shape = shape_of(config.model.path, config.model.dtype)
    assert shape.kv_heads % config.mesh.tensor == 0
