"""docs/evaluation.md says what is there: its commands are taken, its settings, metrics and defaults exist."""

import re
import shlex
from pathlib import Path

import pytest

from tooljax import replay
from tooljax.config import Config, load_config
from tooljax.config.gin import SECTIONS
from tooljax.evaluation.best import check_best_metric
from tooljax.evaluation.conditions import Condition
from tooljax.guards import Guard
from tooljax.metrics import describe

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line
]
RULES = re.findall(r"^\| [^|]+ \| `guard\.(\w+)` \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)


def words(command: str) -> list[str]:
    return shlex.split(command)[3:]


def values(command: str, name: str) -> list[str]:
    given = words(command)
    return [given[i + 1] for i, word in enumerate(given) if word == name]


def test_there_are_commands_of_each_program():
    programs = [shlex.split(command)[2] for command in COMMANDS]
    assert set(programs) == {"tooljax.evaluate", "tooljax.train", "tooljax.replay"}
    assert programs.count("tooljax.evaluate") == 4


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--config" in c])
def test_commands_are_taken(command):
    """The run's config.gin is the quickstart's, with the files that it has made."""
    assert values(command, "--config") == ["runs/quickstart/config.gin"]
    settings = ["data.eval=('heldout.parquet',)", *values(command, "--set")]
    config = load_config([ROOT / "configs" / "quickstart.gin"], settings)
    assert config.run.dir == "runs/quickstart"
    assert len(words(command)) == 2 + 2 * len(values(command, "--set"))
    check_best_metric(config.evaluate)


def test_the_replay_command_asks_for_a_step(capsys):
    (command,) = [c for c in COMMANDS if "tooljax.replay" in c]
    assert words(command) == ["runs/quickstart", "--step", "12"]
    with pytest.raises(SystemExit):
        replay.main(["--help"])
    assert "--step STEP" in capsys.readouterr().out


def test_every_setting_is_there():
    sections = "|".join(SECTIONS)
    settings = set(re.findall(rf"`((?:{sections})\.[a-z0-9_]+)(?: = [^`]*)?`", PAGE))
    assert len(settings) >= 25
    for setting in settings:
        section, field = setting.split(".")
        assert field in SECTIONS[section], setting


def test_every_metric_is_there():
    areas = "eval|policy|optim|rollout|tools|reward|gate|guard"
    names = set(re.findall(rf"`((?:{areas})/[a-z0-9_/{{}}]+)`", PAGE))
    assert len(names) >= 25
    for name in names:
        filled = re.sub(r"\{k\}", "4", re.sub(r"\{(status|term)\}", "x", name))
        assert describe(filled) is not None, name


def test_every_rule_is_told_with_its_default():
    defaults = Config().guard
    told = {name for name, _, _ in RULES}
    limits = {name for name in SECTIONS["guard"] if name.startswith(("max_", "min_"))}
    assert told == limits - {"max_actions"}
    for name, _, default in RULES:
        number = re.search(r"[\d.]+", default)
        assert getattr(defaults, name) == (float(number[0]) if number else 0.0), name
        assert ("off" in default) == (number is None)


def test_rules_of_an_update_name_the_metric_that_is_bounded():
    all_set = load_config(
        [],
        [
            "guard.action=skip",
            "guard.min_entropy=1",
            "guard.max_entropy=2",
            "guard.max_grad_norm=3",
        ],
    )
    told = {metric.strip("`") for _, metric, _ in RULES}
    assert set(Guard(all_set.guard).update_limits()) <= told


def test_conditions_and_actions_are_those_that_there_are():
    conditions = {*Config().evaluate.conditions, "base/no_tools", "base/single_turn"}
    for name in conditions:
        assert f"`{name}`" in PAGE
        assert Condition.parse(name).name == name
    actions = re.findall(r"^\| `(\w+)`(?: \(default\))? \| ", PAGE, re.MULTILINE)[-4:]
    assert actions == ["warn", "skip", "rollback", "stop"]
    for action in actions:
        assert load_config([], [f"guard.action={action}"]).guard.action == action
    assert Config().guard.action == "warn"
