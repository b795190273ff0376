"""Whose fault a failed call is: the tool's, whose circuit breaker counts it, or the call's, which the policy wrote.

What a tool raises of its own is taken for a complaint about the call (a policy writes bad SQL, names a file that is not
there) unless it is one of these:

    connections     OSError but for those about paths and programs, aiohttp's, httpx's and urllib3's failures of
                    transport, also as the cause (`raise ... from`) of another exception
    timeouts        TimeoutError, httpx's and requests'
    HTTP statuses   429 and from 500 on, where the exception tells a status
    ours            ToolError (but ToolFailure), and everything that our own tools raise about their services
"""

from collections.abc import Iterator

import aiohttp

from rollout_sidecar.errors import DeadlineError, RolloutError, ToolError
from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.http import HttpFailure

_OF_PATHS = (
    *(FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError),
    *(PermissionError, ChildProcessError, ProcessLookupError),
)
"""OSErrors that arguments lead to."""
_TRANSPORT = {
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "anyio": ("BrokenResourceError", "ClosedResourceError", "EndOfStream"),
    "httpcore": ("NetworkError", "ProtocolError", "ProxyError", "TimeoutException"),
    "httpx": ("TransportError",),
    "httpx2": ("TransportError",),
    "openai": ("APIConnectionError",),
    "urllib3": ("HTTPError",),
    "websockets": ("ConnectionClosed",),
}
"""By package: base classes of failures of transport. By name, since tools may use what is not installed here."""
_TIMEOUTS = ("APITimeoutError", "Timeout", "TimeoutError", "TimeoutException")
_MAX_CAUSES = 8


class RaisedError(ToolError):
    """A tool raised something of its own, which is the cause. A ToolError that it raises itself stays what it is:
    it says something about the tool."""


def is_infrastructure(error: RolloutError) -> bool:
    """Whether a failed call says something about the tool, and not about the call."""
    origin = origin_of(error)
    if isinstance(origin, HttpFailure):
        return origin.fault != "status" or _is_bad_status(origin.status)
    if isinstance(origin, ToolFailure):
        return False
    if isinstance(origin, RolloutError):
        return True
    return any(map(_is_about_the_service, _causes(origin)))


def is_timeout(error: RolloutError) -> bool:
    """Whether a call failed because something did not answer in time."""
    origin = origin_of(error)
    if isinstance(origin, HttpFailure):
        return origin.fault == "timeout"
    if isinstance(origin, ToolFailure):
        return False
    return isinstance(origin, DeadlineError) or any(map(_is_of_time, _causes(origin)))


def origin_of(error: RolloutError) -> BaseException:
    """What foreign code raised, before it crossed the boundary."""
    return (error.__cause__ or error) if isinstance(error, RaisedError) else error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was explicitly raised from; of a group the first."""
    for _ in range(_MAX_CAUSES):
        yield error
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if cause is None:
            return
        error = cause


def _is_about_the_service(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return _is_bad_status(status)
    if isinstance(error, OSError):
        return not isinstance(error, _OF_PATHS)
    ours = type(error).__module__.partition(".")[0] == "rollout_sidecar"
    if ours and not isinstance(error, ValueError):  # such as the loss of a sandbox's worker
        return True
    return isinstance(error, aiohttp.ClientConnectionError) or _is_of(error, _TRANSPORT)


def _is_of_time(error: BaseException) -> bool:
    if isinstance(error, TimeoutError):
        return True
    packages = (*_TRANSPORT, "requests")
    return _is_of(error, dict.fromkeys(packages, _TIMEOUTS))


def _is_of(error: BaseException, names: dict[str, tuple[str, ...]]) -> bool:
    return any(
        base.__name__ in names.get(base.__module__.partition(".")[0], ())
        for base in type(error).__mro__
    )


def _status(error: BaseException) -> int | None:
    """An HTTP status, where urllib, aiohttp, requests or httpx put it."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status"), (error, "code"), (response, "status_code")):
        value = getattr(holder, name, None)
        if type(value) is int and 400 <= value < 600:
            return value
    return None


def _is_bad_status(status: int) -> bool:
    return status >= 500 or status == 429
