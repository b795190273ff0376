"""What was opened for a trajectory and must be closed again: instances of tools, conversations with an interaction.

Each is a `Lease`. It is closed exactly once by the trajectory that opened it, also if that was cancelled while the
opening was still under way. One whose opening failed is closed only if it was told what to close then. Where that
cannot be done in time (the opening does not end, the closing hangs) or the trajectory is gone, the lease stays in the
book, and the reaper closes it: at a period, and when the sidecar stops.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rollout_sidecar.eager import start_task
from rollout_sidecar.errors import DeadlineError, RolloutError, ToolError, boundary
from rollout_sidecar.foreign import begin, bounded, ends_within, leave

T = TypeVar("T")

END_TIMEOUT_S = 10.0
"""How long a closing, and an opening that is being abandoned, may take."""

END_GRACE_S = 0.5
"""How long an opening that was cancelled may take to end, before it is closed all the same."""

REAP_ATTEMPTS = 3
"""How often the reaper tries to close what hangs, before it gives it up as leaked."""

_log = logging.getLogger(__name__)


class Lease(Generic[T]):
    """Something that is being opened, is open, or was closed. Made by `Leases.open`."""

    def __init__(
        self,
        book: "Leases",
        opening: asyncio.Task[T],
        close: Callable[[T], Coroutine[Any, Any, None]],
        failed: Callable[[RolloutError], None],
        owner: object,
        otherwise: T | None = None,
    ):
        self.opening = opening
        self.abandoned = False
        """Its owner could not close it in time."""
        self.attempts = 0
        self._book = book
        self._close = close
        self._failed = failed
        self._owner = weakref.ref(owner)
        self._otherwise = otherwise
        self._ending: asyncio.Task[None] | None = None

    @property
    def orphaned(self) -> bool:
        """Nobody but the reaper will close it."""
        return self.abandoned or (self._owner() is None and self._ending is None)

    async def opened(self, timeout_s: float) -> T:
        """What was opened. Raises what the opening raised, or DeadlineError; then it still has to be closed."""
        if not await ends_within(self.opening, timeout_s):
            raise DeadlineError(f"gave no answer within {timeout_s:g} s")
        if self.opening.cancelled():  # by itself: it must not look like the owner's cancellation
            raise ToolError("it was cancelled")
        return self.opening.result()

    async def end(self, patience_s: float = END_TIMEOUT_S) -> None:
        """Closes it, once however often this is called. Never raises; goes on if the caller is cancelled.

        Args:
            patience_s: how long an opening that is still under way is waited for.
        """
        if self._ending is None:
            self._ending = start_task(self._end(min(patience_s, END_TIMEOUT_S)))
        await asyncio.shield(self._ending)

    async def _end(self, patience_s: float) -> None:
        if not await ends_within(self.opening, patience_s):
            leave(self.opening, late=True)
            if self._otherwise is not None:
                await ends_within(self.opening, END_GRACE_S)
            elif not self.opening.done():
                self.abandoned = True
                return
        await self.close()

    async def close(self) -> None:
        """One attempt to close what was opened, if anything was."""
        opened = self._opened()
        if opened is None:
            self._book.forget(self)
            return
        try:
            with boundary(RolloutError):
                await bounded(self._close(opened), END_TIMEOUT_S)
        except DeadlineError as error:
            self.abandoned = True
            self._failed(error)
            return
        except RolloutError as error:
            self._failed(error)
        self._book.forget(self)

    def has_to_close(self) -> bool:
        """There is something to close."""
        return self._opened() is not None

    def _opened(self) -> T | None:
        """What there is to close."""
        opening = self.opening
        if not opening.done() or opening.cancelled() or opening.exception() is not None:
            return self._otherwise
        return self.opening.result()


class Leases:
    """The book of all leases of a sidecar, and the reaper."""

    def __init__(self):
        """Nothing is open."""
        self.reaped = 0
        """Closed by the reaper."""
        self.leaked = 0
        """Given up on."""
        self._open: set[Lease[Any]] = set()

    @property
    def live(self) -> int:
        """How many are being opened, open, or being closed."""
        return len(self._open)

    def open(
        self,
        opening: Coroutine[Any, Any, T],
        close: Callable[[T], Coroutine[Any, Any, None]],
        *,
        failed: Callable[[RolloutError], None],
        owner: object,
        otherwise: T | None = None,
    ) -> Lease[T]:
        """Begins to open something.

        Args:
            opening: opens it.
            close: closes what `opening` returned. It must not hold on to the owner.
            failed: told why a closing failed.
            owner: whoever will close it; if it goes away without, the reaper does.
            otherwise: what `close` is given if the opening failed, was cancelled or hangs; None: it is not called.
        """
        lease = Lease(self, begin(opening), close, failed, owner, otherwise)
        self._open.add(lease)
        return lease

    def forget(self, lease: Lease[Any]) -> None:
        """Strikes a lease that is closed, or was never opened."""
        self._open.discard(lease)

    async def sweep(self) -> int:
        """Closes what nobody else will; how many that were."""
        before = self.reaped
        await asyncio.gather(*(self._reap(lease) for lease in list(self._open) if lease.orphaned))
        return self.reaped - before

    async def reap(self, period_s: float) -> None:
        """Sweeps at a period, until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            if reaped := await self.sweep():
                _log.warning("closed %d instances whose trajectories are gone", reaped)

    async def _reap(self, lease: Lease[Any]) -> None:
        if not lease.opening.done():
            if not lease.has_to_close():  # there is nothing to close, until it ends
                return
            leave(lease.opening)
        opened = lease.has_to_close()
        lease.attempts += 1
        await lease.close()
        if lease not in self._open:
            self.reaped += opened
        elif lease.attempts >= REAP_ATTEMPTS:
            self.forget(lease)
            self.leaked += 1
            _log.error("an instance could not be closed in %d attempts, and is left", REAP_ATTEMPTS)
