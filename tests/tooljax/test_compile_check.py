"""python -m tooljax.compile_check: a small decoder compiled for eight CPUs, the errors, and what tables are made of."""

import importlib.util
import json
import re
from dataclasses import replace

import jax
import pytest
from update_cases import CONFIG

from tooljax import compile_check
from tooljax.compile.chips import CHIPS, GIB, NoCompiler, topology
from tooljax.compile.hlo import Collective, Traffic
from tooljax.compile.program import Program, compile_update
from tooljax.compile.report import roofline
from tooljax.compile.shapes import SHAPES, shape_of
from tooljax.config import load_config
from tooljax.model.flops import layer_weights
from tooljax.model.hf_config import config_fields

BILLIONS = {
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
}
"""As the model cards say."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config_fields(CONFIG)))
    return folder


@pytest.fixture(scope="module")
def compiled(folder):
    """Compiled once, for both tests of what is printed of it."""
    config = load_config([], arguments(folder, "grpo.kl_coef=0.1")[1::2])
    return compile_update(config, topology("cpu:8"))


def arguments(folder, *settings: str) -> list[str]:
    shape = ["batch.row_lengths=(16,)", "batch.rows_per_microbatch=8", "model.dtype=float32"]
    limits = ["limits.max_trajectory_tokens=16", "limits.max_prompt_tokens=8"]
    all_settings = [f"model.path={folder}", *shape, *limits, *settings]
    return [word for setting in all_settings for word in ("--set", setting)]


def test_a_small_decoder_for_eight_cpus(folder, compiled, capsys, monkeypatch):
    monkeypatch.setattr(compile_check, "compile_update", lambda config, devices: compiled)
    words = ["--topology", "cpu:8", *arguments(folder, "grpo.kl_coef=0.1")]
    assert compile_check.main(words) == 0
    told = capsys.readouterr().out
    assert "(8 x cpu), mesh fsdp=8" in told
    rows = {
        line.split("|")[1].strip(): [float(x) for x in line.split("|")[2:8]]
        for line in told.splitlines()
        if re.match(r"\| (log-probs|gradients|apply) \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", line)
    }  # fmt: skip
    assert set(rows) == {"log-probs", "gradients", "apply"}
    # Weights are gathered for use, layer by layer, in both programs that use them.
    line = re.compile(r"^\| (\S+) \| (all-gather|all-reduce|reduce-scatter) \| (\d+) \|", re.M)
    counted = {(program, kind): int(count) for program, kind, count in line.findall(told)}
    assert counted["log-probs", "all-gather"] >= 9 * CONFIG.layers
    assert counted["gradients", "all-gather"] > counted["log-probs", "all-gather"]
    assert ("apply", "all-gather") not in counted


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--topology", "v9:4x4"], "--topology 'v9:4x4' is unknown; write a chip of ['v5e', 'v5p'"),
        (["--topology", "v5e"], "is unknown; write a chip of"),
        ([], "--topology '' is unknown"),
        (["--topology", "cpu:99"], "cpu:99: JAX has been started with 8 CPUs"),
        (["--topology", "cpu:8", "--set", "model.path=runs/Qwen2.5-8B"], "its last part names none"),
        (["--topology", "cpu:8", "--set", "mesh.fsdp=3", "--set", "mesh.tensor=3",
          "--set", "batch.rows_per_microbatch=9"], "takes 9 devices"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_a_sentence(words, sentence, capsys):
    assert compile_check.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_it_says_so(capsys):
    assert compile_check.main(["--topology", "v5e:4x4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs libtpu, the compiler for TPUs, which is not installed: pip install" in line
    with pytest.raises(NoCompiler):
        topology("v6e:8x8")


def test_what_does_not_fit_is_told_with_the_way_out(folder, compiled, capsys, monkeypatch):
    small = replace(topology("cpu:8"), chip=replace(CHIPS["v5e"], hbm_bytes=1e4))
    monkeypatch.setattr(compile_check, "topology", lambda name: small)
    monkeypatch.setattr(compile_check, "compile_update", lambda config, devices: compiled)
    assert compile_check.main(["--topology", "v5e:4x4", *arguments(folder)]) == 1
    out, err = capsys.readouterr()
    assert "| bound |" in out
    assert "gradients needs 0.00 GiB of the 0.00 GiB of a v5e; use more devices, fewer" in err


def test_a_program_that_the_compiler_found_no_room_for_is_told(folder, capsys, monkeypatch):
    """As TPU and GPU compilers say it; CPUs have no limit."""
    sentence = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.2G of 15.75G hbm.\nmore"
    )

    def no_room(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError(sentence)

    monkeypatch.setattr(jax.stages.Lowered, "compile", no_room)
    assert compile_check.main(["--topology", "cpu:8", *arguments(folder, "grpo.kl_coef=0.1")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"tooljax.compile_check: log-probs: {sentence.splitlines()[0]}"


def test_the_roofline_is_its_longest_part():
    moved = Traffic({"all-reduce": Collective(1, 2e9, 4e9)}, hbm_bytes=0.819e12)
    program = Program("gradients", 0, 0, 0, 3 * GIB, 2 * GIB, 98.5e12, 0, moved, 0)
    # 98.5 of 197 TFLOP/s: half a second. All of the memory's bytes in a second: one. 4 GB at 200 GB/s: 20 ms.
    time = roofline(program, CHIPS["v5e"])
    assert tuple(time) == pytest.approx((0.5, 1.0, 0.02))
    assert (time.seconds, time.bound) == (1.0, "HBM")
    assert program.needed_bytes == 5 * GIB


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_as_many_weights_as_their_cards_say(name):
    cfg = SHAPES[name]
    weights = layer_weights(cfg) + cfg.vocab * cfg.embed * (1 if cfg.tied_head else 2)
    assert weights / 1e9 == pytest.approx(BILLIONS[name], rel=0.03)
    assert set(SHAPES) == set(BILLIONS)


def test_a_path_names_a_shape_and_a_folder_has_its_own(folder):
    assert shape_of("runs/Qwen3-4B-Base", "bfloat16") == SHAPES["Qwen3-4B"]
    assert shape_of("Qwen2.5-7B-Instruct", "float32").dtype == "float32"
    assert shape_of(str(folder), "float32") == CONFIG
