"""Every sidecar of a run: who can be used, who does what, and who serves which weights.

A sidecar that fails is left out at once: what it was asked for goes to others, from the last finished turn of each
trajectory. It is looked at in the background while rollouts are under way, and before every push, and is used again
when it serves exactly the weights that were pushed last; they are pushed to it again if it has lost them. With no
sidecar left the run waits for one, for down_timeout_s.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import jax

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import Info, RolloutRequest
from tooljax.config.schema import WeightsConfig
from tooljax.fleet.batch import Batch, Taken
from tooljax.fleet.groups import Group
from tooljax.fleet.replica import HEALTH_PERIOD_S, HEALTH_TIMEOUT_S, MISSES, Replica
from tooljax.weights.push import InFlight, PushError, PushReport, Send, WeightSender

Answer = TypeVar("Answer")

REFUSED = (400, 409, 413)
"""HTTP statuses of what no sidecar would take: asking another one is in vain."""

CLOSE_S = 5.0
"""How long a run that ends waits for the tools of what it has aborted."""

log = logging.getLogger("tooljax")


class Fleet:
    """All replicas. Everything is called from one event loop; `open` comes first."""

    def __init__(
        self,
        clients: Sequence[SidecarClient],
        *,
        timeout_s: float,
        down_timeout_s: float,
    ):
        """Nothing is asked yet.

        Args:
            timeout_s: how long one batch of rollouts may take.
            down_timeout_s: how long to wait, with no replica left, for one to come back.
        """
        self.replicas = [Replica(client) for client in clients]
        self.version: int | None = None
        """Of the weights that were pushed last."""
        self.period_s = HEALTH_PERIOD_S
        """Between two looks at a replica."""
        self.resumed = self.restarted = 0
        """Trajectories that went on in another sidecar, and that began again, so far."""
        self._content_hash = ""
        self._sender: WeightSender | None = None
        self._push_timeout_s = timeout_s
        self._timeout_s = timeout_s
        self._down_timeout_s = down_timeout_s
        self._batches: list[Batch] = []
        """Under way, the oldest first."""
        self._watching: list[asyncio.Task[None]] = []
        self._pushing = False

    async def open(self) -> list[Info]:
        """What every sidecar says. All must answer: SidecarError names the one that does not; ValueError names two URLs
        of the same one."""
        infos = await asyncio.gather(*(replica.client.info() for replica in self.replicas))
        urls: dict[str, str] = {}
        for replica, info in zip(self.replicas, infos, strict=True):
            other = urls.setdefault(info.instance or replica.url, replica.url)
            if other is not replica.url:
                raise ValueError(
                    f"{other} and {replica.url} are the same sidecar; name it once in sidecar.urls"
                )
            replica.accept(info)
        return list(infos)

    async def close(self) -> None:
        """Waits, within a bound, for what is being ended in the background, then closes the connections. Nothing may be
        under way."""
        await asyncio.gather(*(replica.rest(CLOSE_S) for replica in self.replicas))
        for replica in self.replicas:
            await replica.client.__aexit__(None, None, None)

    @property
    def live(self) -> list[Replica]:
        """Those that work can be given to."""
        return [replica for replica in self.replicas if replica.live]

    def metrics(self) -> dict[str, float]:
        """What a step logs: of now, and since the run began."""
        return {
            "fleet/live": float(len(self.live)),
            "fleet/capacity": float(sum(replica.capacity for replica in self.live)),
            "fleet/resumed": float(self.resumed),
            "fleet/restarted": float(self.restarted),
        }

    # --- rollouts ---

    async def rollout(
        self, groups: Sequence[Group], template: RolloutRequest, *, taken: Taken
    ) -> None:
        """Fills every group. SidecarError if that takes too long, if no sidecar is left, or if one refuses the request.
        Several batches may be under way; a younger one is given what room an older one leaves.

        Args:
            template: what holds of every request: sampling, limits and so on; its request_id is the batch's.
            taken: called with each trajectory that arrives.
        """
        batch = Batch(self, groups, template, taken)
        try:
            async with self._under_way(batch), asyncio.timeout(self._timeout_s):
                await batch.run()
        except TimeoutError as error:
            busy = batch.unfinished or self.replicas
            left_out = (
                f" (left out: {self._reasons()})" if len(self.live) < len(self.replicas) else ""
            )
            raise SidecarError(
                f"{', '.join(replica.url for replica in busy)} did not finish within {self._timeout_s:g} s{left_out};"
                " look at the sidecar's log, or raise sidecar.request_timeout_s",
                kind="timeout",
            ) from error

    def tell(self) -> None:
        """A replica is lost, or is back, or has room: every batch looks what it can do."""
        for batch in self._batches:
            batch.changed.set()

    def has_turn(self, batch: Batch) -> bool:
        """Whether no older batch waits for room."""
        return not any(older.waits for older in self._batches[: self._batches.index(batch)])

    def choose(self, more: int, home: Replica | None) -> Replica | None:
        """Who takes `more` trajectories: `home` if it can, else the least busy. None if nobody has room."""
        room = [r for r in self.replicas if r.live and r.outstanding < r.capacity]
        if home in room:
            return home
        return min(room, key=lambda replica: replica.load(more), default=None)

    def check_hope(self, begun: float) -> None:
        """SidecarError once no replica could be used for too long, while somebody who began then waited for one."""
        if self.live:
            return
        since = max(begun, *(replica.lost_at for replica in self.replicas))
        if time.monotonic() - since >= self._down_timeout_s:
            raise SidecarError(
                f"no sidecar could be used for {self._down_timeout_s:g} s (sidecar.down_timeout_s):"
                f" {self._reasons()}",
                kind="no_sidecar",
            )

    def _reasons(self) -> str:
        return "; ".join(replica.why for replica in self.replicas if not replica.live)

    def is_its_own_fault(self, error: SidecarError, min_version: int) -> bool:
        """Whether the sidecar failed, and not what it was asked: another one may do it."""
        if (
            error.kind == "policy_version"
        ):  # it has lost what was pushed, unless nothing so new ever was
            return self.version is not None and min_version <= self.version
        return error.status not in REFUSED

    async def on_each(
        self, ask: Callable[[SidecarClient], Awaitable[Answer]]
    ) -> list[tuple[str, Answer]]:
        """Asks every replica that can be used, at once: its URL and what it answered. One that fails is left out.

        SidecarError if it is not its own fault, or if nobody answers.
        """
        live = self.live
        answers = await asyncio.gather(*(ask(r.client) for r in live), return_exceptions=True)
        answered = []
        for replica, answer in zip(live, answers, strict=True):
            if isinstance(answer, SidecarError) and self.is_its_own_fault(answer, 0):
                replica.lose(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answered.append((replica.url, answer))
        if not answered:
            raise SidecarError(f"no sidecar answered: {self._reasons()}", kind="no_sidecar")
        return answered

    # --- health ---

    @asynccontextmanager
    async def _under_way(self, batch: Batch) -> AsyncIterator[None]:
        """Looks after every replica in the background, as long as there is a batch."""
        self._batches.append(batch)
        self._watch_all()
        try:
            yield
        finally:
            self._batches.remove(batch)
            if not self._batches:
                await self._rest()

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncIterator[None]:
        """Nobody looks during a push: it would find other versions here and there, and send the old one again."""
        self._pushing = True
        await self._rest()
        try:
            yield
        finally:
            self._pushing = False
            if self._batches:
                self._watch_all()

    def _watch_all(self) -> None:
        if not self._watching and not self._pushing:
            self._watching = [asyncio.create_task(self._watch(each)) for each in self.replicas]

    async def _rest(self) -> None:
        watching, self._watching = self._watching, []
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        while True:
            await replica.next_look(self.period_s)
            if replica.live:
                why = await replica.look(self.version)
                replica.misses = replica.misses + 1 if why else 0
                if why and replica.misses >= MISSES:
                    replica.lose(why)
            elif why := await self._revived(replica):
                replica.why = str(why)
            self.tell()

    async def _revived(self, replica: Replica) -> SidecarError | None:
        """Brings a replica back if it can be used, or can be made so; else says why not."""
        try:
            info = await replica.within(HEALTH_TIMEOUT_S, replica.client.info(retries=0))
            replica.check_same(info)
            await replica.abort_leftovers()
            if self.version is not None and not self._serves(info):
                await self._catch_up(replica)
            elif self.version is None and not replica.serves_as_before(info):
                raise SidecarError(
                    f"{replica.url} was started again with other weights", kind="other_weights"
                )
            if why := await replica.look(self.version):
                return why
        except SidecarError as error:
            return error
        replica.accept(info)
        return None

    def _serves(self, info: Info) -> bool:
        return (info.policy_version, info.content_hash) == (self.version, self._content_hash)

    # --- weights ---

    async def push(
        self,
        tensors: Iterable[tuple[str, jax.Array]],
        *,
        version: int,
        weights: WeightsConfig,
        in_flight: InFlight = "continue",
    ) -> PushReport:
        """Returns when every replica that can be used serves exactly these weights; one that cannot take them now gets
        them before it is used again.

        PushError if one refuses them, or if no sidecar can be used for too long.
        """
        if self._sender is None:
            self._sender = WeightSender(
                [r.client for r in self.replicas], mode=weights.mode, part_bytes=weights.part_bytes
            )
        self._push_timeout_s = weights.timeout_s
        async with self._undisturbed():
            report = await self._sender.push(
                tensors,
                version=version,
                timeout_s=weights.timeout_s,
                in_flight=in_flight,
                deliver=self._deliver,
            )
            self.version, self._content_hash = version, report.content_hash
        self.tell()  # who was left out may have come back
        return report

    async def _deliver(self, send: Send) -> int:
        """Sends a push to everybody who is there, until at least one has it."""
        begun = time.monotonic()
        while True:
            answers = await asyncio.gather(*map(self._answers, self.replicas))
            there = [r for r, answer in zip(self.replicas, answers, strict=True) if answer]
            sent = await asyncio.gather(*(self._send_to(replica, send) for replica in there))
            if refusals := [str(result) for result in sent if isinstance(result, SidecarError)]:
                count = len(there) - len(refusals)
                raise PushError(
                    f"the weights reached {count} of {len(self.replicas)} sidecars: {'; '.join(refusals)}"
                )
            if any(result is not None for result in sent):
                return sum(result is True for result in sent)
            try:
                self.check_hope(begun)
            except SidecarError as error:
                raise PushError(str(error)) from error
            await asyncio.sleep(min(self.period_s, self._down_timeout_s))

    async def _answers(self, replica: Replica) -> bool:
        """Whether a push is worth trying. Those that were left out are asked first."""
        if not replica.live:
            try:
                info = await replica.within(HEALTH_TIMEOUT_S, replica.client.info(retries=0))
                replica.check_same(info)
            except SidecarError as error:
                replica.why = str(error)
                return False
        return True

    async def _send_to(self, replica: Replica, send: Send) -> bool | None | SidecarError:
        """What `send` gives; None if the replica is left out, and the error if it refuses what it got."""
        was_live = replica.live
        try:
            await replica.abort_leftovers()  # else a push that lets them finish would wait for them
            if not was_live:  # it may have been lost while its memory was released
                await self._in_push_time(replica, replica.client.resume_engine())
            resent = await self._in_push_time(replica, send(replica.client))
            info = await replica.within(HEALTH_TIMEOUT_S, replica.client.info())
        except SidecarError as error:
            if was_live and error.status and error.status < 500:
                return error
            replica.lose(error)
            replica.why = str(error)
            return None
        replica.accept(info)
        return resent

    async def _catch_up(self, replica: Replica) -> None:
        """Sends a replica what was pushed last."""
        if self._sender is None:
            return
        log.warning("%s gets the weights of version %s again", replica.url, self.version)
        await self._in_push_time(replica, replica.client.resume_engine())
        await self._in_push_time(replica, self._sender.catch_up(replica.client))

    async def _in_push_time(self, replica: Replica, push: Awaitable[Answer]) -> Answer:
        setting = " (weights.timeout_s); the push took too long"
        return await replica.within(self._push_timeout_s, push, setting)

    def count_again(self, *, resumed: bool) -> None:
        """A trajectory is asked for again: from a finished turn, or from its prompt."""
        self.resumed += resumed
        self.restarted += not resumed
