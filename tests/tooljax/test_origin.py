"""What a run began with: the model's files by contents, and the settings that have changed since."""

import json

import pytest

from tooljax.config import Config, GrpoConfig, ModelConfig
from tooljax.origin import Origin, fingerprints

LARGE = 6 * 2**20


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(bytes(LARGE))
    return folder


def origin(folder, **grpo) -> Origin:
    return Origin(Config(model=ModelConfig(path=str(folder)), grpo=GrpoConfig(**grpo)))


def saved(folder, **grpo):
    """As a checkpoint returns it."""
    return json.loads(json.dumps(origin(folder, **grpo).state()))


def test_the_same_model_goes_on_wherever_it_is(folder, tmp_path):
    state = saved(folder)
    (folder / "README.md").write_text("nothing of the model")
    moved = folder.rename(tmp_path / "moved")
    origin(moved).restore(state)


@pytest.mark.parametrize("place", [0, LARGE - 1])
def test_other_weights_are_refused_by_the_name_of_their_file(folder, place):
    state = saved(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"\1")
    with pytest.raises(
        ValueError,
        match=r"is not the model that the run began with: model.safetensors has other "
        r"contents\. Tokenizer, template and reference policy come from there: put it back",
    ):
        origin(folder).restore(state)


def test_weights_of_another_size_and_files_that_came_and_went_are_all_named(folder):
    state = saved(folder)
    (folder / "model.safetensors").write_bytes(bytes(LARGE + 2**20))
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(
        ValueError,
        match=r": chat_template.jinja is new, model.safetensors has other contents, tokenizer.json is gone\.",
    ):
        origin(folder).restore(state)


def test_only_a_part_of_large_weights_is_read(folder):
    """In the gaps between the blocks nothing is looked at: 64 of 64 KiB."""
    before = fingerprints(folder)
    (folder / "large.safetensors").write_bytes(bytes(2**24))
    one = fingerprints(folder)
    with (folder / "large.safetensors").open("r+b") as file:
        file.seek(2**16 + 5)  # the second block begins at 16 MiB / 63, or so
        file.write(b"\1")
    assert fingerprints(folder) == one
    assert before.items() < one.items()


def test_settings_that_changed_are_named_with_both_values(folder):
    state = saved(folder)
    assert origin(folder).changes(state) == []
    assert origin(folder, kl_coef=0.5, group_size=4).changes(state) == [
        "grpo.group_size: 8 -> 4",
        "grpo.kl_coef: 0.001 -> 0.5",
    ]
    # A release that lacks a field, or has one more.
    state["config"] = "\n".join(
        ["grpo.old_field = 1"]
        + [line for line in state["config"].splitlines() if not line.startswith("grpo.kl_coef")]
    )
    assert origin(folder, kl_coef=0.5, group_size=4).changes(state) == ["grpo.group_size: 8 -> 4"]
