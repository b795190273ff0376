"""The tutorials in docs/ run: their files are written, their Python is executed, their commands parsed."""

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_pages import DOCS, blocks, check_command, commands, read, wrong_names

PAGES = ["first_run.md", "own_tool.md", "own_reward.md", "mcp.md", "sandbox_fusion.md"]
FILE = re.compile(
    r"^[^\n]*`([\w.]+\.(?:py|yaml|json))`[^\n]*:\n\n```(?:python|yaml|json)\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)


def files(page: str) -> dict[str, str]:
    """Blocks that a line ending in a colon, which names a file, comes before."""
    return dict(FILE.findall(page))


def programs(page: str) -> list[str]:
    return [block for block in blocks(page, "python") if block not in files(page).values()]


@pytest.mark.parametrize("page", PAGES)
def test_every_name_and_link_is_there(page):
    assert list(wrong_names(read(page))) == []


@pytest.mark.parametrize("command", sorted({c for page in PAGES for c in commands(read(page))}))
def test_commands_are_taken(command):
    check_command(command)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tested(page):
    kinds = re.findall(r"^```(\w+)\n", read(page), re.MULTILINE)
    # Starting a container is the one thing that is not tried here.
    allowed = {"python", "bash", "yaml", "json", *(["console"] if "sandbox" in page else [])}
    assert set(kinds) <= allowed
    named = files(read(page))
    for kind in ("yaml", "json"):
        assert all(block in named.values() for block in blocks(read(page), kind))


def run(page: str, folder: Path, **replaced: str) -> None:
    """Writes the page's files, then runs its programs, in order, in a process of their own."""
    for name, text in files(read(page)).items():
        for old, new in replaced.items():
            text = text.replace(old.replace("__", "://"), new)
        (folder / name).write_text(text)
        if name.endswith(".yaml"):
            assert yaml.safe_load(text)["tools"]
        if name.endswith(".json"):
            assert json.loads(text)["mcpServers"]
    assert programs(read(page))
    path = os.pathsep.join([str(DOCS.parent), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(programs(read(page)))],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", ["own_tool.md", "own_reward.md"])
def test_your_own_runs(page, tmp_path):
    run(page, tmp_path)


def test_the_mcp_server_answers(tmp_path):
    pytest.importorskip("mcp")
    run("mcp.md", tmp_path)


def test_the_first_run_reads_its_metrics(tmp_path):
    row = {"step": 7, "reward/mean": 0.5, "tools/use_rate": 1.0, "policy/kl_mismatch": 1e-9}
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    run("first_run.md", tmp_path)


@pytest.fixture
def sandbox_url(monkeypatch) -> Iterator[str]:
    """A server with Sandbox Fusion's contract, in a thread."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "tests" / "rollout_sidecar"))
    servers = importlib.import_module("servers_sandbox_fusion")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Any:
        return await servers.SandboxFusionServer().__aenter__()

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_programs_run_on_a_sandbox_fusion_server(sandbox_url, tmp_path):
    run("sandbox_fusion.md", tmp_path, **{"http__127.0.0.1:8080": sandbox_url})
