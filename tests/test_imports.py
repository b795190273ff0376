"""Who may import whom, and what an import may cost (ARCHITECTURE.md, section 2)."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from sources import ROOT, Source, sources

SHARED = frozenset(
    f"rollout_sidecar.{name}"
    for name in (
        *("protocol", "client", "connection", "tokenizer", "conversation", "formats", "statistics"),
        "weight_codec",
        "threads",
        "host_memory",
    )
)
"""The modules of the sidecar that the trainer uses too."""

USER_FILES = frozenset(
    f"rollout_sidecar.{name}"
    for name in ("profiles", "tools", "interactions.registry", "rewards.registry", "user_files")
)
"""The readers of users' files, which the report on them uses as a run would."""

SCORING = frozenset(f"rollout_sidecar.{name}" for name in ("scoring", "profiles", "metrics"))
"""What rewards of stored trajectories are made again with."""

WIRE = {"aiohttp", "msgspec", "xxhash"}
SIDECAR = WIRE | {"jinja2", "numpy", "tokenizers", "yaml", "yarl", "zstandard"}
TOOLS = {"anyio", "bm25s", "httpx2", "math_verify", "mcp", "mcp_types"}
"""Imported where they are used, and named by the error where they are missing: the extra `tools`."""
ARRAYS = {"jax", "jaxtyping", "ml_dtypes", "numpy"}
TRAINER = ARRAYS | {
    *("aiohttp", "msgspec", "xxhash", "yaml", "jinja2", "tokenizers"),
    *("flax", "grain", "optax", "orbax", "safetensors"),
    *("matplotlib", "mlflow", "pyarrow", "rich", "tensorboard", "wandb", "zstandard"),
}

SAMPLERS = frozenset(f"rollout_sidecar.{name}" for name in ("verl_names", "verl_samplers"))
"""What a user's sampler of verl's is loaded with."""


class Rule(NamedTuple):
    """What the modules under `prefix` may import beside the standard library and each other."""

    prefix: str
    ours: frozenset[str]
    others: set[str]


RULES = [  # the first whose prefix fits
    Rule("pallas_kernels", frozenset({"pallas_kernels"}), ARRAYS),
    Rule("tooljax.config", frozenset({"tooljax.config"}), set()),
    Rule("tooljax.compat", SHARED | {"tooljax"} | USER_FILES, TRAINER),
    Rule("tooljax.replay_rewards", SHARED | {"tooljax"} | SCORING, TRAINER),
    Rule(  # a profile says what an aggregation of losses is called in the release that a user comes from
        "tooljax.objective", SHARED | {"tooljax", "rollout_sidecar.profiles"}, TRAINER
    ),
    Rule("tooljax.curriculum", SHARED | {"tooljax"} | SAMPLERS, TRAINER),
    Rule("tooljax", SHARED | {"tooljax", "pallas_kernels"}, TRAINER),
    Rule("rollout_sidecar.protocol", frozenset({"rollout_sidecar.protocol"}), WIRE),
    Rule("rollout_sidecar.client", SHARED | {"rollout_sidecar.weight_client"}, WIRE),
    Rule("rollout_sidecar.weight_client", SHARED | {"rollout_sidecar.weight_manifest"}, WIRE),
    Rule("rollout_sidecar.connection", SHARED, WIRE),
    Rule(
        "rollout_sidecar.engines.jax", frozenset({"rollout_sidecar", "tooljax"}), SIDECAR | ARRAYS
    ),
    Rule("rollout_sidecar.engines.sglang", frozenset({"rollout_sidecar"}), SIDECAR | {"sglang"}),
    *(
        Rule(f"rollout_sidecar.engines.{name}", frozenset({"rollout_sidecar"}), SIDECAR | {"torch"})
        for name in ("sglang_weights", "sglang_memory")
    ),
    Rule("rollout_sidecar.tools", frozenset({"rollout_sidecar"}), SIDECAR | TOOLS),
    Rule("rollout_sidecar.rewards", frozenset({"rollout_sidecar"}), SIDECAR | TOOLS),
    Rule("rollout_sidecar", frozenset({"rollout_sidecar"}), SIDECAR),
]


def _under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, in functions too. `from a import b` counts as a.b."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{source.path}:{node.lineno}: write imports in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _breaches(source: Source) -> Iterator[str]:
    rule = next(rule for rule in RULES if _under(source.module, rule.prefix))
    for line, name in _imports(source):
        root = name.partition(".")[0]
        ours = any(_under(name, allowed) for allowed in rule.ours)
        if not (ours or root in rule.others or root in sys.stdlib_module_names):
            yield f"{source.path}:{line}: {rule.prefix} may not import {name}"


def test_imports_between_packages_follow_the_table():
    breaches = [breach for source in sources() for breach in _breaches(source)]
    assert not breaches


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tooljax.config.gin", "import numpy"),
        ("tooljax.config.gin", "from tooljax import batch"),
        ("tooljax.batch", "from rollout_sidecar.agent import Agent"),
        ("tooljax.batch", "from rollout_sidecar import agent"),
        ("tooljax.batch", "from rollout_sidecar.tools.registry import load_tools"),
        ("tooljax.compat.files", "from rollout_sidecar import agent"),
        ("tooljax.batch", "def f():\n    import torch"),
        ("rollout_sidecar.server", "from jax import numpy"),
        ("rollout_sidecar.server", "from tooljax.config import Config"),
        ("rollout_sidecar.engines.jax", "import torch"),
        ("rollout_sidecar.protocol", "from rollout_sidecar import agent"),
        ("pallas_kernels.token_log_probs.api", "import tooljax.batch"),
    ],
)
def test_the_table_forbids(module, line):
    assert list(_breaches(Source("x.py", module, line)))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tooljax.batch", "from rollout_sidecar import protocol"),
        ("tooljax.compat.files", "from rollout_sidecar.tools.registry import load_tools"),
        ("tooljax.batch", "from rollout_sidecar.formats.base import get_format"),
        ("rollout_sidecar.engines.jax", "from tooljax.model import sampler"),
        ("rollout_sidecar.server", "import asyncio, aiohttp"),
    ],
)
def test_the_table_allows(module, line):
    assert not list(_breaches(Source("x.py", module, line)))


def _modules_that_come_with(module: str) -> set[str]:
    """What a fresh interpreter has in sys.modules after the import, beyond what it started with."""
    script = (
        "import sys; before = set(sys.modules)\n"
        f"import {module}\n"
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("rollout_sidecar.server", {"jax", "jaxlib", "flax", "torch", "sglang", "tooljax"}),
        ("rollout_sidecar.client", {"jax", "torch", "tokenizers", "rollout_sidecar.server"}),
        ("tooljax.train", {"torch", "transformers", "sglang", "rollout_sidecar.server"}),
        ("tooljax.compat.report", {"jax", "torch", "mcp", "rollout_sidecar.server"}),
    ],
)
def test_an_import_stays_light(module, unwanted):
    assert not unwanted & _modules_that_come_with(module)


def test_the_config_package_needs_the_standard_library_only():
    roots = {name.partition(".")[0] for name in _modules_that_come_with("tooljax.config")}
    assert roots - set(sys.stdlib_module_names) == {"tooljax"}
