"""The gate of a tool: who waits, who is refused, who is tried again. All times are exact, on a clock of the test's."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest
from stepping_loop import run_stepping

from rollout_sidecar.errors import DeadlineError, RolloutError, ToolError, boundary
from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.faults import RaisedError, is_infrastructure
from rollout_sidecar.tools.gate import (
    GateOptions,
    Passage,
    RateLimit,
    ToolGate,
    UnavailableError,
)
from rollout_sidecar.tools.http import HttpFailure


def now() -> float:
    return asyncio.get_running_loop().time()


class Service:
    """Takes some seconds for a call, and fails as told; knows when calls began, and how many there were at once."""

    def __init__(self, takes_s: float = 1.0, failures: Sequence[Exception | None] = ()):
        self.takes_s = takes_s
        self.failures = list(failures)
        self.began: list[float] = []
        self.at_once = self.most = 0

    async def call(self, timeout_s: float) -> str:
        self.began.append(now())
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            failure = self.failures.pop(0) if self.failures else None
            await asyncio.sleep(min(self.takes_s, timeout_s))
            if self.takes_s > timeout_s:
                raise DeadlineError("late")
            with boundary(RaisedError):
                if failure is not None:
                    raise failure
            return "done"
        finally:
            self.at_once -= 1


def outcome(passage: Passage[str]) -> tuple[str, float, float, int]:
    text = passage.answer or f"{type(passage.error).__name__}: {passage.error}"
    return text, round(passage.queue_s, 6), round(passage.latency_s, 6), passage.attempts


def play(options: GateOptions, service: Service, arrivals: list[float], timeout_s: float = 60.0):
    """Calls that arrive at these times; what became of each."""

    async def one(gate: ToolGate, arrival: float):
        await asyncio.sleep(arrival)
        return outcome(await gate.run(service.call, timeout_s))

    async def all_of_them():
        gate = ToolGate("search", options)
        return await asyncio.gather(*(one(gate, arrival) for arrival in arrivals))

    return run_stepping(all_of_them())


# --- concurrency and rate ---------------------------------------------------------------------------------------


def test_calls_beyond_the_limit_wait_their_turn_and_waiting_is_not_latency():
    service = Service(takes_s=2.0)
    options = GateOptions(max_concurrency=2)
    results = sorted(play(options, service, [0.0, 0.0, 0.5, 0.5, 0.5]))
    assert service.most == 2
    assert service.began == [0, 0, 2, 2, 4]
    # From 0.5 to 2 and to 4: waited; 2 s each in the tool.
    assert results == [("done", 0, 2, 1)] * 2 + [("done", 1.5, 2, 1)] * 2 + [("done", 3.5, 2, 1)]


def test_a_queue_that_does_not_move_in_time_is_told_to_the_policy():
    service = Service(takes_s=10.0)
    options = GateOptions(max_concurrency=1, queue_timeout_s=3.0)
    first, second = play(options, service, [0.0, 1.0])
    assert first == ("done", 0, 10, 1)
    busy = "Tool 'search' is busy: it had no time for this call within 3 s."
    assert second == (f"UnavailableError: {busy} Try again later, or go on without it.", 3, 0, 0)
    assert service.began == [0]


def test_a_rate_limit_lets_a_second_s_worth_through_at_once_and_then_spaces_calls():
    service = Service(takes_s=0.0)
    results = play(GateOptions(rate_limit=4.0), service, [0.0] * 7 + [10.0] * 5)
    assert service.began == [0, 0, 0, 0, 0.25, 0.5, 0.75, 10, 10, 10, 10, 10.25]
    assert [queue_s for _, queue_s, _, _ in results[:7]] == [0, 0, 0, 0, 0.25, 0.5, 0.75]


def test_a_rate_below_one_a_second():
    service = Service(takes_s=0.0)
    play(GateOptions(rate_limit=0.5), service, [0.0, 0.0, 1.0])
    assert service.began == [0, 2, 4]


def test_a_rate_limit_that_would_take_too_long_refuses_at_once_and_keeps_the_time_free():
    service = Service(takes_s=0.0)
    options = GateOptions(rate_limit=0.1, queue_timeout_s=5.0)
    results = play(options, service, [0.0, 1.0, 5.5])
    assert [text.partition(":")[0] for text, *_ in results] == ["done", "UnavailableError", "done"]
    # The refused one at 1.0 took nobody's place: the next begins at 10, as if it had never been.
    assert service.began == [0, 10]
    assert results[1][1] == 0


def test_times_are_reserved_one_after_the_other():
    limit = RateLimit(3.0)
    starts = [at + limit.reserve(at) for at in (0.0, 0.1, 0.1, 0.1, 0.5, 5.0, 5.0, 5.0, 5.0)]
    # Three at once, then one each third of a second; after a pause three at once again.
    assert starts == pytest.approx([0, 0.1, 0.1, 1 / 3, 2 / 3, 5, 5, 5, 16 / 3])


def test_a_call_that_is_cancelled_gives_its_place_back():
    async def main():
        service, gate = Service(takes_s=5.0), ToolGate("search", GateOptions(max_concurrency=1))
        running = asyncio.create_task(gate.run(service.call, 60))
        waiting = asyncio.create_task(gate.run(service.call, 60))
        await asyncio.sleep(1)
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        return await gate.run(service.call, 60), service.began

    passage, began = run_stepping(main())
    assert outcome(passage) == ("done", 0, 5, 1)
    assert began == [0, 1]


# --- deadlines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own_s", "request_s", "expected_s"), [(None, 4.0, 4), (2.0, 4.0, 2), (9.0, 4.0, 4)]
)
def test_the_shorter_deadline_holds(own_s, request_s, expected_s):
    service = Service(takes_s=60.0)
    (result,) = play(GateOptions(timeout_s=own_s), service, [0.0], timeout_s=request_s)
    assert result == (f"DeadlineError: no result within {expected_s} s", 0, expected_s, 1)


# --- the breaker ------------------------------------------------------------------------------------------------

OPEN = (
    "UnavailableError: Tool 'search' is unavailable: its last calls failed."
    " Go on without it, or try again later."
)


def test_the_breaker_opens_after_failures_in_a_row_tries_one_call_and_closes():
    down: list[Exception | None] = [OSError("down")] * 4
    service = Service(takes_s=1.0, failures=[None, *down])
    options = GateOptions(breaker_failures=3, breaker_cooldown_s=10.0)
    arrivals = [0.0, 2.0, 4.0, 6.0, 8.0, 16.9, 17.5, 17.6, 27.9, 28.6, 29.7, 30.0]
    results = play(options, service, arrivals)
    texts = [text for text, *_ in results]
    # Fails at 3, 5 and 7: open until 17. The trial at 17.5 fails at 18.5, the one at 28.6 succeeds at 29.6.
    failed = "RaisedError: down"
    assert texts == [
        *("done", failed, failed, failed, OPEN, OPEN),
        *(failed, OPEN, OPEN, "done", "done", "done"),
    ]
    assert service.began == [0, 2, 4, 6, 17.5, 28.6, 29.7, 30]
    assert results[4] == (OPEN, 0, 0, 0)


def test_only_one_call_is_the_trial():
    service = Service(takes_s=1.0, failures=[OSError("down")])
    options = GateOptions(breaker_failures=1, breaker_cooldown_s=5.0)
    texts = [text for text, *_ in play(options, service, [0.0, 6.5, 6.5, 7.0, 8.0])]
    assert texts == ["RaisedError: down", "done", OPEN, OPEN, "done"]


def test_failures_that_do_not_follow_each_other_open_nothing():
    failures: list[Exception | None] = [OSError("down"), OSError("down"), None] * 4
    service = Service(takes_s=1.0, failures=failures)
    results = play(GateOptions(breaker_failures=3), service, [2.0 * i for i in range(12)])
    assert OPEN not in [text for text, *_ in results]


def test_complaints_about_the_call_never_open_it():
    """A policy that sends nonsense must not take the tool from the others."""
    complaints = [ToolFailure("no such table"), ValueError("x"), KeyError("y"), TypeError("z")]
    service = Service(takes_s=1.0, failures=[*complaints])
    results = play(GateOptions(breaker_failures=1), service, [2.0 * i for i in range(5)])
    assert [text for text, *_ in results][-1] == "done"


def test_calls_that_wait_for_a_tool_that_dies_are_refused_when_their_turn_comes():
    service = Service(takes_s=60.0)
    options = GateOptions(max_concurrency=1, breaker_failures=2, queue_timeout_s=1000.0)
    results = play(options, service, [0.0] * 10, timeout_s=5.0)
    assert service.began == [0, 5]  # not ten times five seconds
    assert [text for text, *_ in results][2:] == [OPEN] * 8


def test_a_trial_that_is_cancelled_leaves_the_place_to_another():
    async def main():
        service = Service(takes_s=1.0, failures=[OSError("down")])
        gate = ToolGate("search", GateOptions(breaker_failures=1, breaker_cooldown_s=5.0))
        await gate.run(service.call, 60)
        await asyncio.sleep(6)
        trial = asyncio.create_task(gate.run(service.call, 60))
        await asyncio.sleep(0.5)
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        return await gate.run(service.call, 60)

    assert outcome(run_stepping(main())) == ("done", 0, 1, 1)


# --- retries ----------------------------------------------------------------------------------------------------


def test_only_tools_declared_idempotent_are_tried_again():
    service = Service(takes_s=1.0, failures=[OSError("down")])
    (once,) = play(GateOptions(), service, [0.0])
    assert once == ("RaisedError: down", 0, 1, 1)

    service = Service(takes_s=1.0, failures=[OSError("down"), OSError("down")])
    (thrice,) = play(GateOptions(idempotent=True, retries=2), service, [0.0])
    # Pauses of 0.1 and 0.2 s, which are waiting.
    assert thrice == ("done", 0.3, 3, 3)
    assert service.began == pytest.approx([0, 1.1, 2.3])


@pytest.mark.parametrize("failure", [ToolFailure("no such table"), ValueError("not a number")])
def test_complaints_are_not_tried_again(failure):
    service = Service(takes_s=1.0, failures=[failure])
    (result,) = play(GateOptions(idempotent=True, retries=5), service, [0.0])
    assert result[3] == 1


def test_attempts_end_with_the_deadline_of_the_call():
    service = Service(takes_s=1.0, failures=[OSError("down")] * 9)
    (result,) = play(GateOptions(idempotent=True, retries=9), service, [0.0], timeout_s=2.5)
    # At 0 and 1.1, then at 2.3 with 0.2 s left.
    assert service.began == pytest.approx([0, 1.1, 2.3])
    assert result == ("DeadlineError: no result within 2.5 s", 0.3, 2.2, 3)


def test_a_service_says_how_long_to_wait():
    busy = HttpFailure("429", "status", status=429, retry_after_s=7.0)
    service = Service(takes_s=1.0, failures=[busy])
    (result,) = play(GateOptions(idempotent=True, retries=1), service, [0.0])
    assert result == ("done", 7, 2, 2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DeadlineError("late"), True),
        (HttpFailure("503", "status", status=503), True),
        (HttpFailure("404", "status", status=404), False),
        (HttpFailure("refused", "refused"), True),
        (UnavailableError("busy"), True),
        (ToolFailure("no such table"), False),
        (ToolError("the server is gone"), True),
    ],
)
def test_what_says_something_about_the_tool(error: RolloutError, expected: bool):
    assert is_infrastructure(error) is expected


# --- settings ---------------------------------------------------------------------------------------------------


def test_verl_s_keys_are_understood():
    stock = {
        "num_workers": 10,
        "rate_limit": 12,
        "default_timeout": 30,
        "memory_limit_mb": 1024,
        "type": "native",
    }
    options = GateOptions.of(stock)
    # 30 s to compile, 30 to run, and a little for its own answer to a timeout.
    assert (options.max_concurrency, options.rate_limit, options.timeout_s) == (10, 12, 70)
    assert GateOptions.of({"timeout": 30}).timeout_s == 40
    assert GateOptions.of({**stock, "enable_global_rate_limit": False}).rate_limit is None
    ours = GateOptions.of({**stock, "max_concurrency": 3, "timeout_s": 5, "rate_limit": None})
    assert (ours.max_concurrency, ours.rate_limit, ours.timeout_s) == (3, None, 5)
    assert GateOptions.of({}) == GateOptions()


def test_a_class_or_a_config_declares_a_tool_idempotent():
    assert GateOptions.of({}, idempotent=True).retries == 2
    assert GateOptions.of({"idempotent": True, "retries": 4}).retries == 4
    assert GateOptions.of({"idempotent": False}, idempotent=True).retries == 0


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"max_concurrency": 0}, "max_concurrency=0 must be above 0; leave it out for no limit"),
        ({"max_concurrency": 2.5}, "max_concurrency=2.5 must be a whole number from 0 on"),
        ({"breaker_failures": -1}, "breaker_failures=-1 must be a whole number from 0 on"),
        ({"timeout_s": True}, "timeout_s=True must be a number"),
        ({"idempotent": True, "retries": "2"}, "retries='2' must be a whole number from 0 on"),
    ],
)
def test_bad_settings_are_named(config, problem):
    with pytest.raises(ValueError, match=problem):
        GateOptions.of(config)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_workers": "many"}, "num_workers='many' must be a whole number from 0 on; it is no"),
        ({"rate_limit": 0}, "rate_limit=0 must be above 0; leave it out for no limit; it is no"),
        ({"timeout": {"connect": 5}}, "timeout={'connect': 5} must be a number from 0 on; it is"),
        ({"retries": 3}, "retries=3 is left to the tool, which is not declared idempotent"),
    ],
)
def test_keys_that_mean_something_else_to_a_user_s_tool_are_told_and_left(config, told, caplog):
    with caplog.at_level(logging.WARNING):
        assert GateOptions.of(config, name="mine") == GateOptions()
    (record,) = caplog.records
    assert record.message.startswith(f"tool 'mine': {told}")


def test_the_clock_of_these_tests_stands_still_while_code_runs():
    async def main() -> list[float]:
        times: list[float] = []
        note: Callable[[], None] = lambda: times.append(now())  # noqa: E731
        note()
        await asyncio.sleep(3600)
        note()
        return times

    assert run_stepping(main()) == [0, 3600]
