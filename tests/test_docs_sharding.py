"""docs/sharding.md shows the table that the code has, and the parts in which weights are stored."""

import re
import shlex

import pytest
from docs_pages import blocks, read, values, wrong_names

from tooljax.compile.shapes import shape_of
from tooljax.config import load_config
from tooljax.model.decoder import layer_shapes
from tooljax.sharding import COMPUTE_RULES, RULES, SHARED

PAGE = read("sharding.md")
LETTERS = {"embed": "D", "q_heads": "N", "kv_heads": "K", "head_dim": "H", "ffw": "F", "vocab": "V"}


def test_the_table_is_the_codes():
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|$", PAGE, re.M)
    shown = {axis: [tuple(cell.replace(",", " ").split()) for cell in rest] for axis, *rest in rows}
    assert shown == {axis: [RULES[axis], COMPUTE_RULES[axis]] for axis in RULES}
    assert set(SHARED) == {"vocab", "kv_heads"}


@pytest.mark.parametrize("names", ["wq", "wk, wv", "wo", "w_gate, w_up", "w_down"])
def test_the_picture_has_weights_as_they_are_stored(names):
    axes = layer_shapes(shape_of("Qwen2.5-0.5B", "bfloat16"))[names.split(",")[0]][1]
    parts = ["/".join([LETTERS[axis], *RULES[axis]]) for axis in axes]
    assert f"{names} [{'  '.join(parts)}]" in PAGE


def test_the_command_is_taken_and_names_exist():
    (command,) = blocks(PAGE, "bash")
    config = load_config([], values(shlex.split(command), "--set"))
    assert config.mesh.fsdp * config.mesh.tensor == 8
    assert list(wrong_names(PAGE)) == []
