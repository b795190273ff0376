"""Pushed bytes as SGLang takes weights: flat buckets of tensors, on the GPU or in shared memory."""

import warnings
from collections.abc import Iterator, Mapping

import torch

from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.engines.sglang_setup import sglang_module

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stage(tensors: Mapping[str, WeightTensor], bucket_bytes: int, device: str) -> list[bytes]:
    """Copies all tensors to `device` in buckets of at most bucket_bytes (or one tensor); returns their handles.

    A handle is what SGLang's processes open the memory with: CUDA IPC, or shared memory for "cpu". The memory lives
    until they have.
    """
    serializer = sglang_module("srt.utils").MultiprocessingSerializer
    make_bucket = sglang_module("srt.weight_sync.tensor_bucket").FlattenedTensorBucket
    handles = []
    for group in _groups(tensors, bucket_bytes):
        bucket = make_bucket(
            named_tensors=[(tensor.name, as_torch(tensor).to(device)) for tensor in group]
        )
        flat = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        handles.append(serializer.serialize(flat))
    return handles


def as_torch(tensor: WeightTensor) -> torch.Tensor:
    """The bytes of a push as a tensor, not copied and not to be written to."""
    with warnings.catch_warnings():
        # torch warns about memory that cannot be written; nobody writes here.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(tensor.data, dtype=DTYPES[tensor.dtype])
    return flat.reshape(tensor.shape)


def _groups(tensors: Mapping[str, WeightTensor], bucket_bytes: int) -> Iterator[list[WeightTensor]]:
    group: list[WeightTensor] = []
    size = 0
    for tensor in tensors.values():
        if group and size + tensor.data.nbytes > bucket_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.data.nbytes
    if group:
        yield group
