"""Asks the sidecars for trajectories, and hands them weights: blocking calls over `tooljax.fleet`, which decides who
does what and goes on without a sidecar that fails.

Results are collated by (task, sample), never by arrival, and seeds derive from those too: what the trainer sees depends
neither on timing nor on how many sidecars there are.
"""

import asyncio
import math
import signal
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.protocol import (
    Info,
    Limits,
    RewardWeights,
    RolloutRequest,
    SamplingParams,
    Task,
    Trajectory,
    derive_seed,
)
from tooljax.config import Config
from tooljax.config.schema import WeightsConfig
from tooljax.fleet.batch import Batch
from tooljax.fleet.fleet import Fleet
from tooljax.fleet.groups import Group
from tooljax.launch import local_sidecar
from tooljax.weights.push import InFlight, PushReport

Groups = list[list[Trajectory]]
"""Trajectories by task, then by sample."""

Answer = TypeVar("Answer")

Progress = Callable[[int, int], None]
"""Called with how many trajectories are there, and how many are wanted."""

LOCAL_DOWN_S = 10.0
"""How long to wait for the sidecar that the run has started itself: nobody starts it again."""


class InterruptedRollout(Exception):
    """Somebody asked the run to stop while trajectories were being made."""


@contextmanager
def open_sidecars(config: Config) -> "Iterator[Sidecars]":
    """The sidecars that a config names, or one started here that ends with the block."""
    settings = config.sidecar
    shared: dict[str, Any] = {
        "timeout_s": settings.request_timeout_s,
        "in_flight": settings.in_flight,
    }
    if settings.urls:
        token = _read_token(settings.token_file)
        with Sidecars(
            settings.urls,
            token=token,
            ca_file=settings.ca_file,
            down_timeout_s=settings.down_timeout_s,
            **shared,
        ) as sidecars:
            yield sidecars
        return
    log = Path(config.run.dir) / "sidecar.log"
    wait_s = min(settings.down_timeout_s, LOCAL_DOWN_S)
    with (
        local_sidecar(config, log_path=log) as (url, token),
        Sidecars([url], token=token, down_timeout_s=wait_s, **shared) as sidecars,
    ):
        yield sidecars


def _read_token(file: str) -> str | None:
    """The bearer token in sidecar.token_file, None where it names none."""
    try:
        return Path(file).read_text().strip() if file else None
    except OSError as error:
        raise ValueError(
            f"sidecar.token_file={file!r} cannot be read: {error.strerror}; name the file that the "
            "sidecars were given, or leave it empty"
        ) from error


class Sidecars:
    """Every sidecar of a run, behind blocking calls. A context manager.

    The first SIGINT or SIGTERM sets `stop_requested` and ends a running rollout, and any that is asked for later, with
    InterruptedRollout; a second one raises KeyboardInterrupt as usual.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None,
        timeout_s: float,
        down_timeout_s: float | None = None,
        ca_file: str = "",
        in_flight: InFlight = "continue",
    ):
        """Nothing is asked yet.

        Args:
            urls: http or https.
            token: bearer token of all of them.
            timeout_s: how long one batch of rollouts may take.
            down_timeout_s: how long to wait when no sidecar is left; default: timeout_s.
            ca_file: certificates to trust beside this machine's.
            in_flight: what a push does to trajectories under way.
        """
        if not urls:
            raise ValueError("no sidecar to ask: set sidecar.urls, or leave it empty to start one")
        clients = [SidecarClient(url, token, timeout_s, ca_file) for url in urls]
        wait_s = timeout_s if down_timeout_s is None else down_timeout_s
        self.fleet = Fleet(clients, timeout_s=timeout_s, down_timeout_s=wait_s)
        self._clients = clients
        self._runner = asyncio.Runner()
        self._task: asyncio.Task | None = None
        self._handlers: dict[int, object] = {}
        self._nonce = uuid.uuid4().hex[:12]
        self._requests = 0
        self._first_version = 0
        self._in_flight: InFlight = in_flight
        self.stop_requested = False

    def __enter__(self) -> "Sidecars":
        try:
            for client in self._clients:
                self._runner.run(client.__aenter__())
            infos = self._runner.run(self.fleet.open())
            # Versions only ever grow on a sidecar, and one that outlived an earlier run already has some.
            self._first_version = 1 + max(info.policy_version for info in infos)
        except BaseException:
            self.__exit__()
            raise
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for client in self._clients:
            self._runner.run(client.__aexit__(None, None, None))
        self._runner.close()

    def info(self) -> list[Info]:
        """What each sidecar serves. Raises SidecarError, naming the URL, if one does not answer."""

        async def ask() -> list[Info]:
            return list(await asyncio.gather(*(client.info() for client in self._clients)))

        return self._runner.run(ask())

    def check_fit(self, *, vocab_hash: str, max_trajectory_tokens: int) -> None:
        """ValueError, naming the URL, if a sidecar has another vocabulary or holds too short a context."""
        for client, info in zip(self._clients, self.info(), strict=True):
            if info.vocab_hash != vocab_hash:
                raise ValueError(
                    f"{client.url} serves {info.model} with another vocabulary than the trainer's "
                    "model.path: start it with --model of the same tokenizer"
                )
            if info.max_model_tokens < max_trajectory_tokens:
                raise ValueError(
                    f"{client.url} holds contexts of {info.max_model_tokens} tokens, fewer than "
                    f"limits.max_trajectory_tokens={max_trajectory_tokens}: lower that, or start it "
                    "with a larger --max_model_tokens"
                )

    def push(
        self, tensors: Iterable[tuple[str, jax.Array]], *, step: int, weights: WeightsConfig
    ) -> PushReport:
        """Sends the weights that the policy has after `step` steps; returns when every sidecar that can be used serves
        them. Raises PushError."""
        return self._runner.run(
            self.fleet.push(
                tensors,
                version=self.version_of(step),
                weights=weights,
                in_flight=self._in_flight,
            )
        )

    def version_of(self, step: int) -> int:
        """What the sidecars call the policy after `step` steps of this run."""
        return self._first_version + step

    def on_each(
        self,
        ask: Callable[[SidecarClient], Coroutine[Any, Any, Answer]],
        *,
        interruptible: bool = True,
    ) -> list[tuple[str, Answer]]:
        """Asks every sidecar that can be used, at once: its URL and what it answered.

        Raises SidecarError, or InterruptedRollout if it is interruptible.
        """
        asking = self.fleet.on_each(ask)
        return self._interruptible(asking) if interruptible else self._runner.run(asking)

    def metrics(self) -> dict[str, float]:
        """What a step logs of the sidecars."""
        return self.fleet.metrics()

    def policy_lag(self, trajectory: Trajectory, step: int) -> int:
        """How many steps older than the policy after `step` steps the oldest token of a trajectory is."""
        spans = [span for stream in trajectory.streams for span in stream.version_spans]
        versions = [span.policy_version for span in spans]
        return self._first_version + step - min(versions) if versions else 0

    def rollout(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        seed: tuple[int, ...],
        sampling: SamplingParams,
        limits: Limits,
        reward_weights: RewardWeights | None = None,
        quorum: float = 1.0,
        straggler_timeout_s: float = 0.0,
        step: int | None = None,
        on_progress: Progress | None = None,
    ) -> Groups:
        """Makes `samples` trajectories of each task.

        Their seeds derive from (*seed, task, sample). With `step`, only the policy after that many steps will do;
        without, what was pushed last, or whatever the sidecars serve. Without `reward_weights`, rewards are the outcome
        alone. Once `quorum` of a group have ended, the others have `straggler_timeout_s` left: then they are aborted,
        and come back with that status and without tokens. Raises SidecarError, or InterruptedRollout.
        """
        self._requests += 1
        groups = [
            Group(i, task, [derive_seed(*seed, i, s) for s in range(samples)])
            for i, task in enumerate(tasks)
        ]
        template = RolloutRequest(
            request_id=f"{self._nonce}.{self._requests}",
            tasks=[],
            rollouts=[],
            sampling=sampling,
            limits=limits,
            reward_weights=reward_weights,
            min_policy_version=(self.fleet.version or 0) if step is None else self.version_of(step),
        )
        enough = math.ceil(quorum * samples - 1e-9)  # 0.7 * 10 is a little more than 7
        self._interruptible(
            self._fill(groups, template, _Stragglers(enough, straggler_timeout_s), on_progress)
        )
        return [group.all() for group in groups]

    async def _fill(
        self,
        groups: Sequence[Group],
        template: RolloutRequest,
        stragglers: "_Stragglers",
        on_progress: Progress | None,
    ) -> None:
        wanted = sum(len(group.seeds) for group in groups)

        def taken(batch: Batch, group: Group) -> None:
            if on_progress is not None:
                on_progress(sum(len(group.made) for group in groups), wanted)
            stragglers.watch(batch, group)

        try:
            await self.fleet.rollout(groups, template, taken=taken)
        finally:
            await stragglers.end()

    def _interruptible(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """What the call gives, unless somebody asks the run to stop."""

        async def run() -> Answer:
            self._task = asyncio.current_task()
            if self.stop_requested:
                call.close()
                raise asyncio.CancelledError
            return await call

        try:
            return self._runner.run(run())
        except asyncio.CancelledError:
            raise InterruptedRollout from None
        finally:
            self._task = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class _Stragglers:
    """Gives up what is still under way some time after enough of its group have ended."""

    def __init__(self, enough: int, timeout_s: float):
        self._enough = enough
        self._timeout_s = timeout_s
        self._dropping: dict[int, asyncio.Task[None]] = {}

    def watch(self, batch: Batch, group: Group) -> None:
        """To be called when a trajectory of a group has come."""
        enough = self._enough <= len(group.made) < len(group.seeds)
        if enough and group.index not in self._dropping:
            self._dropping[group.index] = asyncio.create_task(self._drop_late(batch, group))

    async def end(self) -> None:
        """Nobody is waited for any longer."""
        for task in self._dropping.values():
            task.cancel()
        await asyncio.gather(*self._dropping.values(), return_exceptions=True)

    async def _drop_late(self, batch: Batch, group: Group) -> None:
        await asyncio.sleep(self._timeout_s)
        await batch.drop(group)
