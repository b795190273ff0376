"""One batch of rollouts: handed out in small pieces as replicas have room, and asked for again where it was lost.

A piece is one group, or several small ones, and goes to one replica as a whole: samples of a prompt share its prefix.
Which replica does what depends on timing; what comes back does not: seeds come with the request, and results are put
where they belong.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from rollout_sidecar.client import SidecarError
from rollout_sidecar.protocol import RolloutRequest, Trajectory
from tooljax.fleet.groups import Group, Piece
from tooljax.fleet.replica import Replica

if TYPE_CHECKING:
    from tooljax.fleet.fleet import Fleet

PIECE_TRAJECTORIES = 8
"""Groups of fewer trajectories share a request, as long as there are enough requests for everybody."""
PIECES_EACH = 4
"""Requests for each replica, at least, before groups share one."""
MAX_FRUITLESS = 8
"""A group whose requests are lost so often, one after the other and without anything new, is lost itself."""
POLL_S = 1.0
"""Time between two looks at what no event tells: how long there has been no replica."""

Taken = Callable[["Batch", Group], None]
"""Called with every group to which a trajectory has come."""

log = logging.getLogger("tooljax")


class Batch:
    """Groups that are being filled."""

    def __init__(
        self, fleet: "Fleet", groups: Sequence[Group], template: RolloutRequest, taken: Taken
    ):
        self._fleet = fleet
        self._template = msgspec.structs.replace(template, progress=True)
        self._taken = taken
        self._waiting = deque(groups)
        self._playing: dict[asyncio.Task[None], Piece] = {}
        self.unfinished: list[Replica] = []
        """Who had been asked for something that had not come when the batch ended."""
        self.changed = asyncio.Event()
        """Set whenever a replica is lost or comes back, or has room, or a trajectory has come."""
        self._requests = 0
        samples = max((len(group.seeds) for group in groups), default=1)
        self._share = max(
            1,
            min(
                math.ceil(PIECE_TRAJECTORIES / samples),
                len(groups) // (PIECES_EACH * len(fleet.replicas)),
            ),
        )

    async def run(self) -> None:
        """Returns when every sample is there or given up. Raises SidecarError; then nothing of the batch runs on."""
        begun = time.monotonic()
        try:
            while self._waiting or self._playing:
                self.changed.clear()
                self._fleet.check_hope(begun)
                self._hand_out()
                if self._playing or self._waiting:
                    await self._next_event()
                self._look_at_ended()
        finally:
            await self._stop()

    @property
    def waits(self) -> bool:
        """Whether some group waits for room."""
        return any(group.missing for group in self._waiting)

    async def drop(self, group: Group) -> None:
        """Gives up what is missing of a group. Nobody waits until its tools are released, unless something else of the
        request is missing."""
        late, piece = group.give_up(), group.piece
        self._fleet.tell()
        if piece is None or not late:
            return
        for sample in late:
            piece.settle(group, sample)
        if piece.settled:
            self._leave(piece)
            return
        try:
            await piece.replica.client.abort(piece.request_id, piece.positions(group, late))
        except SidecarError as error:
            log.info("%s goes on with what nobody waits for: %s", piece.replica.url, error)
        self._fleet.tell()

    def _leave(self, piece: Piece) -> None:
        """Ends a request that has nothing more to bring, in the background."""
        for task in [task for task, playing in self._playing.items() if playing is piece]:
            del self._playing[task]
            task.cancel()
        piece.end()
        self._fleet.tell()

    async def _next_event(self) -> None:
        waking = asyncio.create_task(self.changed.wait())
        try:
            await asyncio.wait(
                {waking, *self._playing}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waking.cancel()

    # --- giving ---

    def _hand_out(self) -> None:
        """Gives out pieces as long as somebody has room."""
        waited, self._waiting = self.waits, deque(g for g in self._waiting if g.missing)
        while self._waiting and self._fleet.has_turn(self):
            first = self._waiting[0]
            replica = self._fleet.choose(len(first.missing), first.home)
            if replica is None:
                return
            groups = [self._waiting.popleft()]
            while (
                len(groups) < self._share
                and self._waiting
                and self._waiting[0].home is first.home
                and not self._waiting[0].asked
            ):
                groups.append(self._waiting.popleft())
            self._give(groups, replica)
        if waited and not self._waiting:
            self._fleet.tell()  # it is the turn of younger batches

    def _give(self, groups: Sequence[Group], replica: Replica) -> None:
        self._requests += 1
        piece = Piece(f"{self._template.request_id}.{self._requests}", groups, replica)
        for group, sample in piece.samples:
            if sample in group.asked:
                self._fleet.count_again(resumed=sample in group.partials)
            group.asked.add(sample)
        task = asyncio.create_task(self._play(piece))
        self._playing[task] = piece
        replica.add(task)

    # --- taking ---

    async def _play(self, piece: Piece) -> None:
        """Takes what comes. Raises SidecarError; cancelled when the replica is left out, or the batch ends."""
        replica, request = piece.replica, piece.request(self._template)
        try:
            answer = replica.client.rollouts(request, piece.note, instance=replica.instance)
            async with aclosing(answer) as trajectories:
                async for trajectory in trajectories:
                    await self._check(replica, trajectory)
                    group = piece.take(trajectory)
                    replica.proved()
                    if group is not None:
                        self._taken(self, group)
                    if piece.settled and any(each.given_up for each in piece.groups):
                        self._leave(piece)  # it would last until their tools are released
                    self._fleet.tell()
        except SidecarError:
            replica.leftovers.add(piece.request_id)
            raise
        except asyncio.CancelledError:
            await replica.abort(piece.request_id)
            raise

    async def _check(self, replica: Replica, trajectory: Trajectory) -> None:
        """Raises SidecarError if a trajectory ended because its sidecar failed, and not by itself."""
        if trajectory.status == "aborted":  # nobody here has asked for that
            why = await replica.look(None)
            raise why or SidecarError(f"{replica.url} aborted a trajectory", kind="aborted")
        if trajectory.status == "engine_error" and (why := await replica.look(None)):
            raise why

    def _look_at_ended(self) -> None:
        """Takes note of the requests that are over; raises SidecarError for one that nobody will do."""
        for task in [task for task in self._playing if task.done()]:
            piece = self._playing.pop(task)
            piece.end()
            error = None if task.cancelled() else task.exception()
            if isinstance(error, SidecarError):
                if not self._fleet.is_its_own_fault(error, self._template.min_policy_version):
                    raise error
                piece.replica.lose(error)
            elif error is not None:
                raise error
            self._ask_again(piece, error)

    def _ask_again(self, piece: Piece, error: BaseException | None) -> None:
        """Puts what is missing of a piece in front of what waits."""
        for group in reversed(piece.groups):
            group.fruitless = 0 if piece.news else group.fruitless + 1
            if group.fruitless >= MAX_FRUITLESS:
                why = f"its sidecar failed {MAX_FRUITLESS} times in a row: {error or piece.replica.why}"
                for sample in group.missing:
                    group.made[sample] = group.lost(sample, why)
                self._taken(self, group)
            elif group.missing:
                self._waiting.appendleft(group)

    async def _stop(self) -> None:
        """Ends what still runs, also in the sidecars."""
        self.unfinished = list(dict.fromkeys(piece.replica for piece in self._playing.values()))
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        for piece in self._playing.values():
            piece.end()
        self._playing = {}
