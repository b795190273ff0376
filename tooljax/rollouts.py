"""Asks the sidecars for trajectories, and hands them weights, over `tooljax.fleet`, which decides who does what and
goes on without a sidecar that fails. The fleet's event loop has a thread of its own: rollouts that were started go on
while the trainer computes.

Results are collated by (task, sample), never by arrival, and seeds derive from those too: what the trainer sees depends
neither on timing nor on how many sidecars there are.
"""

import asyncio
import math
import signal
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
import msgspec

from rollout_sidecar.client import SidecarClient, SidecarError
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
from tooljax.fleet.enough import Enough
from tooljax.fleet.fleet import Fleet
from tooljax.fleet.groups import Group
from tooljax.launch import local_sidecar
from tooljax.loop_thread import Call, LoopThread
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
        "grace_s": config.checkpoint.grace_s,
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

    The first SIGINT or SIGTERM sets `stop_requested` and ends running rollouts, and any that is asked for later, with
    InterruptedRollout. Everything else is finished, but what has no answer within half of the grace period is given up:
    the sidecars may be ending too, and the other half is for saving. A second signal ends the process at once, also
    while it waits for a device or a disk.
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
        grace_s: float = 30.0,
    ):
        """Nothing is asked yet.

        Args:
            urls: http or https.
            token: bearer token of all of them.
            timeout_s: how long one batch of rollouts may take.
            down_timeout_s: how long to wait when no sidecar is left; default: timeout_s.
            ca_file: certificates to trust beside this machine's.
            in_flight: what a push does to trajectories under way.
            grace_s: how long the process may go on after a signal to end.
        """
        if not urls:
            raise ValueError("no sidecar to ask: set sidecar.urls, or leave it empty to start one")
        clients = [SidecarClient(url, token, timeout_s, ca_file) for url in urls]
        wait_s = timeout_s if down_timeout_s is None else down_timeout_s
        self.fleet = Fleet(clients, timeout_s=timeout_s, down_timeout_s=wait_s)
        self._clients = clients
        self._loop = LoopThread("sidecars")
        self._open: dict[Call[Any], bool] = {}
        """What is under way, and whether a signal ends it at once."""
        self._late = threading.Event()
        self._late_timer = threading.Timer(grace_s / 2, self._end_calls)
        self._late_timer.daemon = True
        self._half_grace_s = grace_s / 2
        self._handlers: dict[int, object] = {}
        self._nonce = uuid.uuid4().hex[:12]
        self._requests = 0
        self._first_version = 0
        self._in_flight: InFlight = in_flight
        self.stop_requested = False

    def __enter__(self) -> "Sidecars":
        try:
            for client in self._clients:
                self._loop.run(client.__aenter__())
            infos = self._loop.run(self.fleet.open())
            # Versions only ever grow on a sidecar, and one that outlived an earlier run already has some.
            self._first_version = 1 + max(info.policy_version for info in infos)
        except BaseException:
            self.__exit__()
            raise
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._late_timer.cancel()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        rest = list(self._open)
        for call in rest:
            call.cancel()
        for call in rest:
            with suppress(BaseException):  # who began it does not ask any more
                call.result()
        self._loop.run(self.fleet.close())
        self._loop.close()

    def info(self) -> list[Info]:
        """What each sidecar serves. Raises SidecarError, naming the URL, if one does not answer."""

        async def ask() -> list[Info]:
            return list(await asyncio.gather(*(client.info() for client in self._clients)))

        return self._loop.run(ask())

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
        return self._finished(
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
        return self._ended(self._begin(asking)) if interruptible else self._finished(asking)

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
        **options: Any,
    ) -> Groups:
        """Makes `samples` trajectories of each task, and waits for them: `start`, then `Rollout.take`."""
        shared: dict[str, Any] = {"seed": seed, "sampling": sampling, "limits": limits}
        return self.start(tasks, samples=samples, **shared, **options).take()

    def start(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        seed: tuple[int, ...],
        sampling: SamplingParams,
        limits: Limits,
        reward_weights: RewardWeights | None = None,
        wanted: int | None = None,
        quorum: float = 1.0,
        straggler_timeout_s: float = 0.0,
        step: int | None = None,
        on_progress: Progress | None = None,
    ) -> "Rollout":
        """Begins to make `samples` trajectories of each task, and returns at once.

        Their seeds derive from (*seed, task, sample). With `step`, only the policy after that many steps or more will
        do; without, what was pushed last, or whatever the sidecars serve. Without `reward_weights`, rewards are the
        outcome alone. Once `quorum` of a group have ended, the others have `straggler_timeout_s` left: then they are
        aborted, and come back with that status and without tokens. Once `wanted` groups have ended (default: all), the
        other groups are aborted, and do not come back. `on_progress` is called from another thread. Raises
        InterruptedRollout if the run was asked to stop.
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
        wanted = len(groups) if wanted is None else wanted
        enough = Enough(
            groups,
            wanted=wanted,
            quorum=math.ceil(quorum * samples - 1e-9),  # 0.7 * 10 is a little more than 7
            timeout_s=straggler_timeout_s,
        )
        call = self._begin(self._fill(groups, template, enough, wanted * samples, on_progress))
        return Rollout(self, call)

    async def _fill(
        self,
        groups: Sequence[Group],
        template: RolloutRequest,
        enough: Enough,
        wanted: int,
        on_progress: Progress | None,
    ) -> Groups:
        def taken(batch: Batch, group: Group) -> None:
            if on_progress is not None:
                on_progress(min(wanted, sum(len(each.made) for each in groups)), wanted)
            enough.watch(batch, group)

        try:
            await self.fleet.rollout(groups, template, taken=taken)
        finally:
            await enough.end()
        return [_numbered(group.all(), i) for i, group in enumerate(enough.chosen)]

    def _begin(self, call: Coroutine[Any, Any, Answer], *, may_end: bool = True) -> Call[Answer]:
        """Runs it in the background. InterruptedRollout if the run was asked to stop, or CancelledError."""
        if self._late.is_set() or (may_end and self.stop_requested):
            call.close()
            raise InterruptedRollout if may_end else asyncio.CancelledError
        begun = self._loop.begin(call)
        self._open[begun] = may_end
        if self._late.is_set() or (may_end and self.stop_requested):  # since a moment ago
            begun.cancel()
        return begun

    def _ended(self, call: Call[Answer]) -> Answer:
        """What it gives, unless somebody asks the run to stop."""
        try:
            return self._result(call)
        except asyncio.CancelledError:
            raise InterruptedRollout from None

    def _finished(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """What the call gives, also after a signal to end; SidecarError if it then takes too long."""
        try:
            return self._result(self._begin(call, may_end=False))
        except asyncio.CancelledError:
            raise SidecarError(
                f"the sidecars gave no answer within {self._half_grace_s:g} s of the signal to end, half of "
                "checkpoint.grace_s",
                kind="interrupted",
            ) from None

    def _result(self, call: Call[Answer]) -> Answer:
        try:
            return call.result()
        finally:
            if call.done():
                self._open.pop(call, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:  # both came at once
            return
        self.stop_requested = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        self._late_timer.start()
        for call, may_end in list(self._open.items()):
            if may_end:
                call.cancel()

    def _end_calls(self) -> None:
        """Half of the grace period is over."""
        self._late.set()
        for call in list(self._open):
            call.cancel()


class Rollout:
    """Trajectories that are being made."""

    def __init__(self, sidecars: Sidecars, call: Call[Groups]):
        self._sidecars = sidecars
        self._call = call

    def take(self) -> Groups:
        """Waits for all of them. Raises SidecarError, also of what went wrong long ago, or InterruptedRollout."""
        return self._sidecars._ended(self._call)

    def give_up(self) -> None:
        """Aborts what is still under way, and waits until that is done."""
        self._call.cancel()
        with suppress(InterruptedRollout, SidecarError):
            self.take()


def _numbered(group: list[Trajectory], index: int) -> list[Trajectory]:
    """The trajectories of a group, which has another number if groups before it were left out."""
    if all(each.task_index == index for each in group):
        return group
    return [msgspec.structs.replace(each, task_index=index) for each in group]
