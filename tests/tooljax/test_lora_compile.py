"""compile_check of a run of adapters: its programs, and what of memory they spare."""

import json

import pytest
from update_cases import CONFIG

from tooljax.compile.chips import topology
from tooljax.compile.program import compile_update
from tooljax.config import load_config
from tooljax.model.hf_config import config_fields

SETTINGS = [
    *("batch.row_lengths=(16,)", "batch.rows_per_microbatch=8", "model.dtype=bfloat16"),
    *("limits.max_trajectory_tokens=16", "limits.max_prompt_tokens=8", "weights.mode=full"),
    *("mesh.fsdp=2", "lora.rank=2"),
]


@pytest.mark.usefixtures("quick_compilations")
def test_adapters_take_the_place_of_weights_in_all_but_the_forward_pass(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_fields(CONFIG)))
    config = load_config([], [f"model.path={tmp_path}", *SETTINGS])
    compiled = compile_update(config, topology("cpu:2"))
    programs = {program.name: program for program in compiled.programs}
    assert list(programs) == ["cast", "log-probs", "gradients", "apply"]
    # Inputs and outputs of q, k, v, o, and of gate, up and down, each times rank 2, in two layers.
    adapters = 2 * 2 * (16 + 12 + 12 + 16 + 3 * 20)
    # Adapters, two moments and a gradient in float32, split over two devices but for what has no such axis.
    assert programs["apply"].argument_bytes < 4 * 4 * adapters + 300
    # Everything else is there beside it: the weights in bfloat16 and the rounded adapters.
    assert programs["apply"].held_bytes == pytest.approx(
        2 * compiled.weights / 2 + 2 * adapters / 2, rel=0.5
    )
    assert compiled.weights > 5 * adapters / 4
