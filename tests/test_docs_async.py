"""docs/async.md: its settings are taken, what it says is refused is refused, and its names exist."""

import re

import pytest
from docs_pages import blocks, read, wrong_names

from tooljax.config import ConfigError, load_config

PAGE = read("async.md")


def test_settings_are_taken(tmp_path):
    (tmp_path / "run.gin").write_text("".join(blocks(PAGE, "gin")))
    config = load_config([tmp_path / "run.gin"])
    assert (config.async_.max_policy_lag, config.async_.oversampling) == (1, 1.25)
    assert config.grpo.rollout_is == "token"


def test_names_exist():
    assert list(wrong_names(PAGE)) == []


@pytest.mark.parametrize(
    "setting",
    [
        "sidecar.share_gpu=True",
        "curriculum.kind=pools",
        "curriculum.class_path=x.py",
        "grpo.zero_variance=refill",
    ],
)
def test_what_the_page_says_is_refused_is_refused(setting):
    assert setting.partition("=")[0] in re.sub(r"\s", " ", PAGE.rpartition("## ")[2])
    beside = ["curriculum.class_name=X"] if "class_path" in setting else []
    with pytest.raises(ConfigError, match="async.max_policy_lag=1"):
        load_config([], ["async.max_policy_lag=1", setting, *beside])
