"""Without SGLang: what waits for it is told when it ends."""

import asyncio

import pytest

from rollout_sidecar.engines.sglang_answers import Answers, EngineEnded


async def hang(cancelled: asyncio.Event) -> None:
    """Until it is cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


async def test_an_answer_comes_through_and_so_does_a_failure():
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("no")

    answers = Answers()
    assert await answers.to(answer(), str) == 42
    with pytest.raises(ValueError, match="no"):
        await answers.to(fail(), str)


async def test_whoever_waits_or_asks_later_is_told_that_it_ended():
    answers, cancelled = Answers(), asyncio.Event()

    asking = [
        asyncio.ensure_future(answers.to(hang(cancelled), lambda: "killed")) for _ in range(2)
    ]
    await asyncio.sleep(0)
    answers.end()
    for task in asking:
        with pytest.raises(EngineEnded, match="SGLang does not answer: killed"):
            await task
    await asyncio.wait_for(cancelled.wait(), 10)
    with pytest.raises(EngineEnded, match="killed"):
        await answers.to(hang(cancelled), lambda: "killed")


async def test_cancelling_the_question_cancels_the_call():
    answers, cancelled = Answers(), asyncio.Event()

    asking = asyncio.ensure_future(answers.to(hang(cancelled), str))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(cancelled.wait(), 10)
