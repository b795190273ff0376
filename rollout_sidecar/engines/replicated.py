"""Several copies of an engine behind one sidecar: each trajectory stays with one of them, weights go to all.

For a few GPUs of one machine. What is not the engine's - tools, templates, HTTP - is still one process: with more than
about four GPUs, start a sidecar for each and name all their URLs to the trainer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rollout_sidecar.engines.base import (
    Engine,
    GenerateRequest,
    GenerateResult,
    Staging,
    WeightTensor,
)

T = TypeVar("T")


class _Together:
    """Stagings as one."""

    def __init__(self, each: Sequence[Staging]):
        self._each = each

    def add(self, tensors: Sequence[WeightTensor]) -> None:
        for staging in self._each:
            staging.add(tensors)

    def drop(self) -> None:
        for staging in self._each:
            staging.drop()


class ReplicatedEngine:
    """Engines of the same model, which must be started from the same weights."""

    def __init__(self, engines: Sequence[Engine]):
        """ValueError if there is none."""
        if not engines:
            raise ValueError("a replicated engine needs at least one engine")
        self.engines = list(engines)
        self.name = engines[0].name
        self.max_model_tokens = min(engine.max_model_tokens for engine in engines)
        self.vocab_size = engines[0].vocab_size
        self.policy_version = engines[0].policy_version
        self.swap_s: Mapping[str, float] = {}
        """The last swap, by stage: of the engine that took longest."""
        self._home: dict[str, Engine] = {}
        self._torn = ""
        """Set while not all engines serve the same weights."""

    @property
    def max_running(self) -> int:
        """Trajectories that they generate at once, all together; 0 if they do not say."""
        return sum(getattr(engine, "max_running", 0) for engine in self.engines)

    @property
    def fault(self) -> str:
        """That of the first engine that has one: which of them a trajectory meets must not matter."""
        faults = [(number, engine.fault) for number, engine in enumerate(self.engines, 1)]
        first = next((each for each in faults if each[1]), None)
        return f"engine {first[0]} of {len(faults)}: {first[1]}" if first else self._torn

    async def start(self) -> None:
        """One after the other: engines look for free ports and set up this process. All or none are left running."""
        started: list[Engine] = []
        try:
            for engine in self.engines:
                started.append(engine)
                await engine.start()
        except BaseException:
            await asyncio.gather(*(engine.close() for engine in started), return_exceptions=True)
            raise

    async def close(self) -> None:
        """Closes all of them, and raises what the first one that failed raised."""
        await self._each(lambda engine: engine.close())

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """By the engine that the trajectory began with; the least busy one if it begins."""
        if self.fault:
            raise RuntimeError(f"nothing can be generated: {self.fault}")
        if request.trajectory_id not in self._home:
            self._home[request.trajectory_id] = self._least_busy()
        return await self._home[request.trajectory_id].generate(request)

    def _least_busy(self) -> Engine:
        """The one with the fewest trajectories that have begun and not ended."""
        homes = [id(engine) for engine in self._home.values()]
        return min(self.engines, key=lambda engine: homes.count(id(engine)))

    async def abort(self, trajectory_id: str) -> None:
        """Ends the trajectory's running generation."""
        if trajectory_id in self._home:
            await self._home[trajectory_id].abort(trajectory_id)

    async def release(self, trajectory_id: str) -> None:
        """The trajectory has ended."""
        engine = self._home.pop(trajectory_id, None)
        if engine is not None:
            await engine.release(trajectory_id)

    async def load_weights(
        self,
        tensors: Mapping[str, WeightTensor],
        policy_version: int,
        changed: frozenset[str] | None = None,
    ) -> None:
        """Replaces the weights of all engines at the same time; each goes on as soon as it can.

        ValueError, with nothing changed, if they all refuse. RuntimeError if some took them: then nothing is generated
        until a later push has gone through.
        """
        known = None if self._torn else changed
        outcomes = await asyncio.gather(
            *(engine.load_weights(tensors, policy_version, known) for engine in self.engines),
            return_exceptions=True,
        )
        failures = [each for each in outcomes if isinstance(each, BaseException)]
        taken = len(outcomes) - len(failures)
        if not failures:
            self.policy_version, self._torn = policy_version, ""
            stages = [item for engine in self.engines for item in engine.swap_s.items()]
            self.swap_s = {
                name: max(s for other, s in stages if other == name) for name, _ in stages
            }
            return
        if taken:
            self._torn = (
                f"{taken} of {len(outcomes)} engines took version {policy_version}: push again"
            )
            raise RuntimeError(f"{self._torn} ({failures[0]})") from failures[0]
        broken = [each for each in failures if not isinstance(each, ValueError)]
        raise (broken or failures)[0]

    def begin_staging(self, tensors: Sequence[WeightTensor], policy_version: int) -> Staging | None:
        """Of every engine that can. None if they must load everything."""
        if self._torn:
            return None
        begin = [getattr(engine, "begin_staging", None) for engine in self.engines]
        begun = [call(tensors, policy_version) for call in begin if call is not None]
        return _Together([staging for staging in begun if staging is not None])

    async def altered_tensors(self, tensors: Mapping[str, WeightTensor]) -> list[str] | None:
        """Names that any of them holds otherwise; None if one cannot tell."""
        found = await self._each(lambda engine: engine.altered_tensors(tensors))
        if any(names is None for names in found):
            return None
        return sorted({name for names in found for name in names or ()})

    async def release_memory(self) -> None:
        """Of every device."""
        await self._each(lambda engine: engine.release_memory())

    async def resume_memory(self) -> None:
        """On every device."""
        await self._each(lambda engine: engine.resume_memory())

    def metrics_text(self) -> str:
        """Engines of one process write their metrics to the same place."""
        read = getattr(self.engines[0], "metrics_text", None)
        return read() if read else ""

    async def _each(self, call: Callable[[Engine], Awaitable[T]]) -> Iterable[T]:
        """Waits for all of them, also when one fails."""
        outcomes = await asyncio.gather(*map(call, self.engines), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
