"""The trainer's side of the protocol: rollouts, weights, health of one sidecar, over connections that may break.

Lost connections are retried with backoff, and streams and pushes go on where they stopped. What cannot be repaired is
a `SidecarError`: one sentence with the URL and what to do.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any, TypeVar

import aiohttp
import msgspec

from rollout_sidecar.protocol import (
    MSGPACK,
    PROTOCOL_VERSION,
    EndFrame,
    EngineMemory,
    ErrorBody,
    Frame,
    Info,
    RolloutRequest,
    ServedWeights,
    Trajectory,
    WeightsCommitted,
    WeightsManifest,
    WeightsStatus,
    content_hash,
    decode,
    encode,
)

T = TypeVar("T")

RETRIES = 5
"""Attempts after the first, without anything having arrived in between. They take about 6 seconds."""
MAX_BACKOFF_S = 4.0
SILENCE_S = 60.0
"""A sidecar that streams sends something at least every 15 s: this long without a byte, the connection is dead."""
MAX_FRAME_BYTES = 2**30

_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, EOFError)


class SidecarError(RuntimeError):
    """The sidecar could not be reached, refused, or answered something else than the protocol says."""

    def __init__(self, message: str, *, kind: str, status: int = 0):
        super().__init__(message)
        self.kind = kind
        """What the sidecar called it, or "unreachable", "timeout", "bad_answer"."""
        self.status = status
        """HTTP status, 0 without an answer."""


class SidecarClient:
    """One sidecar. Use as `async with SidecarClient(url) as sidecar`."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 3600.0):
        """Connects at the first call.

        Args:
            url: such as http://127.0.0.1:8000.
            token: bearer token, if the sidecar wants one.
            timeout_s: how long one call may take, all of a rollout request or of a push included.
        """
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._aborted: set[str] = set()
        self._dropped: dict[str, set[int]] = {}

    async def __aenter__(self) -> "SidecarClient":
        headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        # Some calls take as long as the work behind them; deadlines are per call, see _deadline.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self) -> Info:
        """What the sidecar serves. SidecarError if it speaks another version of the protocol."""
        answer = json_or_none(
            await self._call("GET", "/v1/info", headers={"Accept": "application/json"})
        )
        version = answer.get("protocol_version") if isinstance(answer, dict) else None
        if version != PROTOCOL_VERSION:
            raise self._bad_answer(
                f"it speaks version {version} of the protocol, this trainer version {PROTOCOL_VERSION}"
                if isinstance(version, int)
                else "/v1/info is not a rollout sidecar's"
            )
        return self._decode(msgspec.json.encode(answer), Info, "application/json")

    async def ready(self, version: int | None = None) -> bool:
        """Whether rollouts can start now (of that version). False too if nobody answers."""
        path = "/readyz" if version is None else f"/readyz?version={version}"
        try:
            await self._call("GET", path, retries=0)
        except SidecarError as error:
            if error.status in (0, 503):
                return False
            raise
        return True

    async def rollouts(self, request: RolloutRequest) -> AsyncGenerator[Trajectory, None]:
        """Trajectories in the order they end. Survives lost connections; the sidecar computes on meanwhile.

        Stops early, without an error, once this client has aborted the request.
        """
        deadline = self._deadline()
        index, failures = 0, 0
        while True:
            try:
                async with aclosing(self._frames(request, index, deadline)) as frames:
                    async for frame in frames:
                        if isinstance(frame, EndFrame):
                            self._check_end(request, frame)
                            return
                        index, failures = index + 1, 0
                        yield frame.trajectory
            except _LOST as error:
                failures += 1
                await self._back_off(failures, RETRIES, deadline, error)
            except aiohttp.ClientError as error:
                raise self._bad_answer(f"{type(error).__name__}: {error}") from error

    async def abort(self, request_id: str, rollouts: Collection[int] | None = None) -> None:
        """Ends a request; its tools are released when this returns. Unknown requests are no error.

        Args:
            rollouts: positions in the request; only these end, without a trajectory.
        """
        path = f"/v1/rollouts/{request_id}"
        if rollouts is None:
            self._aborted.add(request_id)
        else:
            self._dropped.setdefault(request_id, set()).update(rollouts)
            path += f"?rollouts={','.join(map(str, sorted(rollouts)))}"
        try:
            await self._call("DELETE", path)
        except SidecarError as error:
            if error.status != 404:
                raise

    async def push_weights(
        self, version: int, manifest: WeightsManifest, read: Callable[[int, int], bytes]
    ) -> WeightsCommitted:
        """Sends what the sidecar has not got of a push, commits it, and checks what it then serves.

        Args:
            version: above the one being served.
            manifest: the tensors.
            read: read(offset, nbytes) gives bytes of the payload; called in a thread, once or more for each part.
        """
        path = f"/v1/weights/{version}"
        body = encode(manifest, MSGPACK)
        deadline = self._deadline()
        for attempt in range(RETRIES + 1):
            status = await self._typed(WeightsStatus, "POST", path, deadline, data=body)
            try:
                for part in status.missing_parts:
                    await self._put_part(path, manifest, part, read, deadline)
                done = await self._typed(WeightsCommitted, "POST", f"{path}/commit", deadline)
            except SidecarError as error:
                # The sidecar was restarted in between and knows nothing of the push: begin again.
                if error.kind != "not_begun" or attempt == RETRIES:
                    raise
                continue
            break
        if done != WeightsCommitted(version=version, content_hash=content_hash(manifest.tensors)):
            raise self._bad_answer(
                f"after the push of version {version} it serves version {done.version} with the"
                f" content {done.content_hash}, not {content_hash(manifest.tensors)}"
            )
        return done

    async def served_weights(self) -> ServedWeights:
        """Hashes of the tensors that are being served, and which of them the engine holds otherwise. Takes a while."""
        return await self._typed(ServedWeights, "GET", "/v1/weights", self._deadline())

    async def release_engine(self) -> EngineMemory:
        """Frees the engine's device memory: what runs waits. SidecarError, with what to do, if it cannot."""
        return await self._typed(EngineMemory, "POST", "/v1/engine/release", self._deadline())

    async def resume_engine(self) -> EngineMemory:
        """Takes the memory again; nothing is generated before weights are pushed. No-op if nothing was released."""
        return await self._typed(EngineMemory, "POST", "/v1/engine/resume", self._deadline())

    async def _put_part(
        self,
        path: str,
        manifest: WeightsManifest,
        part: int,
        read: Callable[[int, int], bytes],
        deadline: float,
    ) -> None:
        start = part * manifest.part_bytes
        nbytes = min(manifest.part_bytes, manifest.payload_bytes - start)
        data = await asyncio.to_thread(read, start, nbytes)
        if len(data) != nbytes:
            raise ValueError(f"read({start}, {nbytes}) gave {len(data)} bytes")
        await self._typed(WeightsStatus, "PUT", f"{path}/parts/{part}", deadline, data=data)

    # --- one exchange ---

    async def _frames(
        self, request: RolloutRequest, index: int, deadline: float
    ) -> AsyncGenerator[Frame, None]:
        """Frames from `index` on, over one connection. A stream that just ends is an EOFError."""
        path = "/v1/rollouts"
        if index == 0:
            call = self._open("POST", path, deadline, data=encode(request, MSGPACK))
        else:
            call = self._open("GET", f"{path}/{request.request_id}?from={index}", deadline)
        async with call as response:
            await self._check(response)
            if response.content_type != MSGPACK:
                raise self._bad_answer(f"its stream is {response.content_type}, not {MSGPACK}")
            while length := await _read_length(response.content):
                if length > MAX_FRAME_BYTES:
                    raise self._bad_answer(f"it announced a frame of {length} bytes")
                body = await response.content.readexactly(length)
                frame = self._decode(body, Frame)
                if frame.index != index:
                    raise self._bad_answer(f"it sent frame {frame.index} where {index} was due")
                index += 1
                yield frame

    def _check_end(self, request: RolloutRequest, end: EndFrame) -> None:
        dropped = len(self._dropped.pop(request.request_id, ()))
        wanted = end.trajectories + dropped >= len(request.rollouts)
        if end.aborted and request.request_id not in self._aborted and not wanted:
            raise SidecarError(
                f"{self.url} ended the request {request.request_id} after {end.trajectories} of"
                f" {len(request.rollouts)} trajectories: the sidecar was stopped, or somebody else"
                " aborted it; look at the sidecar's log",
                kind="aborted",
            )

    async def _typed(
        self, wire_type: type[T], method: str, path: str, deadline: float, data: bytes | None = None
    ) -> T:
        return self._decode(await self._call(method, path, deadline=deadline, data=data), wire_type)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        deadline: float | None = None,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        retries: int = RETRIES,
    ) -> bytes:
        """One exchange, repeated when the connection is lost: every call of the protocol may be."""
        deadline = deadline or self._deadline()
        failures = 0
        while True:
            try:
                call = self._open(method, path, deadline, data=data, headers=headers, silence=False)
                async with call as response:
                    await self._check(response)
                    return await response.read()
            except _LOST as error:
                failures += 1
                await self._back_off(failures, retries, deadline, error)
            except aiohttp.ClientError as error:
                raise self._bad_answer(f"{type(error).__name__}: {error}") from error

    def _open(
        self, method: str, path: str, deadline: float, *, silence: bool = True, **kwargs: Any
    ) -> Any:
        if self._session is None:
            raise RuntimeError("use SidecarClient as `async with SidecarClient(url) as sidecar`")
        # A commit answers when it is done, which may take long: only streams must not be silent.
        timeout = aiohttp.ClientTimeout(
            total=max(0.001, deadline - time.monotonic()),
            sock_connect=10.0,
            sock_read=SILENCE_S if silence else None,
        )
        return self._session.request(method, self.url + path, timeout=timeout, **kwargs)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 400:
            return
        body = await response.read()
        content_type = MSGPACK if response.content_type == MSGPACK else "application/json"
        try:
            fault = decode(body, content_type, ErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SidecarError(
                f"{self.url} answered {response.status} {response.reason} and is no rollout sidecar,"
                " or a proxy stands before it: check the URL",
                kind="bad_answer",
                status=response.status,
            ) from None
        advice = " (set sidecar.token_file)" if response.status == 401 else ""
        raise SidecarError(
            f"{self.url} refused {response.method} {response.url.path} ({response.status}"
            f" {fault.kind}): {fault.message}{advice}",
            kind=fault.kind,
            status=response.status,
        )

    def _decode(self, body: bytes, wire_type: Any, content_type: str = MSGPACK) -> Any:
        try:
            return decode(body, content_type, wire_type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._bad_answer(f"its answer cannot be read: {error}") from error

    def _bad_answer(self, problem: str) -> SidecarError:
        return SidecarError(
            f"{self.url} does not answer as a rollout sidecar of this version: {problem};"
            " check the URL, and that both sides run the same release",
            kind="bad_answer",
        )

    # --- time ---

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    async def _back_off(
        self, failures: int, retries: int, deadline: float, error: BaseException
    ) -> None:
        """Waits before the next attempt, or raises SidecarError if there is none."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise SidecarError(
                f"{self.url} did not finish within {self._timeout_s:g} s; look at the sidecar's log, or"
                " raise sidecar.request_timeout_s",
                kind="timeout",
            ) from error
        if failures > retries:
            raise SidecarError(
                f"{self.url} cannot be reached ({type(error).__name__}: {error}); start the sidecar"
                " (python -m rollout_sidecar), or correct sidecar.urls",
                kind="unreachable",
            ) from error
        await asyncio.sleep(min(left_s, MAX_BACKOFF_S, 0.1 * 2**failures))


async def _read_length(stream: aiohttp.StreamReader) -> int:
    """The length of the next frame, passing over empty ones; EOFError where the stream ends."""
    length = 0
    while length == 0:
        length = int.from_bytes(await stream.readexactly(4), "big")
    return length


def json_or_none(body: bytes) -> Any:
    """The JSON value of a body, None if it is none."""
    try:
        return json.loads(body)
    except ValueError:
        return None
