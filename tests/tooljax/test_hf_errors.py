"""What is said about Hugging Face folders that the decoder cannot run, or that are damaged."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from random_decoder import random_decoder
from safetensors.numpy import load_file, save_file

from tooljax.model import hf
from tooljax.model.decoder import DecoderConfig, Llama3RopeScaling
from tooljax.model.hf_names import EMBEDDING, HEAD

LLAMA = DecoderConfig(
    family="llama",
    vocab=29,
    embed=16,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=4,
    ffw=24,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied_head=False,
    max_positions=64,
    dtype="float32",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf.save(random_decoder(LLAMA), tmp_path / "whole")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return hf.save(random_decoder(LLAMA), tmp_path / "sharded", max_shard_bytes=6_000)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in fields.items() if v != "drop"}))


def edit_weights(file: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


# --- config.json ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            r"architectures=\['Qwen3MoeForCausalLM'\] is not",
        ),
        (
            {"architectures": "drop"},
            r"architectures=\[\] is not supported; the decoder runs one of",
        ),
        ({"model_type": "mistral"}, "model_type='mistral' contradicts architectures"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: the decoder has silu only"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config=.*dequantise the weights first",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=.* full attention only",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling=.*'linear'.* is not supported",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters=.*'yarn'.* is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "the same in all layers"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor is missing"),
        ({"hidden_size": "drop"}, "hidden_size is missing"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 must be a positive integer"),
        ({"num_key_value_heads": 3}, "config.json: q_heads=4 must be a multiple of kv_heads=3"),
        (
            {"head_dim": None, "hidden_size": 15},
            "hidden_size=15 is not a multiple of num_attention",
        ),
    ],
)
def test_models_that_the_decoder_cannot_run_are_refused(folder: Path, changes: dict, message: str):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        hf.read_config(folder, "float32")


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, True),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, False),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, False),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, False),
    ],
)
def test_sliding_windows_are_refused_only_when_a_layer_uses_one(
    folder: Path, changes: dict, refused: bool
):
    edit_config(folder, **QWEN2, **changes)
    if refused:
        with pytest.raises(ValueError, match="use_sliding_window=True is not supported"):
            hf.read_config(folder, "float32")
    else:
        assert hf.read_config(folder, "float32").qkv_bias


def test_both_forms_of_rope_settings_are_read(folder: Path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    expected = dataclasses.replace(
        LLAMA, rope_theta=5e5, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 32)
    )
    edit_config(folder, rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | scaling)
    assert hf.read_config(folder, "float32") == expected
    new = {"rope_type": "llama3", "rope_theta": 5e5} | scaling
    edit_config(folder, rope_theta="drop", rope_scaling="drop", rope_parameters=new)
    assert hf.read_config(folder, "float32") == expected


def test_fields_that_are_left_out_have_transformers_defaults(folder: Path):
    dropped = dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", "hidden_act"), "drop")
    edit_config(folder, **dropped)
    assert hf.read_config(folder, "float32") == dataclasses.replace(LLAMA, kv_heads=4)


def test_a_missing_field_is_named_with_its_file_once(folder: Path):
    edit_config(folder, rms_norm_eps="drop")
    with pytest.raises(ValueError, match=r"^\S*config\.json: rms_norm_eps is missing$"):
        hf.read_config(folder, "float32")


def test_unreadable_configs_are_named(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        hf.read_config(folder, "float32")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json does not exist: model\.path must be"):
        hf.load(folder, "float32")


# --- weights ----------------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), rf"tensor {UP} \[24, 16\] is in none of the weight files"),
        (
            lambda t: t.update({UP: np.zeros((24, 15), np.float32)}),
            rf"model\.safetensors: tensor {UP} has shape \[24, 15\]; config\.json makes it \[24, 16\]",
        ),
        (
            lambda t: t.update({UP: np.zeros((24, 16), np.int8)}),
            rf"tensor {UP} has dtype I8; only \['F32', 'F16', 'BF16'\] are read",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[UP]}),
            r"model\.safetensors: tensor model\.layers\.2\.mlp\.up_proj\.weight .* has no place in",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Callable, message: str):
    edit_weights(folder / hf.WEIGHTS, change)
    with pytest.raises(ValueError, match=message):
        hf.load(folder, "float32")


def test_a_missing_shard_is_named(sharded: Path):
    (sharded / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"model-00002-of-00004\.safetensors is missing: .* puts model\.layers"
    ):
        hf.load(sharded, "float32")


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_shard_that_was_cut_short_is_named(sharded: Path, kept: int):
    shard = sharded / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model-00002-of-00004\.safetensors is cut short"):
        hf.load(sharded, "float32")


def test_a_shard_that_lacks_its_tensor_is_named(sharded: Path):
    shard = sharded / json.loads((sharded / hf.INDEX).read_text())["weight_map"][UP]
    edit_weights(shard, lambda tensors: tensors.pop(UP))
    with pytest.raises(ValueError, match=rf"{shard.name} lacks tensor {UP} that .*index\.json"):
        hf.load(sharded, "float32")


def test_a_tensor_in_two_shards_is_refused(sharded: Path):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    edit_weights(second, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(
        ValueError, match=f"tensor {name} is in both .*{first.name} and .*{second.name}"
    ):
        hf.load(sharded, "float32")


def test_a_folder_without_weights_or_with_a_broken_index_is_refused(folder: Path, sharded: Path):
    (folder / hf.WEIGHTS).unlink()
    with pytest.raises(
        ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index"
    ):
        hf.load(folder, "float32")
    (sharded / hf.INDEX).write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json has no readable weight_map"):
        hf.load(sharded, "float32")


def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(folder: Path):
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differs .* tie_word_embeddings=true; set it"
    ):
        hf.load(folder, "float32")
    edit_weights(folder / hf.WEIGHTS, lambda t: t.update({HEAD: t[EMBEDDING]}))
    decoder = hf.load(folder, "float32")
    np.testing.assert_array_equal(
        decoder.head_weight(), jnp.asarray(load_file(folder / hf.WEIGHTS)[HEAD])
    )


def test_rotary_frequencies_of_old_checkpoints_are_skipped(folder: Path):
    before = hf.load(folder, "float32").layers.stacked()["wq"]
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder / hf.WEIGHTS, lambda t: t.update({name: np.ones(2, np.float32)}))
    after = hf.load(folder, "float32").layers.stacked()["wq"]
    np.testing.assert_array_equal(after, before)
