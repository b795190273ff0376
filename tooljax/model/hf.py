"""Hugging Face folders in and out: config.json and safetensors to a `Decoder`, and back.

Loading checks every name, shape and dtype from the file headers before it reads a weight, then reads what each device
is to have, one weight and device at a time: a host never holds more than that, beside what its devices have. Saving
holds one shard.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tooljax.distributed import to_host
from tooljax.model.adapters import merged
from tooljax.model.decoder import Decoder, DecoderConfig, layer_shapes
from tooljax.model.hf_config import KEPT_FIELDS, config_fields, read_config
from tooljax.model.hf_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    flat_shape,
    is_linear,
    layer_tensor,
    tensor_names,
)
from tooljax.model.hf_parts import from_flat, in_parts, read_part
from tooljax.model.sampler_steps import SamplerWeights
from tooljax.sharding import Params

__all__ = ["from_hf_layers", "load", "read_config", "save", "tensor_names", "to_hf"]

Dtype = Literal["float32", "bfloat16"]

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What `save` takes over from the folder that the model was trained from, as far as it is there."""

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


# --- loading ----------------------------------------------------------------------------------------------------


def load(
    path: str | Path,
    dtype: Dtype,
    shardings: Callable[[Params], Params] | None = None,
) -> Decoder:
    """The decoder in a Hugging Face folder, its weights cast to dtype.

    `shardings` places the weights: it gets the abstract parameters and returns the same tree of shardings, for example
    `partial(tooljax.sharding.shardings, mesh=mesh)`. Raises ValueError naming the file and the tensor when a shard is
    missing or cut short, or when a tensor is missing, unknown, or of a wrong shape or dtype.
    """
    cfg = read_config(path, dtype)
    abstract = nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    places = dict(nnx.to_flat_state(shardings(nnx.state(abstract, nnx.Param)))) if shardings else {}
    loaded = []
    with ExitStack() as files:
        tensors = _open(Path(path), cfg, files)
        for key, param in nnx.to_flat_state(state):
            read = partial(read_part, tensors, key, param.shape, np.dtype(jnp.dtype(dtype)))
            if places:
                value = in_parts(read, param.shape, places[key].get_value())
            else:
                value = jax.device_put(read((slice(None),) * len(param.shape)))
            loaded.append((key, param.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def _open(folder: Path, cfg: DecoderConfig, files: ExitStack) -> dict[str, Any]:
    """The open file that holds each tensor, after all of them have been checked against the config."""
    tensors: dict[str, Any] = {}
    where: dict[str, Path] = {}
    for file, promised in _shards(folder).items():
        if not file.is_file():
            raise ValueError(
                f"{file} is missing: {INDEX} puts {min(promised)} and {len(promised) - 1} other "
                "tensors there; download it again"
            )
        try:
            handle = files.enter_context(safe_open(file, "np"))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is cut short or not a safetensors file ({error}); download it again"
            ) from None
        held = set(handle.keys())
        if promised - held:
            raise ValueError(
                f"{file} lacks tensor {min(promised - held)} that {INDEX} puts there; "
                "download both again"
            )
        for name in sorted(held):
            if name in where:
                raise ValueError(f"tensor {name} is in both {where[name]} and {file}")
            tensors[name], where[name] = handle, file
    _check_tensors(folder, cfg, tensors, where)
    return tensors


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The weight files of a folder, and the tensors that the index puts into each."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; no other format is read")
        return {folder / WEIGHTS: set()}
    try:
        weight_map = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} has no readable weight_map: {error!r}") from None
    shards: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(folder / file, set()).add(name)
    return shards


def _check_tensors(
    folder: Path, cfg: DecoderConfig, tensors: dict[str, Any], where: dict[str, Path]
) -> None:
    """Checks names, shapes and dtypes from the headers alone. Drops the tensors that the model does not read."""
    if cfg.tied_head and HEAD in tensors:
        _check_tied(tensors, where)
        del tensors[HEAD]
    # Old checkpoints hold the rotary frequencies, which follow from the config.
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]
    expected = tensor_names(cfg)
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(f"{folder}: tensor {name} {[*shape]} is in none of the weight files")
        header = tensors[name].get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise ValueError(
                f"{where[name]}: tensor {name} has shape {header.get_shape()}; "
                f"config.json makes it {[*shape]}"
            )
        if header.get_dtype() not in _DTYPES:
            raise ValueError(
                f"{where[name]}: tensor {name} has dtype {header.get_dtype()}; "
                f"only {[*_DTYPES]} are read"
            )
    unknown = sorted(tensors.keys() - expected.keys())
    if unknown:
        raise ValueError(
            f"{where[unknown[0]]}: tensor {unknown[0]} (one of {len(unknown)} such) "
            f"has no place in a {cfg.family} model of this config.json"
        )


def _check_tied(tensors: dict[str, Any], where: dict[str, Path]) -> None:
    if EMBEDDING in tensors and not np.array_equal(
        tensors[HEAD].get_tensor(HEAD), tensors[EMBEDDING].get_tensor(EMBEDDING)
    ):
        raise ValueError(
            f"{where[HEAD]}: tensor {HEAD} differs from {EMBEDDING}, but config.json has "
            "tie_word_embeddings=true; set it to false"
        )


# --- Hugging Face tensors to and from arrays --------------------------------------------------------------------


def to_hf(cfg: DecoderConfig, params: Params) -> Iterator[tuple[str, Array]]:
    """Every tensor under its Hugging Face name and in its layout, one at a time, in the order of `tensor_names`.

    Adapters are merged into their weights, each as it comes. The arrays stay on the device. `params` is a decoder or
    its `nnx.state(decoder, nnx.Param)`, and `cfg` the decoder's.
    """
    state: Any = nnx.state(params, nnx.Param) if isinstance(params, Decoder) else params
    yield EMBEDDING, state["embedding"][...]
    for layer in range(cfg.layers):
        for name, (shape, _) in layer_shapes(cfg).items():
            adapted = cfg.lora is not None and name in cfg.lora.targets
            parts = (name, f"{name}_a", f"{name}_b") if adapted else (name,)
            tensor = _to_flat(
                tuple(state["layers"][part][...] for part in parts),
                layer,
                name=name,
                shape=shape,
                scale=cfg.lora.scale if cfg.lora else 0.0,
            )
            yield layer_tensor(layer, name), tensor
    yield FINAL_NORM, state["final_norm"][...]
    if not cfg.tied_head:
        yield HEAD, state["head"][...]


@partial(jax.jit, static_argnames=("name", "shape", "scale"))
def _to_flat(
    stacked: tuple[Array, ...],
    layer: int | Array,
    *,
    name: str,
    shape: tuple[int, ...],
    scale: float,
) -> Array:
    """One layer of a stacked weight, as a checkpoint has it, with its adapter merged if one is given with it. `layer`
    is traced: one compilation serves all layers."""
    parts = [jax.lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in stacked]
    if len(parts) == 1:
        tensor = parts[0]
    else:
        weight, a, b = parts
        tensor = merged(weight, a, b, scale, name=name, layer=jnp.asarray(layer))
    flat = flat_shape(name, shape)
    return tensor.reshape(flat[::-1]).T if is_linear(name) else tensor.reshape(flat)


def from_hf_layers(cfg: DecoderConfig, tensors: Mapping[str, np.ndarray]) -> SamplerWeights:
    """The sampler's weights from a complete set of Hugging Face tensors, copied to the default device.

    Raises ValueError, before anything is copied, if a tensor is missing, unknown, or of a wrong shape or dtype.
    """
    expected = tensor_names(cfg)
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"weights do not fit the {cfg.family} model: {len(missing)} tensors missing "
            f"(first: {min(missing, default=None)}), {len(unknown)} unknown "
            f"(first: {min(unknown, default=None)})"
        )
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != jnp.dtype(cfg.dtype):
            raise ValueError(
                f"tensor {name} is {tensor.dtype} {[*tensor.shape]}; "
                f"the model takes {cfg.dtype} {[*shape]}"
            )
    # Copied: the caller's buffers may be reused, and JAX would alias them on the CPU.
    embedding = jnp.array(tensors[EMBEDDING])
    layers = tuple(
        {
            name: jnp.array(from_flat(name, tensors[layer_tensor(layer, name)], shape))
            for name, (shape, _) in layer_shapes(cfg).items()
        }
        for layer in range(cfg.layers)
    )
    head = embedding if cfg.tied_head else jnp.array(tensors[HEAD])
    return SamplerWeights(embedding, layers, jnp.array(tensors[FINAL_NORM]), head)


def layers_to_hf(cfg: DecoderConfig, weights: SamplerWeights) -> Iterator[tuple[str, np.ndarray]]:
    """What `from_hf_layers` was given, read back from the device, one tensor at a time."""
    yield EMBEDDING, np.asarray(weights.embedding)
    for layer, params in enumerate(weights.layers):
        for name, (shape, _) in layer_shapes(cfg).items():
            flat = flat_shape(name, shape)
            array = np.asarray(params[name])
            yield (
                layer_tensor(layer, name),
                array.reshape(flat[::-1]).T if is_linear(name) else array.reshape(flat),
            )
    yield FINAL_NORM, np.asarray(weights.final_norm)
    if not cfg.tied_head:
        yield HEAD, np.asarray(weights.head)


# --- saving -----------------------------------------------------------------------------------------------------


def save(
    decoder: Decoder,
    path: str | Path,
    *,
    source: str | Path | None = None,
    max_shard_bytes: int = 4_000_000_000,
) -> Path:
    """Writes a folder that transformers and the engines load, and returns its path.

    Tokenizer, chat template, generation config and special token ids come from `source`, if given. A model folder
    already there is replaced as a whole; the new one takes its place only when it is complete.
    """
    path = Path(path)
    if path.exists() and not _is_replaceable(path):
        raise ValueError(f"{path} exists and is not a model folder; choose another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.parent / f".{path.name}.{os.getpid()}.{end}" for end in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        _write_config(decoder.cfg, new, Path(source) if source else None)
        _write_weights(decoder, new, max_shard_bytes)
        if path.exists():
            path.rename(old)
        new.rename(path)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return path


def _is_replaceable(path: Path) -> bool:
    return path.is_dir() and ((path / "config.json").is_file() or not any(path.iterdir()))


def _write_config(cfg: DecoderConfig, folder: Path, source: Path | None) -> None:
    fields = config_fields(cfg)
    if source:
        base = json.loads((source / "config.json").read_text(encoding="utf-8"))
        fields |= {name: base[name] for name in KEPT_FIELDS if name in base}
        for name in COPIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    text = json.dumps(fields, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _write_weights(decoder: Decoder, folder: Path, max_shard_bytes: int) -> None:
    item_bytes = jnp.dtype(decoder.cfg.dtype).itemsize
    sizes = {n: int(np.prod(s)) * item_bytes for n, s in tensor_names(decoder.cfg).items()}
    plan = _plan_shards(sizes, max_shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors" for i in range(len(plan))]
    files = names if len(plan) > 1 else [WEIGHTS]
    tensors = to_hf(decoder.cfg, decoder)
    for file, shard in zip(files, plan, strict=True):
        # safetensors writes the buffer as it lies in memory, so it must be contiguous.
        held = {n: np.ascontiguousarray(to_host(t)) for n, t in islice(tensors, len(shard))}
        save_file(held, folder / file, metadata={"format": "pt"})
    if len(plan) > 1:
        weight_map = {n: file for file, shard in zip(files, plan, strict=True) for n in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Consecutive tensors of at most max_bytes together. A tensor larger than that gets a shard of its own."""
    plan: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not plan or size > room:
            plan.append([])
            room = max_bytes
        plan[-1].append(name)
        room -= size
    return plan
