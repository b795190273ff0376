"""The page for verl's users says what the code does: its tables of profiles and options, and its Python."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_sidecar.profiles import PROFILES, Profile
from tooljax.compat.options import OPTIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_verl.md").read_text()


def table_after(heading: str) -> list[list[str]]:
    """The rows of the first table after a heading, without its head."""
    lines = PAGE.split(f"\n## {heading}")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_profiles_is_that_of_the_code():
    rows = {row[0].split("`")[1]: row[1:] for row in table_after("3.")}
    fields = {field.name for field in dataclasses.fields(Profile)}
    # The aggregation of that name is not among the trainer's yet.
    assert set(rows) == fields - {"name", "seq_mean_token_sum_norm"}
    for name, values in rows.items():
        assert values == [str(getattr(profile, name)) for profile in PROFILES.values()], name


def test_every_option_with_a_setting_is_in_the_table():
    rows = table_after("6.")
    for option in OPTIONS.values():
        if not option.field:
            continue
        last = option.name.rpartition(".")[2]
        cells = [row for row in rows if f"`{option.field}" in row[1]]
        assert any(last in row[0] for row in cells), (option.name, option.field)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
def test_its_python_runs(block):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL))
def test_its_commands_run(block, tmp_path):
    script = block.replace("python ", f"{sys.executable} ")
    script = script.replace("run.gin", f"{tmp_path}/run.gin")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["/bin/sh", "-ec", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
