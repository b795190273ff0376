"""The trainer's side of the protocol: rollouts, weights, health of one sidecar, over connections that may break.

Lost connections are retried with backoff, and streams and pushes go on where they stopped. What cannot be repaired is
a `SidecarError`: one sentence with the URL and what to do.
"""

import json
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec

from rollout_sidecar.connection import LOST, SidecarError
from rollout_sidecar.protocol import (
    INSTANCE_HEADER,
    MSGPACK,
    PROTOCOL_VERSION,
    EndFrame,
    EngineMemory,
    Frame,
    Info,
    ProgressFrame,
    RolloutRequest,
    ServedWeights,
    Trajectory,
    encode,
)
from rollout_sidecar.weight_client import WeightConnection

__all__ = ["SidecarClient", "SidecarError"]

MAX_FRAME_BYTES = 2**30

OnProgress = Callable[[ProgressFrame], None]


class SidecarClient(WeightConnection):
    """One sidecar. Use as `async with SidecarClient(url) as sidecar`."""

    def __init__(
        self, url: str, token: str | None = None, timeout_s: float = 3600.0, ca_file: str = ""
    ):
        """Connects at the first call.

        Args:
            url: such as http://127.0.0.1:8000.
            token: bearer token, if the sidecar wants one.
            timeout_s: how long one call may take, all of a rollout request or of a push included.
            ca_file: certificates, in PEM, that an https sidecar's may be signed by, beside those that this machine
                trusts; its own, if it signed itself. ValueError if the file holds none.
        """
        super().__init__(url, token, timeout_s, ca_file)
        self._aborted: set[str] = set()
        self._dropped: dict[str, set[int]] = {}

    async def info(self, *, retries: int | None = None) -> Info:
        """What the sidecar serves. SidecarError if it speaks another version of the protocol."""
        accept = {"Accept": "application/json"}
        answer = json_or_none(await self._call("GET", "/v1/info", headers=accept, retries=retries))
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
        return await self.unready(version) is None

    async def unready(self, version: int | None = None) -> SidecarError | None:
        """Why no rollout can start now (of that version): nobody answers, or what the sidecar says. None if one can."""
        path = "/readyz" if version is None else f"/readyz?version={version}"
        try:
            await self._call("GET", path, retries=0)
        except SidecarError as error:
            if error.status in (0, 503):
                return error
            raise
        return None

    async def rollouts(
        self,
        request: RolloutRequest,
        on_progress: OnProgress | None = None,
        *,
        instance: str = "",
    ) -> AsyncGenerator[Trajectory, None]:
        """Trajectories in the order they end. Survives lost connections; the sidecar computes on meanwhile.

        Stops early, without an error, once this client has aborted the request. A sidecar that was started again in
        between is a SidecarError of the kind "restarted": what it sends now is another run.

        Args:
            on_progress: called with what is new of trajectories under way; set `progress` in the request.
            instance: the Info.instance that must answer; default: whichever does first.
        """
        deadline = self._deadline()
        index, failures = 0, 0
        instances = {instance} - {""}
        while True:
            try:
                frames = self._frames(request, index, deadline, instances)
                async with aclosing(frames):
                    async for frame in frames:
                        failures = 0
                        if isinstance(frame, EndFrame):
                            self._check_end(request, frame)
                            return
                        if isinstance(frame, ProgressFrame):
                            if on_progress is not None:
                                on_progress(frame)
                            continue
                        index += 1
                        yield frame.trajectory
            except aiohttp.ClientSSLError as error:
                raise self._untrusted(error) from error
            except LOST as error:
                failures += 1
                await self._back_off(failures, deadline, error)
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

    async def served_weights(self) -> ServedWeights:
        """Hashes of the tensors that are being served, and which of them the engine holds otherwise. Takes a while."""
        return await self._typed(ServedWeights, "GET", "/v1/weights", self._deadline())

    async def release_engine(self) -> EngineMemory:
        """Frees the engine's device memory: what runs waits. SidecarError, with what to do, if it cannot."""
        return await self._typed(EngineMemory, "POST", "/v1/engine/release", self._deadline())

    async def resume_engine(self) -> EngineMemory:
        """Takes the memory again; nothing is generated before weights are pushed. No-op if nothing was released."""
        return await self._typed(EngineMemory, "POST", "/v1/engine/resume", self._deadline())

    # --- one exchange ---

    async def _frames(
        self, request: RolloutRequest, index: int, deadline: float, instances: set[str]
    ) -> AsyncGenerator[Frame, None]:
        """Frames from `index` on, over one connection. A stream that just ends is an EOFError.

        Args:
            instances: those that have answered this request before; all must be the same.
        """
        path = "/v1/rollouts"
        if index == 0:
            call = self._open("POST", path, deadline, data=encode(request, MSGPACK))
        else:
            call = self._open("GET", f"{path}/{request.request_id}?from={index}", deadline)
        async with call as response:
            await self._check(response)
            if response.content_type != MSGPACK:
                raise self._bad_answer(f"its stream is {response.content_type}, not {MSGPACK}")
            instances.add(response.headers.get(INSTANCE_HEADER, ""))
            if len(instances) > 1:
                raise SidecarError(
                    f"{self.url} was restarted since it was last asked, and has lost the request"
                    f" {request.request_id} and its weights",
                    kind="restarted",
                )
            while length := await _read_length(response.content):
                if length > MAX_FRAME_BYTES:
                    raise self._bad_answer(f"it announced a frame of {length} bytes")
                body = await response.content.readexactly(length)
                frame = self._decode(body, Frame)
                if not isinstance(frame, ProgressFrame):
                    if frame.index != index:
                        raise self._bad_answer(f"it sent frame {frame.index} where {index} was due")
                    index += 1
                yield frame

    def _check_end(self, request: RolloutRequest, end: EndFrame) -> None:
        dropped = len(self._dropped.pop(request.request_id, ()))
        wanted = end.trajectories + dropped >= len(request.rollouts)
        asked = request.request_id in self._aborted
        self._aborted.discard(request.request_id)
        if end.aborted and not asked and not wanted:
            raise SidecarError(
                f"{self.url} ended the request {request.request_id} after {end.trajectories} of"
                f" {len(request.rollouts)} trajectories: the sidecar was stopped, or somebody else"
                " aborted it; look at the sidecar's log",
                kind="aborted",
            )


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
