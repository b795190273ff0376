"""The vocabulary of what can go wrong in a rollout, and the one boundary that catches it.

Two families. A `RolloutError` happens inside one trajectory: it becomes that trajectory's status and error text, and
the others go on (a bad rollout is data, not a crash). A `RequestError` is the caller's: it becomes an HTTP answer.
Foreign code (tools, reward functions, engines) is called inside `boundary`, which turns whatever it raises into the
RolloutError of its kind; nowhere else is there a bare `except Exception`.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RolloutError(Exception):
    """Something failed within one trajectory."""


class ToolError(RolloutError):
    """A tool raised, or answered with something that is no tool result."""


class InteractionError(RolloutError):
    """An interaction raised, did not answer in time, or answered with something that is no reply."""


class EngineError(RolloutError):
    """The engine raised, or sampled something that cannot be trained on."""


class RewardError(RolloutError):
    """A reward function raised, or returned something that is no reward."""


class ContextRewrittenError(RolloutError):
    """The chat template rewrote what the policy saw in earlier turns, and the context policy is reject."""


class DeadlineError(RolloutError):
    """Foreign code did not answer in time."""


class RequestError(Exception):
    """A request that cannot be served: the HTTP status, the kind for programs, the sentence for people."""

    def __init__(self, status: int, kind: str, message: str, field: str = ""):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.field = field


@contextmanager
def boundary(error_type: type[RolloutError], what: str = "") -> Iterator[None]:
    """Turns any exception of foreign code into `error_type`, with what it was doing and the original as the cause.

    Cancellation passes through: it is asyncio's, and not a fault.
    """
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        raise error_type(f"{what}: {describe(error)}" if what else describe(error)) from error


def describe(error: BaseException) -> str:
    """One line for people: the message, or the type's name where there is none.

    A KeyError's message is the key alone, so it gets both.
    """
    try:
        text = safe_text(" ".join(str(error).split()))
    except Exception:  # a foreign exception may fail even at this
        text = ""
    if isinstance(error, KeyError):
        return f"KeyError: {text}"
    return text or type(error).__name__


def safe_text(text: str) -> str:
    """Text that UTF-8 can hold: a policy may write half of a surrogate pair as a JSON escape."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
