"""Rollout requests by id, and the frames that each has produced: what makes requests idempotent and streams resumable.

A request runs to its end whether or not anybody reads it. Frames are kept, encoded, until the request is among the
older finished ones; reading from frame K on works at any time before that. Progress of trajectories under way has no
numbers: every reader gets all of what is still of use.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine

import msgspec
import xxhash

from rollout_sidecar.errors import RequestError
from rollout_sidecar.protocol import (
    EndFrame,
    Frame,
    ProgressFrame,
    RolloutRequest,
    RolloutSpec,
    Task,
    Trajectory,
    TrajectoryFrame,
)
from rollout_sidecar.resume import SendProgress

RunRollout = Callable[
    [Task, RolloutSpec, RolloutRequest, int, SendProgress | None], Coroutine[None, None, Trajectory]
]

_log = logging.getLogger(__name__)


class RolloutStream:
    """One request: its running trajectories, and the frames of those that have ended, in the order they ended."""

    def __init__(self, request_id: str, digest: str):
        self.request_id = request_id
        self.digest = digest
        """Of the request's content, whatever the encoding it came in."""
        self.frames: list[bytes] = []
        """As MessagePack."""
        self.finished = False
        self.rollouts: list[asyncio.Task[Trajectory]] = []
        """Empty once the stream is finished."""
        self.ending: asyncio.Task[None] | None = None
        self._aborted: set[int] = set()
        self._changed = asyncio.Event()
        self._progress: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        self._told = 0

    @property
    def nbytes(self) -> int:
        """What the frames take in memory."""
        return sum(map(len, self.frames))

    def add(self, frame: Frame) -> None:
        """Appends a frame and wakes the readers. An end frame finishes the stream."""
        self.frames.append(msgspec.msgpack.encode(frame))
        self.finished = isinstance(frame, EndFrame)
        if isinstance(frame, TrajectoryFrame):  # how it came to be is of no use any more
            trajectory = frame.trajectory
            self._progress.pop((trajectory.task_index, trajectory.sample_index), None)
        elif self.finished:
            self._progress = {}
        self._wake()

    def tell(self, frame: ProgressFrame) -> None:
        """Takes what is new of a trajectory under way, and wakes the readers."""
        pieces = self._progress.setdefault((frame.task_index, frame.sample_index), [])
        if not frame.known_turns:  # it says everything
            pieces.clear()
        self._told += 1
        pieces.append((self._told, msgspec.msgpack.encode(frame)))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def abort(self, ordinals: Collection[int] | None = None) -> list[asyncio.Task[Trajectory]]:
        """Cancels what runs (of those positions in the request), each once: cancelling again would interrupt the
        release of its tools. Returns what will end by it."""
        chosen = range(len(self.rollouts)) if ordinals is None else ordinals
        ending = [i for i in chosen if i < len(self.rollouts)]
        for i in ending:
            if i not in self._aborted:
                self._aborted.add(i)
                self.rollouts[i].cancel()
        return [self.rollouts[i] for i in ending]

    def progress(self, told: int) -> tuple[list[bytes], int]:
        """What was told after piece number `told` and is still of use, in order; and the number of the last piece."""
        pieces = [piece for pieces in self._progress.values() for piece in pieces]
        return [frame for number, frame in sorted(pieces) if number > told], self._told

    async def changed(self, wait_s: float) -> None:
        """Returns at the next frame or progress, or after wait_s."""
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass


class Reader:
    """One reading of a stream, from frame `index` on."""

    def __init__(self, stream: RolloutStream, index: int):
        self._stream = stream
        self._told = 0
        self.index = index
        """Number of the frame that comes next."""

    @property
    def done(self) -> bool:
        """There is nothing more to read."""
        return self._stream.finished and self.index >= len(self._stream.frames)

    async def read(self, wait_s: float) -> list[bytes]:
        """What has come since, progress first. Waits for something, up to wait_s; [] if nothing came."""
        ready = self._ready()
        if not ready and not self.done:
            await self._stream.changed(wait_s)
            ready = self._ready()
        return ready

    def _ready(self) -> list[bytes]:
        progress, self._told = self._stream.progress(self._told)
        frames = self._stream.frames[self.index :]
        self.index += len(frames)
        return progress + frames


class RolloutRegistry:
    """Starts requests, finds them again, aborts them, and forgets old ones."""

    def __init__(self, run: RunRollout, *, keep_finished: int = 8, keep_bytes: int = 2**28):
        """Nothing is running yet.

        Args:
            run: plays one trajectory to its end.
            keep_finished: finished requests kept for reading again.
            keep_bytes: memory for them; the newest is kept whatever its size.
        """
        self._run = run
        self._keep_finished = keep_finished
        self._keep_bytes = keep_bytes
        self._streams: dict[str, RolloutStream] = {}

    def submit(
        self, request: RolloutRequest, admit: Callable[[RolloutRequest], None]
    ) -> RolloutStream:
        """Starts the request, or returns the one under its id if it has the same content (409 if another).

        `admit` raises if a new request may not start; one that is repeated was admitted before.
        """
        digest = xxhash.xxh3_128_hexdigest(_encoded(request))
        stream = self._streams.get(request.request_id)
        if stream is None:
            check_request(request)
            admit(request)
            stream = self._streams[request.request_id] = RolloutStream(request.request_id, digest)
            stream.rollouts = [
                asyncio.create_task(
                    self._run(
                        request.tasks[spec.task_index],
                        spec,
                        request,
                        ordinal,
                        stream.tell if request.progress else None,
                    )
                )
                for ordinal, spec in enumerate(request.rollouts)
            ]
            stream.ending = asyncio.create_task(self._collect(stream))
        if stream.digest != digest:
            raise RequestError(
                409,
                "request_id_taken",
                f"request_id {request.request_id!r} was used for another request; choose a new one",
                "$.request_id",
            )
        return stream

    def get(self, request_id: str) -> RolloutStream:
        """RequestError 404 if there is no such request, or no longer."""
        if request_id not in self._streams:
            raise RequestError(
                404,
                "unknown_request",
                f"no rollout request {request_id!r}; it may be too old to be kept, or the sidecar was restarted",
            )
        return self._streams[request_id]

    async def abort(
        self, request_id: str, ordinals: Collection[int] | None = None
    ) -> RolloutStream:
        """Ends the request; returns when its tools have been released. A finished request stays as it is.

        Args:
            ordinals: end only these of its rollouts; they leave no frame, and the others go on.
        """
        stream = self.get(request_id)
        if ordinals is None:
            await self._abort([stream])
        elif ending := stream.abort(ordinals):
            await asyncio.wait(ending)
        return stream

    async def close(self) -> None:
        """Aborts everything that runs."""
        await self._abort(list(self._streams.values()))

    async def _abort(self, streams: list[RolloutStream]) -> None:
        for stream in streams:
            stream.abort()
        ending = [stream.ending for stream in streams if stream.ending is not None]
        if ending:
            await asyncio.wait(ending)

    async def _collect(self, stream: RolloutStream) -> None:
        """Makes frames of trajectories as they end; always ends the stream."""
        for ended in asyncio.as_completed(stream.rollouts):
            try:
                trajectory = await ended
                stream.add(TrajectoryFrame(index=len(stream.frames), trajectory=trajectory))
            except asyncio.CancelledError:
                pass  # aborted: it has released its tools, and leaves no frame
            except Exception:  # a fault of ours; without an end frame readers would wait for ever
                _log.exception("a rollout of request %s was lost", stream.request_id)
        count = len(stream.frames)
        stream.add(EndFrame(index=count, trajectories=count, aborted=count < len(stream.rollouts)))
        stream.rollouts, stream.ending = [], None
        self._forget_old(stream)

    def _forget_old(self, newest: RolloutStream) -> None:
        """Moves the one that just finished to the end of the order, and drops the oldest finished ones."""
        self._streams[newest.request_id] = self._streams.pop(newest.request_id)
        finished = [stream for stream in self._streams.values() if stream.finished]
        kept_bytes = 0
        for age, stream in enumerate(reversed(finished)):
            kept_bytes += stream.nbytes
            if age and (age >= self._keep_finished or kept_bytes > self._keep_bytes):
                del self._streams[stream.request_id]


def check_request(request: RolloutRequest) -> None:
    """Raises RequestError 400 naming the field, for what the types cannot say."""
    seen = set()
    for i, spec in enumerate(request.rollouts):
        where = f"$.rollouts[{i}]"
        if spec.task_index >= len(request.tasks):
            raise _bad(
                f"{where}.task_index",
                f"task_index={spec.task_index}, but there are {len(request.tasks)} tasks",
            )
        if spec.seed >= 2**63:
            raise _bad(f"{where}.seed", f"seed={spec.seed} is not below 2**63")
        key = (spec.task_index, spec.sample_index)
        if key in seen:
            raise _bad(
                f"{where}.sample_index",
                f"sample {spec.sample_index} of task {spec.task_index} is asked for twice",
            )
        seen.add(key)
        _check_resume(f"{where}.resume", spec, request)
    for i, task in enumerate(request.tasks):
        if not task.messages:
            raise _bad(f"$.tasks[{i}].messages", f"task {task.task_id!r} has no messages")


def _check_resume(where: str, spec: RolloutSpec, request: RolloutRequest) -> None:
    partial = spec.resume
    if partial is None:
        return
    if partial.seed != spec.seed:
        raise _bad(f"{where}.seed", f"seed={partial.seed}, and the rollout's is {spec.seed}")
    if not 0 < len(partial.turns) < request.limits.max_turns:
        raise _bad(
            f"{where}.turns",
            f"{len(partial.turns)} turns to resume after, and limits.max_turns={request.limits.max_turns}",
        )


def _encoded(request: RolloutRequest) -> bytes:
    try:
        return msgspec.msgpack.encode(request, order="deterministic")
    except OverflowError:  # JSON has larger integers than MessagePack, in which frames are kept
        raise _bad("$", "an integer of the request does not fit into 64 bits") from None


def _bad(where: str, message: str) -> RequestError:
    return RequestError(400, "invalid_request", f"{message} - at `{where}`", where)
