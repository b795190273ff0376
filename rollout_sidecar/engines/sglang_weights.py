"""Pushed bytes as SGLang takes weights: flat buckets of tensors, on the GPU or in shared memory."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.engines.sglang_setup import sglang_module
from rollout_sidecar.threads import workers

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


class Buckets:
    """Tensors being copied to a device, in buckets of at most `bucket_bytes` (or one tensor): engines.base.Staging."""

    def __init__(
        self,
        tensors: Sequence[WeightTensor],
        policy_version: int,
        bucket_bytes: int,
        device: str,
    ):
        """Has the memory. Only name, dtype, shape and size of the tensors count."""
        self.policy_version = policy_version
        self.names = frozenset(tensor.name for tensor in tensors)
        self.dropped = False
        self._buckets = [
            (torch.empty(places[-1].end, dtype=torch.uint8, device=device), places)
            for places in buckets(tensors, bucket_bytes)
        ]
        self._at = {
            place.tensor.name: (number, place.start)
            for number, (_, places) in enumerate(self._buckets)
            for place in places
        }
        self._pool = workers()
        self._copies: list[Future[None]] = []

    def add(self, tensors: Sequence[WeightTensor]) -> None:
        """Begins to copy these. Neighbours in a bucket are copied as one."""
        runs: list[tuple[int, list[Place]]] = []
        for tensor in tensors:
            number, start = self._at[tensor.name]
            if not (
                runs and runs[-1][0] == number and 0 <= start - runs[-1][1][-1].end < ALIGNMENT
            ):
                runs.append((number, []))
            runs[-1][1].append(Place(tensor, start))
        for number, places in runs:
            flat = self._buckets[number][0]
            for piece in pieces(places, PIECE_BYTES):
                self._copies.append(self._pool.submit(_copy, flat, piece))

    def finish(self) -> list[bytes]:
        """Waits for all that was added, which must be everything; returns the buckets' handles.

        A handle is what SGLang's processes open the memory with: CUDA IPC, or shared memory for "cpu". The memory lives
        until they have.
        """
        self._pool.shutdown()
        for copy in self._copies:
            copy.result()
        return [_handle(flat, places) for flat, places in self._buckets]

    def drop(self) -> None:
        """Gives the memory back when nothing is copied any more."""
        self.dropped = True
        self._pool.shutdown(cancel_futures=True)
        self._buckets, self._copies = [], []


def finish(
    begun: Buckets | None,
    tensors: Mapping[str, WeightTensor],
    policy_version: int,
    bucket_bytes: int,
    device: str,
) -> list[bytes]:
    """Handles of these tensors in buckets: of those begun, if they are of these and were not given up."""
    which = policy_version, tensors.keys()
    if begun is not None and not begun.dropped and (begun.policy_version, begun.names) == which:
        return begun.finish()
    everything = list(tensors.values())
    begun = Buckets(everything, policy_version, bucket_bytes, device)
    begun.add(everything)
    return begun.finish()


def _handle(flat: torch.Tensor, places: Sequence["Place"]) -> bytes:
    serializer = sglang_module("srt.utils").MultiprocessingSerializer
    metadata = sglang_module("srt.weight_sync.tensor_bucket").FlattenedTensorMetadata
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
    return serializer.serialize({"flattened_tensor": flat, "metadata": contents})


def buckets(tensors: Iterable[WeightTensor], bucket_bytes: int) -> Iterator[list[Place]]:
    """Which tensors lie where in which bucket."""
    places: list[Place] = []
    for tensor in tensors:
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
    """Neighbours in a bucket cut into stretches of `piece_bytes`, the last perhaps shorter."""
    begin, end = places[0].start, places[-1].end
    cut = [Piece(at, min(at + piece_bytes, end), []) for at in range(begin, end, piece_bytes)]
    for place in places:
        first, last = (place.start - begin) // piece_bytes, -(-(place.end - begin) // piece_bytes)
        for piece in cut[first:last]:
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
