"""Pushed bytes as SGLang takes weights: flat buckets of tensors, on the GPU or in shared memory."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.engines.sglang_setup import sglang_module
from rollout_sidecar.threads import in_threads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ALIGNMENT = 256
"""In bytes, of each tensor in its bucket."""

PIECE_BYTES = 2**24
"""Of a bucket, copied to the device at once by a thread, through pinned memory of that size."""


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
        in_threads(partial(_copy, flat), pieces(places, PIECE_BYTES))
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


class Piece(NamedTuple):
    """A stretch of a bucket, whatever tensors lie in it: many small ones are copied to a device as one."""

    start: int
    end: int
    sources: list[tuple[int, WeightTensor, slice]]
    """Where in the piece bytes of a tensor go, and which."""


def pieces(places: Sequence[Place], piece_bytes: int) -> list[Piece]:
    """A bucket cut into stretches of `piece_bytes`, the last perhaps shorter."""
    end = places[-1].end
    cut = [Piece(at, min(at + piece_bytes, end), []) for at in range(0, end, piece_bytes)]
    for place in places:
        for piece in cut[place.start // piece_bytes : -(-place.end // piece_bytes)]:
            start, stop = max(place.start, piece.start), min(place.end, piece.end)
            if start < stop:
                which = slice(start - place.start, stop - place.start)
                piece.sources.append((start - piece.start, place.tensor, which))
    return cut


def _copy(flat: torch.Tensor, piece: Piece) -> None:
    """To a GPU: through pinned memory of this thread's own, which is several times faster than CUDA's single way."""
    target = flat[piece.start : piece.end]
    if not flat.is_cuda:
        fill(target.numpy(), piece)
        return
    # Always of one size, so that torch, which keeps it, has it for the next time.
    pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)[: len(target)]
    fill(pinned.numpy(), piece)
    stream = torch.cuda.Stream(flat.device)
    with torch.cuda.stream(stream):
        target.copy_(pinned, non_blocking=True)
    stream.synchronize()


def fill(target: np.ndarray, piece: Piece) -> None:
    """Copies the tensors' bytes to where they lie in the piece. What lies between them stays what it is.

    By NumPy: torch would divide each copy among threads of its own, made anew for every thread that asks.
    """
    for at, tensor, which in piece.sources:
        source = np.frombuffer(tensor.data, np.uint8)[which]
        target[at : at + source.size] = source


def as_bytes(tensor: WeightTensor) -> torch.Tensor:
    """The bytes of a push, flat uint8, not copied and not to be written to."""
    if not tensor.data.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns about memory that cannot be written; nobody writes here.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(tensor.data, dtype=torch.uint8)
