"""What the tests of the pages in docs/ share: blocks, and whether what a page names is there."""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from rollout_sidecar import arguments
from rollout_sidecar.metrics import PREFIX
from rollout_sidecar.statistics import prometheus_name
from tooljax.config import load_config
from tooljax.config.gin import SECTIONS
from tooljax.cost import parser as cost_parser
from tooljax.metrics import REGISTRY
from tooljax.view.__main__ import parser as view_parser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

AREAS = {name.split("/")[0] for name in REGISTRY}
OPTIONS_OF_OTHERS = ("--dry_run", "--config", "--set", "--step")


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Lines of bash blocks, continued lines joined."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def check_command(command: str) -> None:
    """Parses a command by the parser of its own program. AssertionError or SystemExit if it is none."""
    words = shlex.split(command.rstrip("& "), comments=True)
    while re.fullmatch(r"[A-Z_]+=\S+", words[0]):  # of the environment
        words = words[1:]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        return
    if words[0] == "curl":
        assert re.fullmatch(r"http://127.0.0.1:8000/(healthz|readyz|metrics)", words[1]), command
        return
    assert words[:2] == ["python", "-m"], command
    module, given = words[2], words[3:]
    if module == "rollout_sidecar":
        arguments.parser().parse_args(given)
    elif module == "tooljax.view":
        view_parser().parse_args(given)
    elif module == "tooljax.replay":
        assert re.fullmatch(r"\S+( --step \d+)?", " ".join(given)), command
    elif module == "rollout_sidecar.certification":
        assert len(given) == 1, command
    elif module == "tooljax.data.prepare":
        parser = argparse.ArgumentParser()
        importlib.import_module(f"tooljax.data.prepare.{given[0]}").add_arguments(parser)
        parser.parse_args(given[1:])
    elif module == "tooljax.cost":
        cost_parser().parse_args(given)
    else:
        assert module in ("tooljax.train", "tooljax.evaluate", "tooljax.sft"), command
        # A run's config.gin is the quickstart's here, with the files that it has made.
        made = {"runs/quickstart/config.gin": "configs/quickstart.gin"}
        made |= {"configs/x.gin": "configs/quickstart.gin"}
        files = [made.get(file, file) for file in values(given, "--config")]
        there = [ROOT / file for file in files if file != "runs/latest/config.gin"]
        load_config(there, ["data.eval=('heldout.parquet',)", *values(given, "--set")])
        others = len(given) - 2 * len(files) - 2 * len(values(given, "--set"))
        assert others == given.count("--dry_run"), command


def values(words: list[str], flag: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == flag]


def wrong_names(page: str) -> Iterator[str]:
    """Settings, metrics, flags and links of the page that do not exist."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        setting = re.match(r"([a-z]+)\.([a-z0-9_]+)(?: = (.+))?$", code)
        if setting and setting[1] in SECTIONS and "/" not in code:
            if setting[2] not in SECTIONS[setting[1]] and not code.endswith((".py", ".md")):
                yield code
            elif setting[3] and not setting[3].startswith("("):
                load_config([], [f"{setting[1]}.{setting[2]}={setting[3]}", *beside(code)])
        elif code.startswith(PREFIX):
            if not is_of_the_sidecar(code.removeprefix(PREFIX)):
                yield code
        elif re.match(r"\w+/.*[^/]$", code) and code.split("/")[0] in AREAS and not is_metric(code):
            yield code
        elif re.fullmatch(r"--[a-z0-9_]+", code) and code not in OPTIONS_OF_OTHERS:
            if code not in arguments.parser().format_help():
                yield code
    for link in re.findall(r"\]\(([^)]+)\)", text):
        yield from wrong_link(link, page)


def beside(code: str) -> list[str]:
    """Settings that one takes with it."""
    return {"evaluate.best_mode": ["data.eval=('x',)"]}.get(code.split(" ")[0], [])


def wrong_link(link: str, page: str) -> Iterator[str]:
    if link.startswith(("http://", "https://")):
        return
    file, _, anchor = link.partition("#")
    target = (DOCS / file).resolve() if file else None
    if target is not None and not target.exists():
        yield link
    elif anchor:
        headings = re.findall(r"^#+ (.*)$", target.read_text() if target else page, re.MULTILINE)
        if anchor not in {slug(heading) for heading in headings}:
            yield link


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def is_metric(name: str) -> bool:
    """A registered one, where {braces} are as they are registered, or a phase of time/, or one of eval/."""
    if name in REGISTRY or re.fullmatch(
        r"time/(rollout|batch|update|push|gate|store|evaluate|step)_s", name
    ):
        return True
    rest = name.removeprefix("eval/")
    return rest != name and rest.split("/")[0] in AREAS and rest in REGISTRY


def is_of_the_sidecar(name: str) -> bool:
    """A statistic of trajectories, or a row of docs/metrics.md, which a real sidecar's text is compared with."""
    statistics = {prometheus_name(each) for each in REGISTRY}
    bare = name.split("{")[0]
    return bare in statistics or f"| `{PREFIX}{bare}` |" in read("metrics.md")
