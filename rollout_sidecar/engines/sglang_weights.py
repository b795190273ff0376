"""Pushed bytes as SGLang takes weights: flat buckets of tensors, on the GPU or in shared memory."""

import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.engines.sglang_setup import sglang_module
from rollout_sidecar.threads import in_threads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ALIGNMENT = 256
"""In bytes, of each tensor in its bucket."""

PIECE_BYTES = 2**25
"""Copied to the device at once by a thread, through pinned memory of that size."""


class Place(NamedTuple):
    """A tensor, and where it lies in its bucket."""

    tensor: WeightTensor
    start: int

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + self.tensor.data.nbytes


def stage(tensors: Mapping[str, WeightTensor], bucket_bytes: int, device: str) -> list[bytes]:
    """Copies all tensors to `device` in buckets of at most bucket_bytes (or one tensor); returns their handles.

    A handle is what SGLang's processes open the memory with: CUDA IPC, or shared memory for "cpu". The memory lives
    until they have.
    """
    serializer = sglang_module("srt.utils").MultiprocessingSerializer
    metadata = sglang_module("srt.weight_sync.tensor_bucket").FlattenedTensorMetadata
    handles = []
    for places in buckets(tensors, bucket_bytes):
        flat = torch.empty(places[-1].end, dtype=torch.uint8, device=device)
        in_threads(lambda piece: _copy(*piece), list(_pieces(flat, places)))
        contents = [
            metadata(
                name=place.tensor.name,
                shape=torch.Size(place.tensor.shape),
                dtype=DTYPES[place.tensor.dtype],
                start_idx=place.start,
                end_idx=place.end,
                numel=place.tensor.data.nbytes,
            )
            for place in places
        ]
        handles.append(serializer.serialize({"flattened_tensor": flat, "metadata": contents}))
    return handles


def buckets(tensors: Mapping[str, WeightTensor], bucket_bytes: int) -> Iterator[list[Place]]:
    """Which tensors lie where in which bucket."""
    places: list[Place] = []
    for tensor in tensors.values():
        start = -(-places[-1].end // ALIGNMENT) * ALIGNMENT if places else 0
        if places and start + tensor.data.nbytes > bucket_bytes:
            yield places
            places, start = [], 0
        places.append(Place(tensor, start))
    if places:
        yield places


def _pieces(flat: torch.Tensor, places: list[Place]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Where to copy to and what, in pieces that threads can share."""
    for place in places:
        source, target = as_bytes(place.tensor), flat[place.start : place.end]
        yield from zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """To a GPU: through pinned memory of this thread's own, which is several times faster than CUDA's single way."""
    if not target.is_cuda:
        target.copy_(source)
        return
    pinned = torch.empty(
        source.shape, dtype=torch.uint8, pin_memory=True
    )  # kept by torch, for the next time
    pinned.copy_(source)
    stream = torch.cuda.Stream(target.device)
    with torch.cuda.stream(stream):
        target.copy_(pinned, non_blocking=True)
    stream.synchronize()


def as_bytes(tensor: WeightTensor) -> torch.Tensor:
    """The bytes of a push, flat uint8, not copied and not to be written to."""
    if not tensor.data.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns about memory that cannot be written; nobody writes here.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(tensor.data, dtype=torch.uint8)
