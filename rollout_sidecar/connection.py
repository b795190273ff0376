"""HTTP with one sidecar, over connections that may break: certificates, deadlines, retries, and errors as sentences."""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from rollout_sidecar.protocol import MSGPACK, ErrorBody, decode

T = TypeVar("T")

RETRIES = 5
"""Attempts after the first, without anything having arrived in between. They take about 6 seconds."""
MAX_BACKOFF_S = 4.0
CONNECT_S = 10.0
SILENCE_S = 60.0
"""A sidecar that streams sends something at least every 15 s: this long without a byte, the connection is dead."""

LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, EOFError)
"""What happens to connections, and may not happen the next time."""


class SidecarError(RuntimeError):
    """The sidecar could not be reached, refused, or answered something else than the protocol says."""

    def __init__(self, message: str, *, kind: str, status: int = 0):
        super().__init__(message)
        self.kind = kind
        """What the sidecar called it, or "unreachable", "timeout", "bad_answer"."""
        self.status = status
        """HTTP status, 0 without an answer."""


class Connection:
    """What the client of one sidecar is built on."""

    def __init__(self, url: str, token: str | None, timeout_s: float, ca_file: str):
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._tls = _trusting(ca_file)
        self._session: aiohttp.ClientSession | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Called when a connection was lost, before the next attempt."""

    async def __aenter__(self) -> Self:
        headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        # Some calls take as long as the work behind them; deadlines are per call, see _deadline.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        # As many streams as there are requests, and room for an abort beside them.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _typed(
        self, wire_type: type[T], method: str, path: str, deadline: float, data: bytes | None = None
    ) -> T:
        return self._decode(await self._call(method, path, deadline=deadline, data=data), wire_type)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        deadline: float | None = None,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        retries: int | None = None,
    ) -> bytes:
        """One exchange, repeated when the connection is lost: every call of the protocol may be."""
        deadline = deadline or self._deadline()
        failures = 0
        while True:
            try:
                call = self._open(method, path, deadline, data=data, headers=headers, silence=False)
                async with call as response:
                    await self._check(response)
                    return await response.read()
            except aiohttp.ClientSSLError as error:
                raise self._untrusted(error) from error
            except LOST as error:
                failures += 1
                await self._back_off(failures, deadline, error, retries)
            except aiohttp.ClientError as error:
                raise self._bad_answer(f"{type(error).__name__}: {error}") from error

    def _open(
        self, method: str, path: str, deadline: float, *, silence: bool = True, **kwargs: Any
    ) -> Any:
        if self._session is None:
            raise RuntimeError("use SidecarClient as `async with SidecarClient(url) as sidecar`")
        # A commit answers when it is done, which may take long: only streams must not be silent.
        timeout = aiohttp.ClientTimeout(
            total=max(0.001, deadline - time.monotonic()),
            sock_connect=CONNECT_S,
            sock_read=SILENCE_S if silence else None,
        )
        return self._session.request(method, self.url + path, timeout=timeout, **kwargs)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 400:
            return
        body = await response.read()
        content_type = MSGPACK if response.content_type == MSGPACK else "application/json"
        try:
            fault = decode(body, content_type, ErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SidecarError(
                f"{self.url} answered {response.status} {response.reason} and is no rollout sidecar,"
                " or a proxy stands before it: check the URL",
                kind="bad_answer",
                status=response.status,
            ) from None
        advice = " (set sidecar.token_file)" if response.status == 401 else ""
        raise SidecarError(
            f"{self.url} refused {response.method} {response.url.path} ({response.status}"
            f" {fault.kind}): {fault.message}{advice}",
            kind=fault.kind,
            status=response.status,
        )

    def _decode(self, body: bytes, wire_type: Any, content_type: str = MSGPACK) -> Any:
        try:
            return decode(body, content_type, wire_type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._bad_answer(f"its answer cannot be read: {error}") from error

    def _bad_answer(self, problem: str) -> SidecarError:
        return SidecarError(
            f"{self.url} does not answer as a rollout sidecar of this version: {problem};"
            " check the URL, and that both sides run the same release",
            kind="bad_answer",
        )

    # --- time ---

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    async def _back_off(
        self, failures: int, deadline: float, error: BaseException, retries: int | None = None
    ) -> None:
        """Waits before the next attempt, or raises SidecarError if there is none."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise SidecarError(
                f"{self.url} did not finish within {self._timeout_s:g} s; look at the sidecar's log, or"
                " raise sidecar.request_timeout_s",
                kind="timeout",
            ) from error
        if failures > (RETRIES if retries is None else retries):
            plain = self.url.startswith("http:") and isinstance(
                error, aiohttp.ServerDisconnectedError
            )
            hint = "; if it serves TLS, write https:// in sidecar.urls" if plain else ""
            raise SidecarError(
                f"{self.url} cannot be reached ({type(error).__name__}: {error}); start the sidecar"
                f" (python -m rollout_sidecar), or correct sidecar.urls{hint}",
                kind="unreachable",
            ) from error
        self.on_lost()
        await asyncio.sleep(min(left_s, MAX_BACKOFF_S, 0.1 * 2**failures))

    def _untrusted(self, error: aiohttp.ClientSSLError) -> SidecarError:
        """What is wrong with a connection that should have been encrypted."""
        cause = getattr(error, "certificate_error", error.__cause__ or error)
        reason = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or str(cause)
        if not isinstance(cause, ssl.SSLCertVerificationError):
            advice = "if it serves no TLS, write http:// in sidecar.urls"
        elif "mismatch" in reason.lower():
            advice = "write its name as in the certificate in sidecar.urls"
        else:
            advice = (
                "name the file of its certificate, or of the CA that signed it, in sidecar.ca_file"
            )
        return SidecarError(
            f"{self.url}: no encrypted connection that can be trusted ({reason}); {advice}",
            kind="tls",
        )


def _trusting(ca_file: str) -> ssl.SSLContext | bool:
    """What to check certificates with. True: with what this machine trusts."""
    if not ca_file:
        return True
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=ca_file)
    except OSError as error:  # ssl.SSLError too
        raise ValueError(
            f"sidecar.ca_file={ca_file!r} cannot be used ({error.strerror or error}); name a PEM file of "
            "certificates, or leave it empty"
        ) from error
    return context
