"""What the quickstart does around training: it never mixes two runs, and takes up what a killed one left."""

import json

import pytest
from rich.console import Console

from tooljax.config import Config, load_config
from tooljax.quickstart import prepare


@pytest.fixture
def config(tmp_path) -> Config:
    settings = [
        f"run.dir={tmp_path / 'run'}",
        "run.progress=off",
        "sft.steps=1",
        "sft.conversations_per_step=8",
        "mesh.fsdp=1",
    ]
    return load_config(["configs/quickstart.gin"], settings)


def test_a_folder_of_another_seed_is_refused(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "seed").write_text("7")
    with pytest.raises(
        ValueError, match=r"holds a quickstart with run.seed=7, not 0; choose another run.dir"
    ):
        prepare(config, Console(quiet=True))


def test_preparing_twice_makes_everything_once(config, tmp_path):
    prepared = prepare(config, Console(quiet=True))
    assert prepared.model.path == str(tmp_path / "run" / "sft")
    files = [
        tmp_path / "run" / name
        for name in ("data/train.parquet", "model/model.safetensors", "sft/model.safetensors")
    ]
    before = [file.stat().st_mtime_ns for file in files]
    assert prepare(config, Console(quiet=True)) == prepared
    assert [file.stat().st_mtime_ns for file in files] == before
    # A model folder without its tokenizer is what a killed build leaves.
    (tmp_path / "run" / "model" / "tokenizer_config.json").unlink()
    prepare(config, Console(quiet=True))
    template = json.loads((tmp_path / "run" / "model" / "tokenizer_config.json").read_text())
    assert "chat_template" in template
