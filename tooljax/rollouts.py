"""Asks the sidecars for trajectories, and hands them weights.

Groups go to the sidecars in turn, a whole group to one sidecar, so that its samples share the prompt's prefix. Results
are collated by (task, sample), never by arrival: what the trainer sees does not depend on timing.
"""

import asyncio
import math
import signal
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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
    RolloutSpec,
    SamplingParams,
    Task,
    Trajectory,
    derive_seed,
)
from tooljax.config import Config
from tooljax.config.schema import WeightsConfig
from tooljax.launch import local_sidecar
from tooljax.weights.push import PushReport, WeightSender

Groups = list[list[Trajectory]]
"""Trajectories by task, then by sample."""

Answer = TypeVar("Answer")

Progress = Callable[[int, int], None]
"""Called with how many trajectories are there, and how many are wanted."""


class InterruptedRollout(Exception):
    """Somebody asked the run to stop while trajectories were being made."""


@contextmanager
def open_sidecars(config: Config) -> "Iterator[Sidecars]":
    """The sidecars that a config names, or one started here that ends with the block."""
    timeout_s = config.sidecar.request_timeout_s
    if config.sidecar.urls:
        token = _read_token(config.sidecar.token_file)
        with Sidecars(config.sidecar.urls, token=token, timeout_s=timeout_s) as sidecars:
            yield sidecars
        return
    log = Path(config.run.dir) / "sidecar.log"
    with (
        local_sidecar(config, log_path=log) as (url, token),
        Sidecars([url], token=token, timeout_s=timeout_s) as sidecars,
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

    def __init__(self, urls: Sequence[str], *, token: str | None, timeout_s: float):
        if not urls:
            raise ValueError("no sidecar to ask: set sidecar.urls, or leave it empty to start one")
        self._clients = [SidecarClient(url, token=token, timeout_s=timeout_s) for url in urls]
        self._runner = asyncio.Runner()
        self._task: asyncio.Task | None = None
        self._handlers: dict[int, object] = {}
        self._nonce = uuid.uuid4().hex[:12]
        self._requests = 0
        self._first_version = 0
        self._sender: WeightSender | None = None
        self.stop_requested = False

    def __enter__(self) -> "Sidecars":
        try:
            for client in self._clients:
                self._runner.run(client.__aenter__())
            # Versions only ever grow on a sidecar, and one that outlived an earlier run already has some.
            self._first_version = 1 + max(info.policy_version for info in self.info())
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
        """Sends the weights that the policy has after `step` steps; returns when every sidecar serves them."""
        if self._sender is None:
            self._sender = WeightSender(
                self._clients, mode=weights.mode, part_bytes=weights.part_bytes
            )
        version = self._first_version + step
        return self._runner.run(
            self._sender.push(tensors, version=version, timeout_s=weights.timeout_s)
        )

    def version_of(self, step: int) -> int:
        """What the sidecars call the policy after `step` steps of this run."""
        return self._first_version + step

    def on_each(
        self, ask: Callable[[SidecarClient], Coroutine[Any, Any, Answer]]
    ) -> list[tuple[str, Answer]]:
        """Asks every sidecar at once: its URL and what it answered. Raises SidecarError, or InterruptedRollout."""

        async def ask_all() -> list[tuple[str, Answer]]:
            self._task = asyncio.current_task()
            if self.stop_requested:
                raise asyncio.CancelledError
            async with asyncio.TaskGroup() as group:
                asked = [(c.url, group.create_task(ask(c))) for c in self._clients]
            return [(url, task.result()) for url, task in asked]

        try:
            return self._runner.run(ask_all())
        except asyncio.CancelledError:
            raise InterruptedRollout from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._task = None

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
        without, whatever the sidecars serve. Without `reward_weights`, rewards are the outcome alone. Once `quorum` of
        a group have ended, the others have `straggler_timeout_s` left: then they are aborted, and come back with that
        status and without tokens. Raises SidecarError, or InterruptedRollout.
        """
        self._requests += 1
        shares = [range(k, len(tasks), len(self._clients)) for k in range(len(self._clients))]
        requests = [
            RolloutRequest(
                request_id=f"{self._nonce}.{self._requests}",
                tasks=[tasks[i] for i in share],
                rollouts=[
                    RolloutSpec(task_index=j, sample_index=s, seed=derive_seed(*seed, i, s))
                    for j, i in enumerate(share)
                    for s in range(samples)
                ],
                sampling=sampling,
                limits=limits,
                reward_weights=reward_weights,
                min_policy_version=0 if step is None else self._first_version + step,
            )
            for share in shares
        ]
        made = _Groups(tasks, requests, shares, samples, on_progress)
        enough = math.ceil(quorum * samples - 1e-9)  # 0.7 * 10 is a little more than 7
        self._collect(requests, made, _Stragglers(enough, straggler_timeout_s))
        return made.all()

    def _collect(
        self, requests: Sequence[RolloutRequest], made: "_Groups", stragglers: "_Stragglers"
    ) -> None:
        """Sends each client its request, and takes trajectories as they arrive."""

        async def ask(k: int) -> None:
            try:
                async for trajectory in self._clients[k].rollouts(requests[k]):
                    i = made.add(k, trajectory)
                    stragglers.watch(
                        i, made, partial(self._clients[k].abort, requests[k].request_id)
                    )
            except asyncio.CancelledError:
                # A sidecar that is gone cannot be aborted, and that must not hide why this one is.
                with suppress(SidecarError):
                    await asyncio.shield(self._clients[k].abort(requests[k].request_id))
                raise

        async def ask_all() -> None:
            self._task = asyncio.current_task()
            if self.stop_requested:
                raise asyncio.CancelledError
            try:
                async with asyncio.TaskGroup() as group:
                    for k, request in enumerate(requests):
                        if request.tasks:
                            group.create_task(ask(k))
            finally:
                await stragglers.end()

        try:
            self._runner.run(ask_all())
        except asyncio.CancelledError:
            raise InterruptedRollout from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._task = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class _Groups:
    """Trajectories by task and sample, filled in the order in which they arrive."""

    def __init__(
        self,
        tasks: Sequence[Task],
        requests: Sequence[RolloutRequest],
        shares: Sequence[range],
        samples: int,
        on_progress: Progress | None,
    ):
        self.samples = samples
        self._tasks = tasks
        self._requests = requests
        self._shares = shares
        self._made: list[dict[int, Trajectory]] = [{} for _ in tasks]
        self._given_up: set[tuple[int, int]] = set()
        self._on_progress = on_progress
        self._count = 0

    def add(self, client: int, trajectory: Trajectory) -> int:
        """Takes a trajectory; returns its task."""
        i = self._shares[client][trajectory.task_index]
        # Its number in the request depends on the number of sidecars; its number in `tasks` does not.
        placed = msgspec.structs.replace(trajectory, task_index=i)
        self._made[i][trajectory.sample_index] = placed
        self._count += 1
        if self._on_progress is not None:
            self._on_progress(self._count, len(self._tasks) * self.samples)
        return i

    def ended(self, i: int) -> int:
        """How many samples of a task are there."""
        return len(self._made[i])

    def give_up(self, i: int) -> list[int]:
        """Waits no longer for the samples of a task that are missing; their positions in their request."""
        missing = [s for s in range(self.samples) if s not in self._made[i]]
        self._given_up.update((i, s) for s in missing)
        return [self._position(i, s)[1] for s in missing]

    def all(self) -> Groups:
        """Every trajectory, with empty ones in place of those that were given up."""
        return [
            [group.get(s) or self._aborted(i, s) for s in range(self.samples)]
            for i, group in enumerate(self._made)
        ]

    def _position(self, i: int, sample: int) -> tuple[int, int]:
        """Which client's request it is in, and where: tasks are dealt out in turn, each with all its samples."""
        client = i % len(self._shares)
        return client, self._shares[client].index(i) * self.samples + sample

    def _aborted(self, i: int, sample: int) -> Trajectory:
        if (i, sample) not in self._given_up:
            raise RuntimeError(
                "a sidecar ended the stream early: somebody else aborted the request"
            )
        client, ordinal = self._position(i, sample)
        return Trajectory(
            task_index=i,
            sample_index=sample,
            task_id=self._tasks[i].task_id,
            data_source=self._tasks[i].data_source,
            seed=self._requests[client].rollouts[ordinal].seed,
            status="aborted",
            error="still under way when its group had a quorum and the time of stragglers was over",
            messages=self._tasks[i].messages,
        )


class _Stragglers:
    """Aborts what is still under way some time after enough of its group have ended."""

    def __init__(self, enough: int, timeout_s: float):
        self._enough = enough
        self._timeout_s = timeout_s
        self._aborting: dict[int, asyncio.Task[None]] = {}

    def watch(
        self, i: int, made: _Groups, abort: Callable[[list[int]], Coroutine[None, None, None]]
    ) -> None:
        """To be called when a trajectory of group i has come."""
        if self._enough <= made.ended(i) < made.samples and i not in self._aborting:
            self._aborting[i] = asyncio.create_task(self._abort_late(i, made, abort))

    async def end(self) -> None:
        """Nobody is waited for any longer."""
        for task in self._aborting.values():
            task.cancel()
        await asyncio.gather(*self._aborting.values(), return_exceptions=True)

    async def _abort_late(
        self, i: int, made: _Groups, abort: Callable[[list[int]], Coroutine[None, None, None]]
    ) -> None:
        await asyncio.sleep(self._timeout_s)
        if late := made.give_up(i):
            with suppress(SidecarError):  # whoever reads the stream will notice
                await abort(late)
