"""Which trajectory has which session with a server.

Three ways (`session` in the tool's config):
    trajectory  a session for each trajectory, opened at its first call and closed when it ends, so that what the server
                remembers lasts for the trajectory and is seen by nobody else. Over stdio that is a process for each.
    run         one session for all.
    call        a session for each call, as in verl.
All tools of a server share these sessions.
"""

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import mcp_types

from rollout_sidecar.errors import DeadlineError
from rollout_sidecar.tools.mcp.connection import ConnectionLost, McpConnection, ServerUnavailable
from rollout_sidecar.tools.mcp.entry import SessionOptions
from rollout_sidecar.tools.mcp.servers import McpServer

_log = logging.getLogger(__name__)


@dataclass
class CallStats:
    """What a call took besides the call."""

    connect_s: float = 0.0
    reconnects: int = 0


@dataclass(eq=False)
class _Slot:
    """A trajectory's place. Its connection comes with the first call."""

    users: int = 0
    connection: McpConnection | None = None
    calls: int = 0
    last_used: float = field(default_factory=time.monotonic)


class SessionPool:
    """The sessions with one server. Everything in it belongs to one event loop."""

    def __init__(self, server: McpServer, options: SessionOptions):
        """Nothing is opened before the first call, or `start`."""
        self.server = server
        self.options = options
        self._slots: dict[str, _Slot] = {}
        self._run_slot = _Slot()
        self._known: dict[str, str] = {}
        self._complained = False
        self._places = asyncio.Semaphore(options.max_sessions)
        # More processes than cores that start at once only make each other late.
        self._starts = asyncio.Semaphore(max(4, os.cpu_count() or 1))
        self._warm: list[McpConnection] = []
        self._tasks: set[asyncio.Task] = set()
        self._reaper: asyncio.Task | None = None
        self._starters = 0

    async def start(self) -> None:
        """Called once by each tool. The first opens what is to be open before the first call. Raises
        ServerUnavailable."""
        self._starters += 1
        if self._starters > 1:
            return
        self._reaper = asyncio.create_task(self._reap())
        try:
            if self.options.scope == "run":
                await self._opened(self._run_slot, self.options.connect_timeout_s, CallStats())
            elif self.options.scope == "trajectory":
                self._warm = [self._new_connection() for _ in range(self.options.prestart)]
                await asyncio.gather(*(connection.open() for connection in self._warm))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Called once by each tool. The last closes everything."""
        self._starters -= 1
        if self._starters > 0:
            return
        self._starters = 0
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.cancel()
            await asyncio.wait({reaper})
        slots = [*self._slots.values(), self._run_slot]
        connections = [slot.connection for slot in slots if slot.connection is not None]
        connections += self._warm
        self._slots, self._run_slot, self._warm = {}, _Slot(), []
        await asyncio.gather(*(connection.close() for connection in connections))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def acquire(self, key: str) -> None:
        """A tool begins to be used under this key: by a trajectory, that is."""
        self._slots.setdefault(key, _Slot()).users += 1

    async def release(self, key: str) -> None:
        """A tool ends being used; with the last one the session is closed."""
        slot = self._slots.get(key)
        if slot is None:
            return
        slot.users -= 1
        if slot.users <= 0:
            del self._slots[key]
            await self._close(slot)

    @property
    def live(self) -> int:
        """Sessions that are open or opening, those waiting for a trajectory included."""
        slots = [*self._slots.values(), self._run_slot]
        connections = [slot.connection for slot in slots if slot.connection is not None]
        return sum(connection.alive for connection in [*connections, *self._warm])

    async def call(
        self, key: str, name: str, arguments: dict[str, Any], *, timeout_s: float, retry: bool
    ) -> tuple[mcp_types.CallToolResult, CallStats]:
        """Calls a tool in the key's session.

        A session that was lost is opened again, and the call made again if it did not run, or if `retry` says that
        running twice does no harm. Raises what McpConnection.open and .call raise.
        """
        stats = CallStats()
        slot = self._slot(key)
        slot.calls += 1
        try:
            while True:
                connection = await self._opened(slot, timeout_s, stats)
                try:
                    return await connection.call(name, arguments, timeout_s), stats
                except ConnectionLost as error:
                    _log.info("%s", error.detail)
                    if stats.reconnects or (error.may_have_run and not retry):
                        raise
                    stats.reconnects += 1
        finally:
            slot.calls -= 1
            slot.last_used = time.monotonic()
            if self.options.scope == "call":
                self._background(self._close(slot))

    # --- connections --------------------------------------------------------------------------------------------

    def _slot(self, key: str) -> _Slot:
        if self.options.scope == "call":
            return _Slot()
        if self.options.scope == "run":
            return self._run_slot
        return self._slots.setdefault(key, _Slot(users=1))

    async def _opened(self, slot: _Slot, timeout_s: float, stats: CallStats) -> McpConnection:
        connection = slot.connection
        if connection is not None and connection.alive and connection.suspect:
            if not await connection.answers():
                _log.info("%s: no answer to a ping; the session is replaced", self.server)
                if slot.connection is connection:  # nobody else was faster
                    slot.connection = None
                    self._background(connection.retire())
        connection = slot.connection
        if connection is None or not connection.alive:
            if connection is not None:
                self._background(connection.close())
            connection = slot.connection = self._take()
            opening = True
        else:
            opening = False
        try:
            # The time limit is for the wait for a place; connecting has its own.
            async with asyncio.timeout(timeout_s + self.options.connect_timeout_s):
                await connection.open()
        except TimeoutError:
            raise DeadlineError(
                f"no session with the MCP server {self.server.name!r} within"
                f" {timeout_s + self.options.connect_timeout_s:g} s: {self.live} are open"
                f" (max_sessions={self.options.max_sessions})"
            ) from None
        except ServerUnavailable as error:
            if not self._complained:  # once for an outage, not for each call
                self._complained = True
                _log.warning("%s", error.detail)
            raise
        self._complained = False
        if opening:
            stats.connect_s += connection.connect_s
        return connection

    def _take(self) -> McpConnection:
        """A connection that nobody has used: one that was started ahead, or a new one."""
        while self._warm:
            connection = self._warm.pop(0)
            self._background(self._restock())
            if connection.alive:
                return connection
        return self._new_connection()

    async def _restock(self) -> None:
        connection = self._new_connection()
        try:
            await connection.open()
        except ServerUnavailable as error:
            _log.warning("a session could not be started ahead: %s", error.detail)
            return
        if self._starters and len(self._warm) < self.options.prestart:
            self._warm.append(connection)
        else:
            await connection.close()

    def _new_connection(self) -> McpConnection:
        return McpConnection(
            self.server,
            connect_timeout_s=self.options.connect_timeout_s,
            known=self._known,
            place=self._places,
            start=self._starts if self.server.transport == "stdio" else None,
        )

    async def _close(self, slot: _Slot) -> None:
        connection, slot.connection = slot.connection, None
        if connection is not None:
            await connection.close()

    async def _reap(self) -> None:
        """Closes sessions that nobody has used for idle_s: of trajectories that were never released."""
        while True:
            await asyncio.sleep(min(self.options.idle_s / 4, 60.0))
            limit = time.monotonic() - self.options.idle_s
            for key, slot in list(self._slots.items()):
                if not slot.calls and slot.last_used < limit:
                    if slot.connection is not None:
                        _log.warning("%s: closing a session that was left open", self.server)
                    self._slots.pop(key, None)
                    self._background(self._close(slot))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_pools: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, weakref.WeakValueDictionary[Any, SessionPool]
] = weakref.WeakKeyDictionary()


def shared_pool(server: McpServer, options: SessionOptions) -> SessionPool:
    """The pool of this server and these options in the running event loop: tools of one server share their sessions,
    also when they come from several entries of a tool_config."""
    pools = _pools.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
    pool = pools.get((server, options))
    if pool is None:
        pool = pools[(server, options)] = SessionPool(server, options)
    return pool
