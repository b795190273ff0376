"""Every code block of every page is of a kind that some test runs or takes, and every config says what it gave."""

import re

import pytest
from docs_pages import DOCS, ROOT, check_command
from sources import PACKAGES

from rollout_sidecar.tools.registry import read_entries

TESTS = ROOT / "tests"

TESTED: dict[str, tuple[str, set[str]]] = {
    "async.md": ("test_docs_async.py", {"gin"}),
    "compile_check.md": ("test_docs_compile_check.py", {"bash"}),
    "curriculum.md": ("test_docs_curriculum.py", {"gin", "python"}),
    "deployment.md": ("test_docs_deployment.py", {"bash"}),
    "evaluation.md": ("test_docs_evaluation.py", {"bash"}),
    "first_run.md": ("test_docs_tutorials.py", {"bash", "python"}),
    "from_verl.md": ("tooljax/test_compat_docs.py", {"python", "sh", "text", "yaml", ""}),
    "lora.md": ("tooljax/test_docs_lora.py", {"bash", "gin", "python"}),
    "many_hosts.md": ("test_docs_many_hosts.py", {"bash"}),
    "mcp.md": ("test_docs_tutorials.py", {"bash", "json", "python", "yaml"}),
    "metrics.md": ("test_docs_blocks.py", {"bash"}),
    "own_reward.md": ("test_docs_tutorials.py", {"bash", "python"}),
    "own_tool.md": ("test_docs_tutorials.py", {"bash", "python", "yaml"}),
    "sandbox_fusion.md": ("test_docs_tutorials.py", {"bash", "console", "python", "yaml"}),
    "sharding.md": ("test_docs_sharding.py", {"bash", ""}),
    "shared_prompts.md": ("tooljax/test_shared_prompts.py", {"gin", "text"}),
    "tools.md": ("test_docs_tools.py", {"python"}),
    "troubleshooting.md": ("test_docs_troubleshooting.py", {"bash"}),
    "viewer.md": ("tooljax/test_view_docs.py", {"bash"}),
}
"""By page: the test of its blocks, and their kinds."""

PAGES = sorted(file.name for file in DOCS.glob("*.md"))
CONFIGS = sorted(file.name for file in (ROOT / "configs").glob("*.gin"))


def fenced(text: str) -> list[tuple[str, str]]:
    """Kind and content of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_every_kind_of_block_has_its_test(page):
    kinds = {kind for kind, _ in fenced((DOCS / page).read_text(encoding="utf-8"))}
    test, known = TESTED.get(page, ("", set()))
    assert kinds == known, f"write a test of these blocks of {page}, and say so in TESTED"
    assert not kinds or page in (TESTS / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "configs/README.md", "docs/metrics.md"])
def test_commands_are_taken(page):
    text = "".join(block for _, block in fenced((ROOT / page).read_text(encoding="utf-8")))
    lines = text.replace("\\\n", " ").splitlines()
    found = [line for line in lines if re.match(r"(python|make|[A-Z_]+=\S+ python) ", line)]
    assert found
    for command in found:
        check_command(command)


def test_what_from_verl_shows_beside_programs(tmp_path):
    """Its commands in sh and its Python are run by tooljax/test_compat_docs.py."""
    blocks = dict(fenced((DOCS / "from_verl.md").read_text(encoding="utf-8")))
    check_command(" ".join(blocks[""].replace("\\\n", " ").split()))
    (tmp_path / "tools.yaml").write_text(blocks["yaml"])
    assert len(read_entries(tmp_path / "tools.yaml")) == 2
    said = "".join(p.read_text() for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    for part in (
        *(
            "is it on PYTHONPATH?",
            "comes earlier",
            "did you mean ",
            "is there twice; keep one of them",
        ),
        *("(the first is 0)", "must be the name of an interaction", "leave the field out"),
    ):
        assert part in blocks["text"]
        assert part in said, part


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_says_hardware_time_and_result(config):
    page = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {re.escape(config)} \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 1, f"configs/README.md has {len(rows)} rows for {config}"
    cells = [cell.strip() for cell in rows[0].split("|")]
    assert len(cells) == 4, cells
    assert all(len(cell) >= 5 for cell in cells), cells
