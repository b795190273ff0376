"""An agent being served: its rollout requests, its weights, and whether it is ready. Knows nothing of HTTP."""

import asyncio
import ipaddress
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rollout_sidecar.agent import Agent, run_rollout
from rollout_sidecar.errors import RequestError, RolloutError, boundary
from rollout_sidecar.foreign import bounded, exhausted, invoke
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import RolloutRequest, RolloutSpec, Task, Trajectory
from rollout_sidecar.resume import SendProgress
from rollout_sidecar.rollout_stream import RolloutRegistry
from rollout_sidecar.weights import InFlight, WeightStore, swap_metrics

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ServerOptions:
    """Limits of the server as a whole; those of a trajectory come with each request."""

    model: str = ""
    """What /v1/info calls the model."""
    token: str = ""
    """Bearer token; "" lets everybody in, which is refused on an address that others can reach."""
    max_concurrent: int = 256
    """Trajectories that run at once, over all requests. More wait."""
    max_body_bytes: int = 2**28
    """Of a request body, and so of a part of a push."""
    max_weights_bytes: int = 2**36
    """Of the payload of a push, which is held in memory until it is committed."""
    keep_finished: int = 64
    """Finished rollout requests that can still be read."""
    keep_bytes: int = 2**28
    """Memory for them."""
    tool_start_timeout_s: float = 120.0
    """How long the startup of one tool or interaction may take."""
    tool_stop_timeout_s: float = 10.0
    """How long its shutdown may take."""
    reap_period_s: float = 30.0
    """Time between two looks for instances whose trajectories are gone."""
    alive_s: float = 15.0
    """A stream without a frame for this long sends an empty one: a reader can tell waiting from a dead peer."""


class Sidecar:
    """An agent being served: its rollout requests, its weights, and whether it is ready."""

    def __init__(self, agent: Agent, options: ServerOptions | None = None):
        """Nothing runs before `start`."""
        self.agent = agent
        self.options = options = options or ServerOptions()
        self.started = False
        self.instance = uuid.uuid4().hex
        """Another one after every start."""
        self.metrics: Metrics = agent.metrics
        self.rollouts = RolloutRegistry(
            self._run, keep_finished=options.keep_finished, keep_bytes=options.keep_bytes
        )
        self.weights = WeightStore(
            agent.engine,
            max_payload_bytes=options.max_weights_bytes,
            max_part_bytes=options.max_body_bytes,
            paused=self._paused,
        )
        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._reaper: asyncio.Task | None = None
        self._parts: list[tuple[str, object]] = []
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.metrics.gauge("running_rollouts", "Trajectories under way.", lambda: self._running)
        self.metrics.gauge(
            "policy_version", "Version being served.", lambda: agent.engine.policy_version
        )
        self.metrics.gauge(
            "staged_weight_bytes", "Size of the push under way.", lambda: self.weights.staged_bytes
        )
        self.metrics.gauge(
            "weight_base_bytes", "Host copy of the weights.", lambda: self.weights.base_bytes
        )
        self.metrics.collect(lambda: swap_metrics(agent.engine, self.weights))

    async def start(self) -> None:
        """Starts tools and interactions, then the engine; rollouts are refused (503) until then.

        Raises ValueError naming every tool that failed. What had been started is shut down again.
        """
        try:
            await self._start_parts()
            await self.agent.engine.start()
        except BaseException:
            await self._stop_parts()
            raise
        self._reaper = asyncio.create_task(self.agent.leases.reap(self.options.reap_period_s))
        self.started = True

    async def stop(self) -> None:
        """Aborts rollouts, waits for their tools to be released, shuts those down, closes the engine."""
        self.started = False
        await self.rollouts.close()
        if self.agent.closing:
            await asyncio.wait(self.agent.closing)
        if self._reaper is not None:
            self._reaper.cancel()
            with suppress(asyncio.CancelledError):
                await self._reaper
            self._reaper = None
        await self.agent.leases.sweep()
        if self.agent.leases.live:
            _log.warning("%d instances could not be released", self.agent.leases.live)
        await self._stop_parts()
        await self.agent.engine.close()

    async def _start_parts(self) -> None:
        """`startup` of every tool and interaction that has one, all at once."""
        agent = self.agent
        parts = [(f"tool {name!r}", tool) for name, tool in agent.tools.items()]
        parts += [(f"interaction {name!r}", one) for name, one in agent.interactions.items()]
        timeout_s = self.options.tool_start_timeout_s

        async def start(what: str, part: object) -> str:
            # Also of one that fails or is cancelled on the way: it may hold things already.
            self._parts.append((what, part))
            return await _call(part, "startup", timeout_s)

        problems = await asyncio.gather(*(start(what, part) for what, part in parts))
        failed = [f"{what}: {p}" for (what, _), p in zip(parts, problems, strict=True) if p]
        if failed:
            raise ValueError(f"startup failed of {'; of '.join(failed)}")

    async def _stop_parts(self) -> None:
        """`shutdown` of what was started; what fails is logged."""
        parts, self._parts = self._parts, []
        timeout_s = self.options.tool_stop_timeout_s
        problems = await asyncio.gather(*(_call(part, "shutdown", timeout_s) for _, part in parts))
        for (what, _), problem in zip(parts, problems, strict=True):
            if problem:
                _log.warning("shutdown of %s failed: %s", what, problem)

    def is_ready(self, version: int | None = None) -> bool:
        """Rollouts can start now (of that version)."""
        return not self.why_not_ready(version)

    def why_not_ready(self, version: int | None = None) -> str:
        """Why no rollout can start now (of that version); "" if one can."""
        engine = self.agent.engine
        if not self.started:
            return "the engine is still loading"
        if engine.fault:
            return f"the engine cannot generate: {engine.fault}"
        if hung := exhausted():
            return hung
        if not self._resumed.is_set():
            return f"weights are being swapped; version {engine.policy_version} was served before"
        if version not in (None, engine.policy_version):
            return f"serving version {engine.policy_version}"
        return ""

    async def engine_metrics(self) -> str:
        """Prometheus text of an engine that counts by itself, under its own names; "" of others."""
        read = getattr(self.agent.engine, "metrics_text", None)
        return await asyncio.to_thread(read) if read else ""

    def admit(self, request: RolloutRequest) -> None:
        """Raises RequestError unless a new request may start."""
        self.require_started()
        if fault := self.agent.engine.fault:
            raise RequestError(503, "not_ready", f"the engine cannot generate: {fault}")
        if hung := exhausted():
            raise RequestError(503, "not_ready", hung)
        serving = self.agent.engine.policy_version
        if serving < request.min_policy_version:
            raise RequestError(
                409,
                "policy_version",
                f"version {serving} is being served, and min_policy_version={request.min_policy_version};"
                " push the weights first",
                "$.min_policy_version",
            )

    def require_started(self) -> None:
        """Raises RequestError 503 while the engine is loading."""
        if not self.started:
            raise RequestError(503, "not_ready", "the engine is still loading; wait for /readyz")

    @property
    def max_concurrent(self) -> int:
        """Trajectories that are generated at once."""
        engine = getattr(self.agent.engine, "max_running", 0) or self.options.max_concurrent
        return min(self.options.max_concurrent, engine)

    async def _run(
        self,
        task: Task,
        spec: RolloutSpec,
        request: RolloutRequest,
        ordinal: int,
        on_progress: SendProgress | None,
    ) -> Trajectory:
        async with self._slots:
            while not self._resumed.is_set():  # another swap may begin before this gets its turn
                await self._resumed.wait()
            self._running += 1
            self._idle.clear()
            try:
                return await run_rollout(self.agent, task, spec, request, ordinal, on_progress)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()

    @asynccontextmanager
    async def _paused(self, in_flight: InFlight) -> AsyncIterator[None]:
        """New rollouts wait. Running ones are the engine's to hold up, or, with "finish", have ended: each within its
        own deadline."""
        self._resumed.clear()
        try:
            if in_flight == "finish":
                await self._idle.wait()
            yield
        finally:
            self._resumed.set()


async def _call(part: object, method: str, timeout_s: float) -> str:
    """Calls a method of foreign code, if it has it; what went wrong, "" if nothing did."""
    found = getattr(part, method, None)
    if found is None:
        return ""
    try:
        with boundary(RolloutError):
            await bounded(invoke(found), timeout_s)
    except RolloutError as error:
        return str(error)
    return ""


def check_exposure(host: str, token: str) -> None:
    """Raises ValueError if anybody on the network could use the sidecar."""
    try:
        private = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        private = False
    if not private and not token:
        raise ValueError(
            f"--host {host} can be reached from other machines, and there is no token: give --token_file,"
            " or listen on 127.0.0.1"
        )
