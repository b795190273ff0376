"""What stands between the trajectories and a tool: limits of concurrency and rate, a circuit breaker, retries.

Made from keys of the tool's `config` (verl's names in parentheses):

    max_concurrency (num_workers)         calls at once; more wait. Absent: no limit
    rate_limit                            calls a second, as many at once as a second allows. Absent: no limit;
                                          enable_global_rate_limit: false switches it off
    timeout_s (default_timeout, timeout)  deadline of a call, all its attempts together, within the request's limit
    queue_timeout_s: 30                   how long a call waits for its turn before the policy is told that it is busy
    idempotent                            a call may be repeated; the tool's class may declare it
    retries: 2 if idempotent, else 0      further attempts after a failure of the infrastructure but a timeout
    breaker_failures: 16                  so many of those in a row, over all trajectories, open the breaker; 0: never
    breaker_cooldown_s: 30                then, after this time, one call is let through to try

verl's names, and `retries`, may mean something else to a user's tool: a value that does not fit is told in the log, and
is no limit here.

An infrastructure failure is a call that timed out, or whose tool could not reach what it needs: see faults.py. Whatever
else a tool raises is a complaint about the call, and the tool is in good health.

All times are the event loop's, so a loop with a clock of its own makes every decision repeatable.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from rollout_sidecar.errors import DeadlineError, RolloutError, ToolError
from rollout_sidecar.tools.faults import is_infrastructure, is_timeout, origin_of

T = TypeVar("T")

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
"""Before the first retry; doubled for each further one."""
VERL_GRACE_S = 10.0
"""verl's timeout keys are what a tool allows its service; its own answer to that should not be cut off. A sandbox's
default_timeout holds for compiling and for running."""

EARLY_S = 0.01
"""A tool that gives up so much before the call's deadline does so by a limit of its own."""


class UnavailableError(ToolError):
    """The call was refused before it ran."""


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The keys of a tool's config that the gate reads; None is no limit."""

    max_concurrency: int | None = None
    rate_limit: float | None = None
    timeout_s: float | None = None
    queue_timeout_s: float = 30.0
    idempotent: bool = False
    retries: int = 0
    breaker_failures: int = 16
    breaker_cooldown_s: float = 30.0

    @classmethod
    def of(
        cls, config: Mapping[str, Any], *, idempotent: bool = False, name: str = ""
    ) -> "GateOptions":
        """Reads a config. ValueError names the key and the value.

        Args:
            config: of the tool; other keys are the tool's own, and None is absent.
            idempotent: what the tool's class declares.
            name: of the tool, for the log.
        """
        defaults = cls()
        given = {key: value for key, value in config.items() if value is not None}
        idempotent = bool(given.get("idempotent", idempotent))
        retries = 2 if idempotent else 0
        if idempotent:
            retries = int(_number(given, "retries", retries, whole=True))
        elif given.get("retries"):
            _log.warning(
                "tool %r: retries=%r is left to the tool, which is not declared idempotent"
                " (idempotent: true lets its calls be repeated)",
                name,
                given["retries"],
            )
        timeout_s = _optional(given, "timeout_s")
        if timeout_s is None:
            compile_and_run_s = 2 * (_lenient(name, given, "default_timeout") or 0)
            verls = compile_and_run_s or _lenient(name, given, "timeout")
            timeout_s = None if verls is None else verls + VERL_GRACE_S
        limited = given.get("enable_global_rate_limit", True)
        places = _optional(given, "max_concurrency", whole=True)
        if places is None:
            places = _lenient(name, given, "num_workers", whole=True)
        return cls(
            max_concurrency=None if places is None else int(places),
            rate_limit=_lenient(name, given, "rate_limit") if limited else None,
            timeout_s=timeout_s,
            queue_timeout_s=_number(given, "queue_timeout_s", defaults.queue_timeout_s),
            idempotent=idempotent,
            retries=retries,
            breaker_failures=int(
                _number(given, "breaker_failures", defaults.breaker_failures, whole=True)
            ),
            breaker_cooldown_s=_number(given, "breaker_cooldown_s", defaults.breaker_cooldown_s),
        )


@dataclass(frozen=True, kw_only=True)
class Passage(Generic[T]):
    """What became of a call: an answer or an error, and how long it took where."""

    answer: T | None = None
    error: RolloutError | None = None
    latency_s: float = 0.0
    """In the tool, all attempts together."""
    queue_s: float = 0.0
    """Waiting: for a place, for the rate limit, between attempts."""
    attempts: int = 0


CONFIG_KEYS = (
    *(field.name for field in fields(GateOptions)),
    *("num_workers", "default_timeout", "timeout", "enable_global_rate_limit"),
)
"""The keys of a tool's config that its gate reads, verl's names included."""


class ToolGate:
    """The gate of one tool, shared by all trajectories of one event loop."""

    def __init__(self, name: str, options: GateOptions | None = None):
        """Open, with all places free."""
        self.options = options = options or GateOptions()
        self.breaker = Breaker(options.breaker_failures, options.breaker_cooldown_s)
        self._name = name
        self._places = asyncio.Semaphore(options.max_concurrency or 1)
        self._rate = RateLimit(options.rate_limit) if options.rate_limit else None

    async def run(self, attempt: Callable[[float], Awaitable[T]], timeout_s: float) -> Passage[T]:
        """Passes a call through. Raises nothing but CancelledError, and then gives back what it held.

        Args:
            attempt: makes the call once, within so many seconds; raises RolloutErrors only.
            timeout_s: deadline of the request; the tool's own may be shorter.
        """
        clock = asyncio.get_running_loop().time
        arrived = clock()
        timeout_s = min(timeout_s, self.options.timeout_s or timeout_s)
        try:
            self.breaker.check(self._name, arrived)  # before the queue: waiting would be in vain
            await self._take_place(arrived)
        except UnavailableError as error:
            return Passage(error=error, queue_s=clock() - arrived)
        try:
            probe = self.breaker.enter(self._name, clock())
            failed: bool | None = None
            try:
                if self._rate is not None:
                    await self._wait_for_rate(self._rate, arrived)
                waited_s = clock() - arrived
                passage = await self._attempts(attempt, timeout_s, waited_s)
                failed = passage.error is not None and is_infrastructure(passage.error)
                return passage
            finally:
                self.breaker.leave(clock(), probe=probe, failed=failed)
        except UnavailableError as error:
            return Passage(error=error, queue_s=clock() - arrived)
        finally:
            self._give_place()

    async def _attempts(
        self, attempt: Callable[[float], Awaitable[T]], timeout_s: float, queue_s: float
    ) -> Passage[T]:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        latency_s, attempts = 0.0, 0
        while True:
            attempts += 1
            started = clock()
            answer, error = None, None
            try:
                answer = await attempt(max(0.0, deadline - started))
            except DeadlineError as raised:
                error = raised
                if clock() > deadline - EARLY_S:
                    error = DeadlineError(f"no result within {timeout_s:g} s")
            except RolloutError as raised:
                error = raised
            latency_s += clock() - started
            pause_s = FIRST_PAUSE_S * 2 ** (attempts - 1)
            if error is not None:
                pause_s = max(pause_s, getattr(origin_of(error), "retry_after_s", 0.0))
            if (
                error is None
                or is_timeout(error)
                or not is_infrastructure(error)
                or attempts > self.options.retries
                or clock() + pause_s >= deadline
            ):
                return Passage(
                    answer=answer,
                    error=error,
                    latency_s=latency_s,
                    queue_s=queue_s,
                    attempts=attempts,
                )
            await asyncio.sleep(pause_s)
            queue_s += pause_s

    async def _take_place(self, arrived: float) -> None:
        if self.options.max_concurrency is None:
            return
        try:
            async with asyncio.timeout_at(arrived + self.options.queue_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise self._busy() from None

    def _give_place(self) -> None:
        if self.options.max_concurrency is not None:
            self._places.release()

    async def _wait_for_rate(self, rate: "RateLimit", arrived: float) -> None:
        now = asyncio.get_running_loop().time()
        wait_s = rate.reserve(now)
        if now + wait_s > arrived + self.options.queue_timeout_s:
            rate.give_back()
            raise self._busy()
        if wait_s > 0:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                rate.give_back()
                raise

    def _busy(self) -> UnavailableError:
        return UnavailableError(
            f"Tool {self._name!r} is busy: it had no time for this call within"
            f" {self.options.queue_timeout_s:g} s. Try again later, or go on without it."
        )


class RateLimit:
    """So many calls a second on average, and at most a second's worth at once."""

    def __init__(self, per_second: float):
        self._interval_s = 1 / per_second
        self._burst = max(1.0, per_second)
        self._next = float("-inf")

    def reserve(self, now: float) -> float:
        """Takes the next free time; how long it is until then."""
        start = max(self._next, now - (self._burst - 1) * self._interval_s)
        self._next = start + self._interval_s
        return max(0.0, start - now)

    def give_back(self) -> None:
        """The time that was reserved will not be used."""
        self._next -= self._interval_s


class Breaker:
    """Closed while the tool works; open, and refusing calls, after `failures` in a row; then a trial call decides."""

    def __init__(self, failures: int, cooldown_s: float):
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._opened: float | None = None
        self._probing = False

    @property
    def open(self) -> bool:
        """Calls are refused, but for a trial after the cooldown."""
        return self._opened is not None

    def check(self, name: str, now: float) -> None:
        """Raises UnavailableError if a call would be refused now."""
        if self._opened is None:
            return
        if self._probing or now < self._opened + self._cooldown_s:
            raise UnavailableError(
                f"Tool {name!r} is unavailable: its last calls failed. Go on without it, or try again"
                " later."
            )

    def enter(self, name: str, now: float) -> bool:
        """Begins a call: True if it is the trial. Raises UnavailableError."""
        self.check(name, now)
        self._probing = self.open
        return self._probing

    def leave(self, now: float, *, probe: bool, failed: bool | None) -> None:
        """Ends a call; `failed` is None if nothing is known, because it was cancelled or never made."""
        if probe:
            self._probing = False
        if failed is False:
            self._failures, self._opened = 0, None
        elif failed:
            self._failures += 1
            opens = self._opened is None and 0 < self._limit <= self._failures
            if opens or probe:
                self._opened = now


def _optional(config: Mapping[str, Any], key: str, *, whole: bool = False) -> float | None:
    """A limit, None if there is none."""
    if key not in config:
        return None
    value = _number(config, key, 0.0, whole=whole)
    if value <= 0:
        raise ValueError(f"{key}={value:g} must be above 0; leave it out for no limit")
    return value


def _lenient(
    tool: str, config: Mapping[str, Any], key: str, *, whole: bool = False
) -> float | None:
    """The same for a key that verl's users may have given a meaning of their own."""
    try:
        return _optional(config, key, whole=whole)
    except ValueError as error:
        _log.warning("tool %r: %s; it is no limit here", tool, error)
        return None


def _number(config: Mapping[str, Any], name: str, default: float, *, whole: bool = False) -> float:
    value = config.get(name, default)
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 1e9:
        raise ValueError(f"{name}={value!r} must be a {'whole ' if whole else ''}number from 0 on")
    return value
