"""What is sent of a push: known as a whole, or still coming from the devices while its first bytes are on their way."""

import asyncio
import itertools
import threading
from collections.abc import Iterable

import jax
import numpy as np
from msgspec.structs import replace

from rollout_sidecar.protocol import TensorEntry
from tooljax.weights.payload import Base, Payload, full_payload, spans
from tooljax.weights.stopwatch import Stopwatch


class Outgoing:
    """A push as the connections see it."""

    def __init__(
        self, entries: list[TensorEntry], payload: "asyncio.Future[Payload]", base: Base | None
    ):
        self.entries = entries
        """With their hashes if all are known."""
        self.base = base
        """What deltas refer to; None in a full push."""
        self.nbytes = sum(entry.nbytes for entry in entries)
        self._payload = payload

    def read(self, offset: int, nbytes: int) -> list[memoryview]:
        """Bytes of the stream. Waits for those that are not there yet; raises why they will not come."""
        return self._payload.result().read(offset, nbytes)

    async def payload(self) -> Payload:
        """All of it, hashes included, when it is there."""
        return await asyncio.shield(self._payload)

    async def hashes(self) -> list[str]:
        """Of the tensors in their order, when they are known."""
        return [entry.hash for entry in (await self.payload()).entries]


def known(payload: Payload) -> Outgoing:
    """A push that is there as a whole."""
    there: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
    there.set_result(payload)
    return Outgoing(payload.entries, there, payload.base)


class Streamed(Outgoing):
    """A full push whose tensors are sent as they come to the host. Their names, dtypes and shapes are known before."""

    def __init__(
        self,
        entries: list[TensorEntry],
        tensors: Iterable[tuple[str, jax.Array]],
        *,
        keep_arrays: bool,
        watch: Stopwatch,
    ):
        """Starts to fetch. ValueError, for everybody who waits, if the tensors are not those of the entries."""
        self._ends = list(itertools.accumulate(entry.nbytes for entry in entries))
        self._pieces: list[memoryview] = []
        self._failure: BaseException | None = None
        self._news = threading.Condition()
        fetching = asyncio.ensure_future(
            asyncio.to_thread(self._fetch, tensors, keep_arrays, watch)
        )
        # Perhaps nobody asks: what sent it may have failed before.
        fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
        super().__init__(entries, fetching, None)

    def read(self, offset: int, nbytes: int) -> list[memoryview]:
        """As in Outgoing."""
        parts = list(spans(self._ends, offset, nbytes))
        with self._news:
            self._news.wait_for(lambda: self._failure or len(self._pieces) > parts[-1][0])
            if self._failure is not None:
                raise self._failure
            return [self._pieces[index][start:stop] for index, start, stop in parts]

    def _fetch(
        self, tensors: Iterable[tuple[str, jax.Array]], keep_arrays: bool, watch: Stopwatch
    ) -> Payload:
        try:
            payload = full_payload(
                tensors, keep_arrays=keep_arrays, watch=watch, arrived=self._arrived
            )
            if without_hashes(payload.entries) != self.entries:
                raise self._others()
        except BaseException as error:
            with self._news:
                self._failure = error
                self._news.notify_all()
            raise
        return payload

    def _arrived(self, data: np.ndarray) -> None:
        with self._news:
            index = len(self._pieces)
            if index == len(self.entries) or data.nbytes != self.entries[index].nbytes:
                raise self._others()
            self._pieces.append(data.data)
            self._news.notify_all()

    def _others(self) -> ValueError:
        return ValueError(
            "the tensors differ from those of the push before in a name, dtype or shape; a run pushes the same ones "
            "every time"
        )


def without_hashes(entries: list[TensorEntry]) -> list[TensorEntry]:
    """What is known of a full push before it is hashed."""
    return [replace(entry, hash="") for entry in entries]
