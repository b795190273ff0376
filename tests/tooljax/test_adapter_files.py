"""Adapters as PEFT has them: names, values and settings, against the formula, against PEFT, and back."""

import json
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from lora_cases import busy_adapters, lora_settings, opened
from safetensors.numpy import load_file, save_file

from tooljax.adapter_files import read_adapter, write_adapter
from tooljax.config.schema import LoraConfig
from tooljax.policy import Policy, load_policy

pytestmark = pytest.mark.usefixtures("quick_compilations")

IDS = np.asarray([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and an adapter of it."""
    folder = tmp_path_factory.mktemp("lora") / "model"
    policy = small_policy(folder)
    policy.save_adapter(busy_adapters(policy), folder.parent / "adapter")
    policy.save(busy_adapters(policy), folder.parent / "merged")
    return folder


@cache
def small_policy(folder: Path) -> Policy:
    return opened(lora_settings(folder))[0]


def logits(policy: Policy, params) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(IDS.shape[1]), IDS.shape)
    return np.asarray(
        policy.decoder(params).logits(jnp.asarray(IDS), positions, jnp.ones_like(IDS))
    )


def adapters_of(policy):
    """Those of a policy that has some."""
    assert policy.adapters is not None
    return policy.adapters


def test_names_and_values_are_pefts(folder):
    policy = small_policy(folder)
    tensors = load_file(folder.parent / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    module = "model.layers.1.self_attn.v_proj"
    a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    assert (a.shape, b.shape, a.dtype) == ((4, 16), (8, 4), np.float32)
    merged = dict(policy.tensors(busy_adapters(policy)))[f"{module}.weight"]
    loaded = dict(policy.tensors(policy.params))[f"{module}.weight"]
    # W + alpha / rank B A, with linear layers as [out, in]
    expected = np.asarray(loaded, np.float64) + 8 / 4 * b.astype(np.float64) @ a
    np.testing.assert_allclose(merged, expected, rtol=1e-6, atol=1e-6)
    written = json.loads((folder.parent / "adapter" / "adapter_config.json").read_text())
    assert written["peft_type"] == "LORA"
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (4, 8, False)
    assert written["target_modules"] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    assert written["base_model_name_or_path"] == str(folder)


def test_what_was_written_is_read_to_the_bit_and_gone_on_from(folder, tmp_path):
    start = LoraConfig(rank=4, alpha=8.0, adapter=str(folder.parent / "adapter"))
    again = load_policy(lora_settings(folder, lora=start))
    ours = dict(small_policy(folder).tensors(busy_adapters(small_policy(folder))))
    for name, value in again.tensors(again.trained):
        np.testing.assert_array_equal(value, ours[name], err_msg=name)
    # And on a mesh.
    spread = load_policy(lora_settings(folder, lora=start, fsdp=2, tensor=2))
    spread.save_adapter(spread.trained, tmp_path / "again")
    again_written = load_file(tmp_path / "again" / "adapter_model.safetensors")
    for name, value in load_file(folder.parent / "adapter" / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(again_written[name], value, err_msg=name)


def test_some_targets_and_a_stable_scale(folder, tmp_path):
    lora = LoraConfig(rank=4, alpha=6.5, rank_stabilized=True, targets=("down_proj", "o_proj"))
    policy, _ = opened(lora_settings(folder, lora=lora))
    policy.save_adapter(busy_adapters(policy), tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["target_modules"] == ["o_proj", "down_proj"]
    assert (written["lora_alpha"], written["use_rslora"]) == (6.5, True)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    prefix = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    a, b = tensors[f"{prefix}A.weight"], tensors[f"{prefix}B.weight"]
    name = "model.layers.0.mlp.down_proj.weight"
    merged, loaded = (
        np.asarray(dict(policy.tensors(params))[name], np.float64)
        for params in (busy_adapters(policy), policy.params)
    )
    # 6.5 / sqrt(4)
    np.testing.assert_allclose(merged, loaded + 3.25 * b.astype(np.float64) @ a, atol=1e-6)


# --- against PEFT and transformers ----------------------------------------------------------------------------------


def their_logits(model, torch) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(IDS.astype(np.int64))).logits.numpy()


def their_base(folder: Path):
    torch = pytest.importorskip("torch", reason="the reference needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    return torch, load(folder, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_merged_weights(folder):
    torch, model = their_base(folder.parent / "merged")
    policy = small_policy(folder)
    ours = logits(policy, busy_adapters(policy))
    np.testing.assert_allclose(their_logits(model, torch), ours, rtol=1e-4, atol=1e-4)
    assert np.abs(ours - logits(policy, policy.params)).max() > 0.1


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_the_adapter(folder):
    torch, base = their_base(folder)
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(base, folder.parent / "adapter")
    policy = small_policy(folder)
    ours = logits(policy, busy_adapters(policy))
    np.testing.assert_allclose(their_logits(model, torch), ours, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_pefts_adapter_is_gone_on_from(folder, tmp_path):
    torch, base = their_base(folder)
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    asked = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1
    )
    model = peft.get_peft_model(base, asked)
    model.save_pretrained(tmp_path / "theirs")
    lora = LoraConfig(rank=2, alpha=3.0, adapter=str(tmp_path / "theirs"))
    policy = load_policy(lora_settings(folder, lora=lora))
    theirs = their_logits(model.eval(), torch)
    np.testing.assert_allclose(logits(policy, policy.trained), theirs, rtol=1e-4, atol=1e-4)


# --- what does not fit ----------------------------------------------------------------------------------------------


def changed_adapter(folder: Path, tmp_path: Path, fields: dict) -> Path:
    source = folder.parent / "adapter"
    written = json.loads((source / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(written | fields))
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (source / "adapter_model.safetensors").read_bytes()
    )
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"r": 8, "lora_alpha": 32},
            "is of another adapter than the config's lora.rank, lora.alpha: 4, 8.0; "
            "set lora.rank = 8, lora.alpha = 32.0",
        ),
        (
            {"target_modules": ["v_proj", "model.q_proj"]},
            "set lora.targets = ('q_proj', 'v_proj')",
        ),
        ({"use_rslora": True}, "set lora.rank_stabilized = True"),
        ({"peft_type": "IA3"}, "peft_type='IA3'; only LORA is trained"),
        ({"use_dora": True}, "use_dora=True is not done here; merge the adapter into its model"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not done here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not done here"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2} is not done here"),
        ({"target_modules": ["lm_head"]}, "target_modules=['lm_head'] are not all linear layers"),
        ({"target_modules": ".*_proj"}, "target_modules='.*_proj' are not all linear layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_adapter_is_refused_with_what_to_set(folder, tmp_path, fields, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_adapter(
            changed_adapter(folder, tmp_path, fields), adapters_of(small_policy(folder)).shape
        )
    assert sentence in str(error.value)


def test_broken_weights_are_named(folder, tmp_path):
    shape = adapters_of(small_policy(folder)).shape
    adapter = changed_adapter(folder, tmp_path, {})
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    save_file({n: x for n, x in tensors.items() if n != name}, file)
    with pytest.raises(ValueError, match=rf"1 tensors missing \(first: {name}\), 0 unknown"):
        read_adapter(adapter, shape)
    save_file(tensors | {name: tensors[name].T.copy()}, file)
    with pytest.raises(
        ValueError, match=rf"tensor {name} has shape \[32, 4\]; .* make it \[4, 32\]"
    ):
        read_adapter(adapter, shape)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"cannot be read .*; lora.adapter names its folder"):
        read_adapter(adapter, shape)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read .*lora.adapter"):
        read_adapter(adapter, shape)


def test_one_process_writes(folder, tmp_path):
    policy = small_policy(folder)
    write_adapter(
        adapters_of(policy).shape,
        policy.trained,
        tmp_path / "none",
        base=policy.folder,
        write=False,
    )
    assert not (tmp_path / "none").exists()
