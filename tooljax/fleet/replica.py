"""One sidecar as the fleet sees it: whether it can be used, how busy it is, and what to do when it is back."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import Info

T = TypeVar("T")

HEALTH_PERIOD_S = 5.0
"""Between two looks at a replica while rollouts are under way."""
HEALTH_TIMEOUT_S = 10.0
"""How long it may take to answer one."""
AGAIN_S = 0.5
"""Between two looks at one that has just missed one."""
MISSES = 2
"""Looks in a row that must fail before a replica that seemed sound is left out."""
ABORT_S = 30.0
"""How long it may take to abort a request; its tools are released first."""

log = logging.getLogger("tooljax")


class Replica:
    """A sidecar behind its client."""

    def __init__(self, client: SidecarClient):
        self.client = client
        self.live = True
        """Work may be given to it."""
        self.why = ""
        """Why not."""
        self.lost_at = 0.0
        """When it was left out, on the clock of time.monotonic."""
        self.outstanding = 0
        """Trajectories that it was asked for and has not sent."""
        self.leftovers: set[str] = set()
        """Requests that may still run there, and that nobody waits for."""
        self.info: Info | None = None
        """What it said last; None before it was asked."""
        self.misses = 0
        self._aborting: set[str] = set()
        """Requests that are being ended there at this moment."""
        self._failures = 0
        self._pieces: set[asyncio.Task[None]] = set()
        self._looked = time.monotonic()
        self._call = asyncio.Event()
        client.on_lost = self._call.set

    @property
    def url(self) -> str:
        """Where it is."""
        return self.client.url

    @property
    def instance(self) -> str:
        """Its name for itself, another one after every start."""
        return self.info.instance if self.info else ""

    @property
    def capacity(self) -> int:
        """Trajectories that it generates at once."""
        return max(1, self.info.max_concurrent if self.info else 1)

    def load(self, more: int) -> float:
        """How busy it would be with `more` trajectories, in units of its capacity."""
        return (self.outstanding + more) / self.capacity

    # --- work ---

    def add(self, task: "asyncio.Task[None]") -> None:
        """A request that ends when the replica is left out."""
        self._pieces.add(task)
        task.add_done_callback(self._pieces.discard)

    async def rest(self, timeout_s: float) -> None:
        """Returns when nothing that it was asked for is being ended any more, or after so long; then that is given
        up."""
        if ending := set(self._pieces):
            _, late = await asyncio.wait(ending, timeout=timeout_s)
            for task in late:
                task.cancel()

    def proved(self) -> None:
        """It has done what it was asked for."""
        self._failures = 0

    def lose(self, why: object) -> None:
        """Leaves it out; what it was asked for is cancelled, except by the one who calls this. It is looked at soon."""
        if not self.live:
            return
        self.live, self.why, self.lost_at = False, str(why), time.monotonic()
        self._failures += 1
        log.warning("left out: %s", self.why)
        for task in self._pieces - {asyncio.current_task()}:
            task.cancel()
        self._call.set()

    def accept(self, info: Info) -> None:
        """It can be used again."""
        if not self.live:
            log.warning("%s is back", self.url)
        self.live, self.why, self.info, self.misses = True, "", info, 0

    def check_same(self, info: Info) -> None:
        """SidecarError if it is not what it was when the run began."""
        if self.info is not None and info.vocab_hash != self.info.vocab_hash:
            raise SidecarError(
                f"{self.url} serves {info.model} now, with another vocabulary than before",
                kind="other_model",
            )

    def serves_as_before(self, info: Info) -> bool:
        """Whether it serves the weights that it served when it was last used."""
        before = self.info
        return before is not None and (info.policy_version, info.content_hash) == (
            before.policy_version,
            before.content_hash,
        )

    # --- health ---

    async def next_look(self, period_s: float) -> None:
        """Returns when it is time to look: after a period, or soon after something went wrong there, later the oftener
        it was left out."""
        period_s = min(period_s, AGAIN_S) if self.misses else period_s
        # Since the last look, also where nobody waited for the next one in between.
        left_s = self._looked + period_s - time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left_s)):
                await self._call.wait()
                await asyncio.sleep(min(period_s, 0.01 * 4**self._failures))
        self._call.clear()
        self._looked = time.monotonic()

    async def look(self, version: int | None) -> SidecarError | None:
        """Why no rollout can start there now (of that version), None if one can. Takes HEALTH_TIMEOUT_S at most."""
        try:
            return await self.within(HEALTH_TIMEOUT_S, self.client.unready(version))
        except SidecarError as error:
            return error

    async def within(self, timeout_s: float, call: Awaitable[T], hint: str = "") -> T:
        """What the call gives; SidecarError if it takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError as error:
            raise SidecarError(
                f"{self.url} gave no answer within {timeout_s:g} s{hint}", kind="timeout"
            ) from error

    async def abort(self, request_id: str) -> None:
        """Ends a request there; where that fails, it is left for later."""
        self.leftovers.add(request_id)
        if not self.live:
            return
        self._aborting.add(request_id)
        try:
            with suppress(SidecarError):
                await self.within(ABORT_S, self.client.abort(request_id))
                self.leftovers.discard(request_id)
        finally:
            self._aborting.discard(request_id)

    async def abort_leftovers(self) -> None:
        """Ends what still runs there from before it was lost."""
        for request_id in self.leftovers - self._aborting:
            await self.within(ABORT_S, self.client.abort(request_id))
            self.leftovers.discard(request_id)
