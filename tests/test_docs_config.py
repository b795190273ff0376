"""docs/config.md is what the schema says, every field of it."""

import re
import subprocess
import sys
from pathlib import Path

from tooljax.config.gin import SECTIONS
from tooljax.config.reference import COMMAND, reference

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "config.md"


def test_the_page_is_what_the_module_prints():
    same = PAGE.read_text(encoding="utf-8") == reference()
    assert same, f"docs/config.md is not what the schema says; run: {COMMAND}"


def test_the_command_prints_the_page():
    words = COMMAND.split(" > ")[0].split()
    assert words[0] == "python"
    assert COMMAND.endswith(" > docs/config.md")
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == reference(), done.stderr


def test_every_field_is_a_row_of_four_cells():
    rows = re.findall(r"^\| `(\w+\.\w+)` (.*)\|$", reference(), re.MULTILINE)
    fields = [f"{section}.{name}" for section in SECTIONS for name in SECTIONS[section]]
    assert [name for name, _ in rows] == fields
    for name, rest in rows:
        kind, default, meaning = [cell.strip() for cell in re.split(r"(?<!\\)\|", rest)[1:4]]
        assert kind, name
        assert default.startswith("`"), name
        assert len(meaning) >= 5, name


def test_ranges_and_choices_are_told():
    text = reference()
    assert "| `grpo.group_size` | int >= 2 | `8` | Trajectories of one prompt." in text
    assert "| `limits.tool_timeout_s` | float > 0 | `80.0` |" in text
    assert "| `run.progress` | one of 'live', 'plain', 'off' | `'live'` |" in text
