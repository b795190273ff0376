"""docs/troubleshooting.md names what there is: metrics, settings, flags, commands, links, keys of tools."""

import re
from typing import get_args

import pytest
from docs_pages import check_command, commands, read, wrong_names

from rollout_sidecar.protocol import Status
from rollout_sidecar.sidecar import Sidecar
from rollout_sidecar.tools.gate import GateOptions
from tooljax.training_batch import UNTRAINABLE

PAGE = read("troubleshooting.md")
SYMPTOMS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


def test_every_name_and_link_is_there():
    assert list(wrong_names(PAGE)) == []
    assert len(re.findall(r"`\w+\.\w+", PAGE)) >= 70
    assert len(re.findall(r"`\w+/[\w/{}]+`", PAGE)) >= 60


@pytest.mark.parametrize("command", commands(PAGE))
def test_commands_are_taken(command):
    check_command(command)


def test_a_wrong_name_is_found():
    page = "`grpo.group_sise`, `reward/maen`, `--sloots`, [x](nowhere.md), [y](#no-such), `tooljax_sidecar_x`"
    assert len(list(wrong_names(page))) == 6
    assert list(wrong_names("`grpo.group_size = 4`, `tools/{name}/calls`, `time/push_s`")) == []


def test_every_symptom_has_a_metric_or_a_command():
    assert len(SYMPTOMS) >= 12
    for part in PAGE.split("\n## ")[1:]:
        assert re.search(r"`\w+/\w|```bash|`\w+\.\w+", part), part[:40]


def test_keys_of_tools_are_the_gates():
    (section,) = re.findall(r"^## Tools fail\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    keys = set(re.findall(r"`((?:max|rate|queue|breaker|timeout)_\w+)`", section))
    assert len(keys) >= 5
    assert keys <= set(GateOptions.__dataclass_fields__)


def test_reasons_of_a_sidecar_that_is_not_ready_are_its_own():
    names = [name for name in Sidecar.why_not_ready.__code__.co_consts if isinstance(name, str)]
    said = " ".join(names)
    (section,) = re.findall(r"^## The sidecar is not ready\n(.*?)^## ", PAGE, re.M | re.DOTALL)
    for reason in (
        "the engine is still loading",
        "the engine cannot generate",
        "weights are being swapped",
    ):
        assert f"| {reason} |" in section
        assert reason in said


def test_every_ending_is_told():
    (section,) = re.findall(
        r"^## Trajectories are left out of training\n(.*?)^## ", PAGE, re.M | re.DOTALL
    )
    first_cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    told = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert sorted(told) == sorted(get_args(Status))
    trained = set(re.findall(r"`(\w+)`", first_cells[-1]))
    # A prompt that is too long has no token to train on.
    assert trained == set(get_args(Status)) - {*UNTRAINABLE, "prompt_too_long"}
