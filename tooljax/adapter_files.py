"""Adapters as folders of PEFT: adapter_config.json and adapter_model.safetensors, out and in.

PEFT's linear layers are [out, in]: lora_A is [rank, in], lora_B [out, rank], with heads and head_dim one axis.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tooljax.config.lora import MODULES
from tooljax.distributed import to_host
from tooljax.model.adapters import Lora, adapter_shapes, input_axes
from tooljax.model.decoder import DecoderConfig, layer_shapes
from tooljax.model.hf_names import layer_tensor
from tooljax.sharding import Params

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Before the name of the model's own module."""

_OFF: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ((),),
    "layers_to_transform": ((),),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "target_parameters": ((),),
    "trainable_token_indices": ((),),
    "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Fields of adapter_config.json that must have one of these values, or be null or absent. The initialisations that are
not named here change the base weights."""


def adapter_tensors(cfg: DecoderConfig) -> Iterator[tuple[str, str, int, tuple[int, int]]]:
    """PEFT's name of each tensor, ours of the stacked weight, the layer, and the shape there."""
    for layer in range(cfg.layers):
        for name, (shape, _) in adapter_shapes(cfg.lora, layer_shapes(cfg)).items():
            target, part = name.rsplit("_", 1)
            module = layer_tensor(layer, target).removesuffix(".weight")
            split = input_axes(target) if part == "a" else 1
            flat = (int(np.prod(shape[split:])), int(np.prod(shape[:split])))
            yield f"{PREFIX}{module}.lora_{part.upper()}.weight", name, layer, flat


# --- out ------------------------------------------------------------------------------------------------------------


def write_adapter(
    cfg: DecoderConfig, params: Params, folder: str | Path, *, base: str, write: bool = True
) -> Path:
    """Writes adapters in their own dtype, and returns the folder; its files are replaced if it is there.

    `cfg` is of the decoder that has them, `base` the folder of the weights they go beside. Every process of a run must
    call it; one of them writes.
    """
    assert cfg.lora is not None, "a decoder with adapters"
    stacked: dict[str, np.ndarray] = {}
    for name in adapter_shapes(cfg.lora, layer_shapes(cfg)):
        stacked[name] = to_host(params["layers"][name][...])
    folder = Path(folder)
    if not write:
        return folder
    tensors = {
        peft_name: np.ascontiguousarray(stacked[name][layer].reshape(flat[::-1]).T)
        for peft_name, name, layer, flat in adapter_tensors(cfg)
    }
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{WEIGHTS}.{os.getpid()}"
    save_file(tensors, new, metadata={"format": "pt"})
    text = json.dumps(_config(cfg.lora, base), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    os.replace(new, folder / WEIGHTS)
    return folder


def _config(lora: Lora, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": list(modules_of(lora)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def modules_of(lora: Lora) -> tuple[str, ...]:
    """The targets by their Hugging Face names."""
    names = (layer_tensor(0, name).split(".")[-2] for name in lora.targets)
    return tuple(sorted(names, key=MODULES.index))


# --- in -------------------------------------------------------------------------------------------------------------


def read_adapter(folder: str | Path, cfg: DecoderConfig) -> dict[str, np.ndarray]:
    """The stacked adapters of a PEFT folder by our names, float32. `cfg.lora` says what is expected.

    ValueError, with the setting to change, if the folder has another rank, alpha or targets, or what is not done here.
    """
    folder, lora = Path(folder), cfg.lora
    assert lora is not None, "a decoder with adapters"
    _check_config(folder / CONFIG, lora)
    file = folder / WEIGHTS
    expected = {
        peft_name: (name, layer, flat) for peft_name, name, layer, flat in adapter_tensors(cfg)
    }
    found: dict[str, list[np.ndarray]] = {}
    try:
        with safe_open(file, "np") as tensors:
            names = set(tensors.keys())
            missing, unknown = sorted(expected.keys() - names), sorted(names - expected.keys())
            if missing or unknown:
                raise ValueError(
                    f"{file} does not fit the model: {len(missing)} tensors missing (first: "
                    f"{missing[0] if missing else None}), {len(unknown)} unknown (first: "
                    f"{unknown[0] if unknown else None})"
                )
            for peft_name, (name, _, flat) in expected.items():
                found.setdefault(name, []).append(_read(file, tensors, peft_name, flat))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}); lora.adapter names its folder"
        ) from None
    shapes = adapter_shapes(lora, layer_shapes(cfg))
    return {
        name: np.stack([x.T.reshape(shapes[name][0]) for x in layers])
        for name, layers in found.items()
    }


def _read(file: Path, tensors: Any, name: str, shape: tuple[int, int]) -> np.ndarray:
    tensor = tensors.get_tensor(name)
    if tensor.shape != shape:
        raise ValueError(
            f"{file}: tensor {name} has shape {[*tensor.shape]}; the model and lora.rank make it {[*shape]}"
        )
    if tensor.dtype not in (np.float32, np.float16, np.dtype(ml_dtypes.bfloat16)):
        raise ValueError(f"{file}: tensor {name} has dtype {tensor.dtype}, which is not read")
    return tensor.astype(np.float32)


def _check_config(file: Path, lora: Lora) -> None:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}); lora.adapter names its folder"
        ) from None
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={fields.get('peft_type')!r}; only LORA is trained")
    for name, allowed in _OFF.items():
        value = fields.get(name)
        value = tuple(value) if isinstance(value, list) else value
        if value is not None and value not in allowed:
            raise ValueError(
                f"{file}: {name}={fields[name]!r} is not done here; merge the adapter into its model with PEFT "
                "(merge_and_unload) and name that as model.path"
            )
    theirs = {
        "lora.rank": fields.get("r"),
        "lora.alpha": float(fields.get("lora_alpha", 8)),
        "lora.rank_stabilized": bool(fields.get("use_rslora", False)),
        "lora.targets": _targets(file, fields.get("target_modules")),
    }
    ours = {
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
        "lora.rank_stabilized": lora.rank_stabilized,
        "lora.targets": modules_of(lora),
    }
    wrong = [name for name, value in theirs.items() if value != ours[name]]
    if wrong:
        raise ValueError(
            f"{file} is of another adapter than the config's {', '.join(wrong)}: "
            f"{', '.join(str(ours[name]) for name in wrong)}; set "
            f"{', '.join(f'{name} = {theirs[name]}' for name in wrong)}"
        )


def _targets(file: Path, modules: Any) -> tuple[str, ...]:
    """In the order of a checkpoint."""
    if modules == "all-linear":
        return MODULES
    names = [name.split(".")[-1] for name in modules] if isinstance(modules, list) else []
    unknown = [name for name in names if name not in MODULES]
    if not names or unknown:
        raise ValueError(
            f"{file}: target_modules={modules!r} are not all linear layers of a decoder's layers; read are lists of "
            f"{', '.join(MODULES)}"
        )
    return tuple(name for name in MODULES if name in names)
