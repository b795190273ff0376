"""Tasks that begin at once, where Python can (3.12 on), instead of in the event loop's next round.

What does not wait for anything is then done when `start_task` returns. It saves a round of the loop, and more in a
crowd: of 256 rollouts that begin together, the first reaches the engine before the second has rendered its prompt.
"""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

if sys.version_info >= (3, 12):

    def start_task(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the running loop. Its code up to where it first waits runs now."""
        return asyncio.Task(call, loop=asyncio.get_running_loop(), eager_start=True)

else:

    def start_task(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the running loop."""
        return asyncio.get_running_loop().create_task(call)
