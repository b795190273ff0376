"""docs/lora.md: its settings are taken, its commands parsed, its programs run, and its names exist."""

import shlex

import pytest
from docs_pages import blocks, commands, read, wrong_names
from lora_cases import busy_adapters, lora_settings, opened

from tooljax.config import load_config
from tooljax.export import parser

PAGE = read("lora.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With model, adapter and merged, as the page calls them."""
    folder = tmp_path_factory.mktemp("lora")
    policy, _ = opened(lora_settings(folder / "model"))
    policy.save_adapter(busy_adapters(policy), folder / "adapter")
    policy.save(busy_adapters(policy), folder / "merged")
    return folder


def test_settings_are_taken(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for number, block in enumerate(blocks(PAGE, "gin")):
        file = folder / f"run{number}.gin"
        file.write_text(block)
        lora = load_config([file]).lora
        assert (lora.rank, lora.alpha) == (16, 16.0)
    assert lora.adapter == "adapter"


def test_commands_are_taken():
    found = commands(PAGE)
    assert found
    for command in found:
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "tooljax.export"]
        parser().parse_args(words[3:])


def test_names_exist():
    assert list(wrong_names(PAGE)) == []


def test_merging_by_hand_gives_what_is_exported(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (program,) = [block for block in blocks(PAGE, "python") if "numpy" in block]
    assert "assert_allclose" in program
    exec(program, {})


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_what_is_exported(folder, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(folder)
    (program,) = [block for block in blocks(PAGE, "python") if "peft" in block]
    names: dict = {}
    exec(program, names)
    assert names["model"].peft_config["default"].r == 4
