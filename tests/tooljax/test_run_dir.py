"""The folder of a run: a file in its place is told, and so is what changed since it was last used."""

import dataclasses

import pytest

from tooljax.config import Config, GrpoConfig, RunConfig, load_config
from tooljax.run_dir import differences, make_run_dir, write_config


def config(tmp_path, **grpo):
    return Config(run=RunConfig(dir=str(tmp_path / "run")), grpo=GrpoConfig(**grpo))


@pytest.mark.parametrize("place", ["run", "."])
def test_a_file_in_its_place_is_told(tmp_path, place):
    blocked = tmp_path / "run" if place == "run" else tmp_path / "file"
    blocked.write_text("")
    folder = blocked if place == "run" else blocked / "run"
    bad = Config(run=RunConfig(dir=str(folder)))
    with pytest.raises(ValueError, match=r"run\.dir=.* cannot be made, .* is a file; name another"):
        make_run_dir(bad)


def test_what_changed_is_named_with_both_values(tmp_path):
    first = config(tmp_path)
    make_run_dir(first)
    assert write_config(first) == []
    second = dataclasses.replace(first, grpo=GrpoConfig(kl_coef=0.5, group_size=4))
    assert write_config(second) == ["grpo.group_size: 8 -> 4", "grpo.kl_coef: 0.001 -> 0.5"]
    assert load_config([str(tmp_path / "run" / "config.gin")]) == second


def test_a_config_of_another_release_is_nothing_to_compare_with(tmp_path):
    first = config(tmp_path)
    (make_run_dir(first) / "config.gin").write_text("grpo.no_such_field = 3\n")
    assert write_config(first) == []


def test_equal_configs_do_not_differ(tmp_path):
    assert differences(config(tmp_path), config(tmp_path)) == []
