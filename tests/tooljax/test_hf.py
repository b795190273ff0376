"""The decoder against transformers, and what is said about folders that do not fit."""

import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from random_decoder import random_decoder
from safetensors.numpy import load_file, save_file

from tooljax import sharding
from tooljax.model import hf
from tooljax.model.decoder import Decoder, DecoderConfig, Llama3RopeScaling
from tooljax.model.sampler_steps import unstack

LLAMA = DecoderConfig(
    family="llama",
    vocab=61,
    embed=32,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    ffw=48,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied_head=False,
    max_positions=256,
    dtype="float32",
)
FAMILIES = {
    "llama": LLAMA,
    "llama3": dataclasses.replace(
        LLAMA, rope_theta=500_000.0, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64)
    ),
    "smollm2": dataclasses.replace(
        LLAMA, embed=36, q_heads=9, kv_heads=3, head_dim=4, rope_theta=100_000.0, tied_head=True
    ),
    "qwen2": dataclasses.replace(
        LLAMA, family="qwen2", rope_theta=1e6, norm_eps=1e-6, tied_head=True, qkv_bias=True
    ),
    "qwen3": dataclasses.replace(
        LLAMA, family="qwen3", rope_theta=1e6, norm_eps=1e-6, head_dim=16, qk_norm=True
    ),
}
"""Shapes that transformers' own config of each family is built with below."""

logits_of = nnx.jit(lambda model, *rows: model.logits(*rows))


def logits(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Logits of whole rows without padding."""
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    return np.asarray(logits_of(decoder, ids, positions, jnp.ones_like(ids)))


def weights(decoder: Decoder) -> dict[tuple, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
    return {path: np.asarray(param[...]) for path, param in state}


def assert_same_weights(one: Decoder, other: Decoder) -> None:
    assert one.cfg == other.cfg
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=str(path), strict=True)


# --- against transformers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="the reference needs torch and transformers")


@pytest.fixture
def transformers(torch: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on import, about packages that it would like to have
        import transformers
    transformers.utils.logging.disable_progress_bar()
    return transformers


def reference_config(transformers: Any, cfg: DecoderConfig) -> Any:
    """transformers' own config of this shape, not read from anything that tooljax wrote."""
    kind = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[cfg.family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling:
        rope |= dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)  # noqa: C408
        rope |= {"original_max_position_embeddings": 64}
    return getattr(transformers, kind)(
        vocab_size=cfg.vocab,
        hidden_size=cfg.embed,
        intermediate_size=cfg.ffw,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.q_heads,
        num_key_value_heads=cfg.kv_heads,
        max_position_embeddings=cfg.max_positions,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=cfg.tied_head,
        rope_parameters=rope,
        initializer_range=0.2,
        **({"head_dim": cfg.head_dim} if cfg.family == "qwen3" else {}),
    )


def reference_logits(torch: Any, model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(torch, transformers, name: str, tmp_path: Path):
    cfg = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(reference_config(transformers, cfg))
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    decoder = hf.load(tmp_path, "float32")
    assert decoder.cfg == cfg
    # 130 positions: for llama3, beyond the 64 that the scaling starts from
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (2, 130))
    expected = reference_logits(torch, model.eval(), tokens)
    assert expected.std() > 1
    np.testing.assert_allclose(logits(decoder, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_is_saved(torch, transformers, name: str, tmp_path: Path):
    decoder = random_decoder(FAMILIES[name])
    path = hf.save(decoder, tmp_path / "model", max_shard_bytes=20_000)
    assert hf.read_config(path, "float32") == decoder.cfg
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    tokens = np.random.default_rng(0).integers(0, decoder.cfg.vocab, (2, 130))
    expected = reference_logits(torch, model.eval(), tokens)
    np.testing.assert_allclose(logits(decoder, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def smollm2() -> str:
    path = os.environ.get("TOOLJAX_TEST_MODEL", "")
    if not path:
        pytest.skip("TOOLJAX_TEST_MODEL is unset; tests/tools/make_test_models.sh makes the model")
    return path


PROMPT = (
    "<|im_start|>user\nA farmer has 17 sheep, buys 5 more and sells 9 of them on Tuesday. How many sheep are "
    "left, and what did he do on Tuesday? Answer in one short sentence.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def prompt(smollm2: str) -> np.ndarray:
    from tokenizers import Tokenizer

    ids = (
        Tokenizer.from_file(f"{smollm2}/tokenizer.json")
        .encode(PROMPT, add_special_tokens=False)
        .ids
    )
    assert len(ids) >= 50
    return np.asarray([ids[-50:]])


def test_smollm2_equals_transformers(torch, transformers, smollm2: str, prompt: np.ndarray):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    expected = reference_logits(torch, model.eval(), prompt)
    np.testing.assert_allclose(
        logits(hf.load(smollm2, "float32"), prompt), expected, rtol=1e-4, atol=1e-4
    )


def test_smollm2_in_bfloat16_stays_close(smollm2: str, prompt: np.ndarray):
    wide, narrow = (
        np.asarray(jax.nn.log_softmax(logits(hf.load(smollm2, dtype), prompt)))
        for dtype in ("float32", "bfloat16")
    )
    assert narrow.dtype == np.float32
    assert np.isfinite(narrow).all()
    # Of the tokens that the prompt really has, as training reads them.
    chosen = np.arange(49), prompt[0, 1:]
    gap = np.abs(narrow[0][chosen] - wide[0][chosen])
    # Measured: mean 0.025, max 0.133, from 30 layers of activations with 8 bits.
    assert gap.mean() < 0.05
    assert gap.max() < 0.3


# --- saving and loading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_weights_load_bit_for_bit(name: str, dtype: Any, tmp_path: Path):
    decoder = random_decoder(dataclasses.replace(FAMILIES[name], dtype=dtype))
    path = hf.save(decoder, tmp_path / "model")
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same_weights(hf.load(path, dtype), decoder)


def test_large_models_are_cut_into_shards(tmp_path: Path):
    decoder = random_decoder(LLAMA)
    path = hf.save(decoder, tmp_path / "model", max_shard_bytes=20_000)
    index = json.loads((path / hf.INDEX).read_text())
    shapes = hf.tensor_names(LLAMA)
    assert index["weight_map"].keys() == shapes.keys()
    assert index["metadata"]["total_size"] == 4 * sum(int(np.prod(s)) for s in shapes.values())
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        held = load_file(shard)
        assert sum(tensor.nbytes for tensor in held.values()) <= 20_000
        assert all(index["weight_map"][name] == shard.name for name in held)
    assert_same_weights(hf.load(path, "float32"), decoder)


@pytest.mark.parametrize("source_dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_weights_are_cast_once_on_loading(source_dtype: Any, tmp_path: Path):
    path = hf.save(random_decoder(LLAMA), tmp_path / "model")
    tensors = {k: v.astype(source_dtype) for k, v in load_file(path / hf.WEIGHTS).items()}
    save_file(tensors, path / hf.WEIGHTS)
    loaded = dict(hf.to_hf(LLAMA, hf.load(path, "bfloat16")))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor.astype(ml_dtypes.bfloat16), strict=True)


def test_to_hf_gives_every_tensor_in_its_layout():
    decoder = random_decoder(FAMILIES["qwen3"])
    cfg = decoder.cfg
    tensors = dict(hf.to_hf(cfg, decoder))
    assert {name: t.shape for name, t in tensors.items()} == hf.tensor_names(cfg)
    # Row h of head n of q_proj is output n * head_dim + h; columns are the embedding.
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query[2 * 16 + 5], decoder.layers.stacked()["wq"][1, :, 2, 5])
    output = tensors["model.layers.1.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(output[:, 2 * 16 + 5], decoder.layers.stacked()["wo"][1, 2, 5])
    from_state = dict(hf.to_hf(cfg, nnx.state(decoder, nnx.Param)))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, from_state[name])


def test_loading_places_the_weights(tmp_path: Path):
    path = hf.save(random_decoder(dataclasses.replace(LLAMA, vocab=60)), tmp_path / "model")
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    decoder = hf.load(path, "float32", partial(sharding.shardings, mesh=mesh))
    query = decoder.layers.stacked()["wq"]
    spec = PartitionSpec(None, "fsdp", "tensor", None)
    assert query.sharding.is_equivalent_to(NamedSharding(mesh, spec), query.ndim)
    assert query.addressable_shards[0].data.shape == (2, 16, 2, 8)
    assert_same_weights(decoder, hf.load(path, "float32"))


def test_tokenizer_and_token_ids_come_from_the_source(tmp_path: Path):
    source = hf.save(random_decoder(LLAMA), tmp_path / "source")
    fields = json.loads((source / "config.json").read_text())
    fields |= {"eos_token_id": [7, 9], "pad_token_id": 3, "rope_parameters": {"rope_theta": 1.0}}
    (source / "config.json").write_text(json.dumps(fields))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "notes.txt").write_text("not part of the model")
    path = hf.save(random_decoder(LLAMA, seed=1), tmp_path / "model", source=source)
    assert (path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (path / "notes.txt").exists()
    saved = json.loads((path / "config.json").read_text())
    assert (saved["eos_token_id"], saved["pad_token_id"]) == ([7, 9], 3)
    assert hf.read_config(path, "float32") == LLAMA


def test_saving_replaces_a_model_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    first, second = random_decoder(LLAMA), random_decoder(LLAMA, seed=1)
    path = hf.save(first, tmp_path / "model", max_shard_bytes=20_000)

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf, "save_file", full)
        with pytest.raises(OSError, match="no space left"):
            hf.save(second, path)
    assert_same_weights(hf.load(path, "float32"), first)
    hf.save(second, path, source=path)
    assert_same_weights(hf.load(path, "float32"), second)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_saving_spares_a_folder_that_is_no_model(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is not a model folder"):
        hf.save(random_decoder(LLAMA), tmp_path)
    assert (tmp_path / "thesis.txt").exists()


# --- for the sampler --------------------------------------------------------------------------------------------


def pushed(cfg: DecoderConfig) -> dict[str, np.ndarray]:
    return {name: np.array(tensor) for name, tensor in hf.to_hf(cfg, random_decoder(cfg))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_pushed_tensors_become_the_decoders_weights(name: str, dtype: Any):
    cfg = dataclasses.replace(FAMILIES[name], dtype=dtype)
    tensors = pushed(cfg)
    got, expected = hf.from_hf_layers(cfg, tensors), unstack(random_decoder(cfg))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for buffer in tensors.values():  # the caller's to reuse
        buffer.fill(0)
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), r"1 tensors missing \(first: model.norm.weight\), 0 unknown"),
        (lambda t: t.update(extra=t[NORM]), r"0 tensors missing .*, 1 unknown \(first: extra\)"),
        (lambda t: t.update({NORM: t[NORM][:9]}), r"model.norm.weight is float32 \[9\]; the model"),
        (
            lambda t: t.update({NORM: t[NORM].astype("float16")}),
            r"is float16 \[32\].*float32 \[32\]",
        ),
    ],
)
def test_pushed_tensors_that_do_not_fit_are_refused(change: Callable, message: str):
    tensors = pushed(LLAMA)
    change(tensors)
    with pytest.raises(ValueError, match=message):
        hf.from_hf_layers(LLAMA, tensors)
