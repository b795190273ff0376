"""What a Hugging Face folder says about its model without loading it: config, names and shapes of its tensors."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_sidecar.engines.base import WeightTensor

MAX_HEADER_BYTES = 2**27

Shape = tuple[int, ...]


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json. ValueError names the folder if there is none."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json; --model must be a Hugging Face folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{file} has no vocab_size; --model must be the folder of a decoder")
    return config


def tensor_shapes(folder: Path) -> dict[str, Shape]:
    """The shape of every tensor in the folder's safetensors files, by name; reads their headers only."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file")
    shapes: dict[str, Shape] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    return shapes


def check_tensors(tensors: Mapping[str, WeightTensor], shapes: Mapping[str, Shape]) -> None:
    """ValueError unless the tensors are exactly the model's, each of its shape. A tied head may come or be left out."""
    tied = {"lm_head.weight"}
    missing = sorted(set(shapes) - set(tensors) - tied)
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of the model are missing, the first is {missing[0]}"
        )
    extra = sorted(set(tensors) - set(shapes) - tied)
    if extra:
        raise ValueError(f"the model has no tensor {extra[0]} ({len(extra)} such names)")
    for name, tensor in tensors.items():
        wanted = shapes.get(name) or shapes.get("model.embed_tokens.weight")
        if wanted is not None and tuple(tensor.shape) != wanted:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}, the model's is {list(wanted)}"
            )


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"{file} is not a safetensors file, or is cut off; download it again")
        try:
            return json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"the header of {file} is not readable: {error}") from error
