"""How SGLang is started: which releases, and with which arguments."""

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
"""The releases that this was tried with."""


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """What the engine is started with, beside the model."""

    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    max_running: int = 256
    """Generations at once; more wait in SGLang's queue."""
    first_gpu: int = 0
    """Of the tensor_parallel GPUs in a row that this engine takes."""
    memory_fraction: float = 0.85
    """Of the GPU's memory, for weights and KV cache together."""
    deterministic: bool = False
    """The same seed gives the same tokens whatever else runs, at some cost in speed. Off, seeds are ignored."""
    float32_head: bool = False
    """The LM head's product in float32, as the trainer's."""
    memory_saver: bool = False
    """Weights and KV cache can be released while a trainer uses the same GPU (needs torch_memory_saver)."""
    bucket_bytes: int = 2**30
    """Weights are handed to the schedulers in pieces of this size."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of sglang.Engine, which win over ours."""
    any_version: bool = False
    """Also run a release that this was not tried with."""


def engine_arguments(
    model_path: str, max_model_tokens: int, options: SglangOptions
) -> dict[str, Any]:
    """The arguments of sglang.Engine."""
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "tp_size": options.tensor_parallel,
        "context_length": max_model_tokens,
        "max_running_requests": options.max_running,
        "mem_fraction_static": options.memory_fraction,
        "enable_deterministic_inference": options.deterministic,
        "enable_fp32_lm_head": options.float32_head,
        "enable_memory_saver": options.memory_saver,
        "enable_metrics": True,
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "warning",
    }
    if options.first_gpu:
        arguments["base_gpu_id"] = options.first_gpu
    return arguments | dict(options.extra)


def check_version(*, any_version: bool) -> None:
    """ValueError if SGLang is missing, or its release is not one of those that this was tried with."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "--engine sglang needs SGLang: pip install 'tooljax[sidecar]' on a machine with a GPU"
        ) from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST and not any_version:
        low, high = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ValueError(
            f"SGLang {found} is installed, and this sidecar was tried with {low} to {high}: install one of "
            "those, or give --any_sglang_version"
        )


def sglang_module(name: str) -> Any:
    """A module of SGLang, "srt.utils" for sglang.srt.utils. By name, because type checkers know nothing of it where it
    is not installed, and would take engines/sglang.py for it."""
    return importlib.import_module(f"sglang.{name}" if name else "sglang")


def make_engine(arguments: dict[str, Any]) -> Any:
    """Starts SGLang's processes and waits until they serve. Arguments that this release does not know are left out."""
    sglang = sglang_module("")
    known = set(inspect.signature(sglang_module("srt.server_args").ServerArgs).parameters)
    unknown = sorted(set(arguments) - known)
    if unknown:
        _log.warning("SGLang %s has no arguments %s: left out", sglang.__version__, unknown)
    return sglang.Engine(**{key: value for key, value in arguments.items() if key in known})


async def all_answers(answers: AsyncIterator[T]) -> list[T]:
    """Everything that SGLang sends for one request."""
    return [answer async for answer in answers]


def require_success(answer: tuple[bool, str]) -> None:
    """RuntimeError if SGLang says that it failed."""
    success, message = answer[:2]
    if not success:
        raise RuntimeError(f"SGLang did not take the weights: {message}")
