"""Whole runs of adapters in this process: they learn, go on exactly, are served merged, and are exported."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from gate_cases import make_config, make_folder, serve_model
from safetensors.numpy import load_file
from served_sidecars import Served

from tooljax import train as training
from tooljax.checkpoint import Checkpointer
from tooljax.config import Config
from tooljax.config.schema import (
    CheckpointConfig,
    DataConfig,
    GateConfig,
    GrpoConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    TrackConfig,
)
from tooljax.export import main
from tooljax.policy import load_policy, make_updater
from tooljax.rollouts import Sidecars
from tooljax.train import train

STEPS = 8

REWARD = """
def count(data_source, solution_str, ground_truth, extra_info=None):
    even = sum(ord(c) % 2 == 0 for c in solution_str)
    return {"score": even / max(len(solution_str), 1), "acc": 0.0}
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    root = tmp_path_factory.mktemp("lora")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Problem {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(4)
    ]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "reward.py").write_text(REWARD)
    return make_config(
        make_folder(root / "policy"),
        run=RunConfig(dir=str(root / "run"), steps=STEPS, progress="off"),
        data=DataConfig(train=(str(root / "train.jsonl"),), prompts_per_step=4),
        grpo=GrpoConfig(group_size=8, kl_coef=1e-3),
        optimizer=OptimizerConfig(learning_rate=3e-2, warmup_steps=0),
        lora=LoraConfig(rank=4),
        track=TrackConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=4, keep=STEPS),
        gate=GateConfig(prompts=2, max_tokens=8),
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_once(config):
    """All runs here make the same updates, by the same programs."""
    updater = make_updater(config, load_policy(config), total_updates=STEPS, learning_rate=3e-2)
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_updater", lambda *_, **__: updater)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def served(config, compiled_once):
    folder = Path(config.model.path)
    with serve_model(folder) as served:
        served.sidecar.agent.scorer.reward = f"{folder.parent / 'reward.py'}:count"
        yield served


def trained(config: Config, served: Served) -> int:
    """Of a run that is started here."""
    with Sidecars([served.url], token=None, timeout_s=60.0) as sidecars:
        return train(config, sidecars)


@pytest.fixture(scope="module")
def run(config, served) -> Path:
    """The folder of a run that made all its steps."""
    assert trained(config, served) == STEPS
    return Path(config.run.dir)


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_adapters_learn_and_are_served_merged(run):
    logged = rows(run)
    rewards = [row["reward/mean"] for row in logged]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    # Merged weights in the engine, adapters beside frozen ones in the trainer.
    assert all(row["gate/mean_kl"] < 1e-9 for row in logged)
    # The first rollouts are of the very weights that are the reference.
    kls = [row["policy/kl_ref"] for row in logged]
    assert kls[0] < 1e-9 < 1e-3 < kls[-1]


def test_a_run_goes_on_exactly(run, config, served, tmp_path):
    half = replace(config, run=replace(config.run, dir=str(tmp_path / "half"), steps=STEPS // 2))
    assert trained(half, served) == STEPS // 2
    assert trained(replace(half, run=replace(half.run, steps=STEPS)), served) == STEPS
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        again, straight = (
            load_file(folder / "policy" / name) for folder in (tmp_path / "half", run)
        )
        for tensor, value in straight.items():
            np.testing.assert_array_equal(again[tensor], value, err_msg=tensor)


def test_another_alpha_is_refused(run, config, served, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    other = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    other = replace(other, lora=replace(config.lora, alpha=32.0))
    with pytest.raises(
        ValueError, match=r"lora.alpha=32.0, but the run began with 16.0: its adapters"
    ):
        trained(other, served)


def test_a_checkpoint_has_no_weights_of_the_base(run):
    with Checkpointer(run / "checkpoints", keep=STEPS) as checkpoints:
        assert checkpoints.steps() == [4, 8]
    held = {file.name for file in (run / "checkpoints" / "8" / "arrays").iterdir()}
    described = (run / "checkpoints" / "8" / "arrays" / "_METADATA").read_text()
    assert "wq_a" in described, held
    assert "embedding" not in described


def test_checkpoints_are_exported(run, config, tmp_path, capsys):
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert main([str(run), "--merged", str(merged), "--adapter", str(adapter)]) == 0
    assert capsys.readouterr().out == f"wrote step 8 to {merged} and {adapter}\n"
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (merged / file).read_bytes() == (run / "policy" / file).read_bytes()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (adapter / file).read_bytes() == (run / "policy" / "adapter" / file).read_bytes()
    assert main([str(run), "--step", "4", "--adapter", str(tmp_path / "earlier")]) == 0
    earlier, last = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "earlier", adapter)
    )
    assert all(not np.array_equal(earlier[name], last[name]) for name in last)
    # Which can be gone on from.
    start = replace(config.lora, adapter=str(adapter))
    policy = load_policy(replace(config, lora=start))
    exported = load_file(merged / "model.safetensors")
    for name, value in policy.tensors(policy.trained):
        np.testing.assert_array_equal(value, exported[name], err_msg=name)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--step", "5", "--merged", "x"],
            "holds the steps [4, 8], and none is marked as the best",
        ),
        (["--step", "best", "--merged", "x"], "and none is marked as the best"),
        (["--set", "lora.rank=0", "--adapter", "x"], "trains all weights (lora.rank=0)"),
        (
            ["--set", "lora.alpha=1", "--adapter", "x"],
            "lora.alpha=1.0, but the run began with 16.0",
        ),
        (["--set", "lora.rank=8", "--merged", "x"], "lora.rank: 4 -> 8"),
    ],
)
def test_what_cannot_be_exported_is_told(run, capsys, arguments, sentence):
    assert main([str(run), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tooljax.export: ")
    assert sentence in error


def test_a_run_that_saved_nothing_is_told(run, tmp_path, capsys):
    (tmp_path / "config.gin").write_text((run / "config.gin").read_text())
    assert main([str(tmp_path), "--merged", "x"]) == 1
    assert "checkpoints does not exist: the run has saved nothing yet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "name a folder with --merged or --adapter" in capsys.readouterr().err
