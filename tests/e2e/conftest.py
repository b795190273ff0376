"""A small world for whole runs: arithmetic data, a two-layer decoder, and a config that trains it in seconds."""

import argparse
from pathlib import Path

import pytest

from tooljax.data.prepare import arithmetic
from tooljax.model import tiny

ROOT = Path(__file__).parents[2]

CONFIG = """
run.seed = 3
run.steps = 4
run.progress = "plain"
model.dtype = "float32"
model.remat = "none"
data.prompts_per_step = 4
limits.max_turns = 2
limits.max_tokens_per_turn = 12
limits.max_prompt_tokens = 48
limits.max_trajectory_tokens = 96
limits.max_tool_result_tokens = 16
sidecar.slots = 8
sidecar.max_model_tokens = 128
grpo.group_size = 4
grpo.zero_variance = "keep"
optimizer.learning_rate = 1e-3
optimizer.warmup_steps = 1
batch.row_lengths = (128,)
batch.rows_per_microbatch = 4
checkpoint.every_steps = 1
sft.steps = 3
sft.conversations_per_step = 16
sft.learning_rate = 1e-3
"""

REWARD = """
def variety(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": len(set(solution_str)) / 20, "acc": 0.0}
"""


@pytest.fixture(scope="session")
def small_world(tmp_path_factory) -> Path:
    """A folder with data/, model/ and run.gin."""
    folder = tmp_path_factory.mktemp("world")
    parser = argparse.ArgumentParser()
    arithmetic.add_arguments(parser)
    sizes = ["--train", "24", "--heldout", "8", "--demonstrations", "64"]
    arithmetic.run(parser.parse_args(["--output_dir", str(folder / "data"), *sizes]))
    texts = tiny.chat_texts(folder / "data" / "demonstrations.jsonl")
    tiny.build(folder / "model", texts, vocab=400, embed=64, layers=2, seed=0)
    (folder / "reward.py").write_text(REWARD)
    lines = [
        CONFIG,
        f'model.path = "{folder / "model"}"',
        f'data.train = ("{folder / "data" / "train.parquet"}",)',
        f'data.eval = ("{folder / "data" / "heldout.parquet"}",)',
        f'sft.demonstrations = ("{folder / "data" / "demonstrations.jsonl"}",)',
        # Untrained, it solves nothing, and rewards that are all equal teach nothing.
        f'reward.function = "{folder / "reward.py"}:variety"',
        f'sidecar.tool_config = ("{ROOT / "configs" / "tools" / "calculator.yaml"}",)',
    ]
    (folder / "run.gin").write_text("\n".join(lines) + "\n")
    return folder
