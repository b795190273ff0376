import asyncio
import sys

import pytest

from rollout_sidecar.eager import start_task


async def test_what_waits_for_nothing_is_done_at_once_where_python_can():
    async def answer() -> int:
        return 42

    task = start_task(answer())
    assert task.done() == (sys.version_info >= (3, 12))
    assert await task == 42


async def test_what_waits_is_a_task_of_its_own():
    async def wait() -> str:
        own = asyncio.current_task()
        async with asyncio.timeout(60):  # takes the current task to be the one to cancel
            await asyncio.sleep(0)
        assert asyncio.current_task() is own
        return own.get_name() if own else ""

    mine = asyncio.current_task()
    task = start_task(wait())
    assert asyncio.current_task() is mine
    assert await task == task.get_name()


async def test_a_failure_is_the_tasks():
    async def fail():
        raise ValueError("no")

    task = start_task(fail())
    with pytest.raises(ValueError, match="no"):
        await task
