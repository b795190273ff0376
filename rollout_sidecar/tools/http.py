"""HTTP for tools that call a service: one connection pool a tool, and failures as sentences.

What a service cannot do to a rollout: keep it waiting (every request has a deadline), fill its memory (answers are
bounded), send it elsewhere (redirects are refused, since they would carry keys along), or remember it (no cookies).
Proxy variables of the environment are ignored: a loopback service must not be sought behind a proxy. Nothing is
logged, and error texts name host and path only, with every value that came from ${VARIABLE} blotted out.

Nothing is retried and nothing limited here: tools/gate.py does that for every tool alike.
"""

import errno
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
from yarl import URL

from rollout_sidecar.errors import safe_text
from rollout_sidecar.tools.base import ToolFailure

MAX_RESPONSE_BYTES = 8 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
# Shorter than common servers' own (uvicorn: 5 s): a request on a connection that the server is closing is lost.
_KEEP_ALIVE_S = 3.0
_MAX_REASON = 300

Fault = Literal["refused", "timeout", "broken", "status", "too_large", "not_json"]


class HttpFailure(ToolFailure):
    """A request that got no usable answer; the message is a sentence for the policy."""

    def __init__(self, message: str, fault: Fault, *, status: int = 0, retry_after_s: float = 0.0):
        super().__init__(message)
        self.fault: Fault = fault
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def not_processed(self) -> bool:
        """The service did nothing with the request: it never got it, or turned it away for now."""
        return self.fault == "refused" or self.status in (429, 503)


class HttpClient:
    """One aiohttp session, opened by `open` or by the first request, closed by `close`."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        secrets: tuple[str, ...] = (),
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ):
        """No connection is made yet.

        Args:
            headers: sent with every request.
            secrets: values that no error text may repeat, even where the service does.
            max_response_bytes: a longer answer is a failure.
        """
        self._headers = dict(headers or {})
        self._secrets = tuple(secret for secret in secrets if secret)
        self._max_response_bytes = max_response_bytes
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Makes the session in the running loop, if there is none."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )

    async def close(self) -> None:
        """Closes every connection. Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request_json(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON that the service answers. HttpFailure says why there is none."""
        await self.open()
        assert self._session is not None, "open() makes a session"
        where, connect_s = shown_url(url), min(CONNECT_TIMEOUT_S, timeout_s)
        try:
            async with self._session.request(
                method,
                url,
                json=body,
                params=params,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
            ) as response:
                data = await self._read(response, where)
                self._check_status(response, data, where)
        except aiohttp.ConnectionTimeoutError as error:
            raise HttpFailure(
                f"{where} could not be reached: no connection within {connect_s:g} s", "refused"
            ) from error
        except TimeoutError as error:
            raise HttpFailure(
                f"{where} gave no answer within {timeout_s:g} s", "timeout"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise HttpFailure(
                f"{where} could not be reached: {_connect_problem(error)}", "refused"
            ) from error
        except (aiohttp.ClientError, ValueError) as error:
            # Hung up, reset, cut short, badly compressed. InvalidURL repeats the address, keys included.
            text = "" if isinstance(error, aiohttp.InvalidURL) else self._blotted(str(error))
            raise HttpFailure(
                f"{where} broke off: {_one_line(text) or type(error).__name__}", "broken"
            ) from error
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise HttpFailure(
                f"{where} answered with something that is not JSON: {self._first_line(data)!r}",
                "not_json",
            ) from error

    async def _read(self, response: aiohttp.ClientResponse, where: str) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > self._max_response_bytes:
                raise HttpFailure(
                    f"{where} answered with more than {self._max_response_bytes} bytes", "too_large"
                )
        return bytes(data)

    def _check_status(self, response: aiohttp.ClientResponse, data: bytes, where: str) -> None:
        if 200 <= response.status < 300:
            return
        reason = _one_line(self._blotted(_explanation(data))) or self._first_line(data)
        if 300 <= response.status < 400:
            target = response.headers.get("Location", "")
            reason = f"redirects are not followed; set the address to {shown_url(target)}"
        raise HttpFailure(
            f"{where} answered with status {response.status}" + (f": {reason}" if reason else ""),
            "status",
            status=response.status,
            retry_after_s=_seconds(response.headers.get("Retry-After", "")),
        )

    def _first_line(self, data: bytes) -> str:
        text = data[: 16 * _MAX_REASON].decode("utf-8", "replace").strip()
        return _one_line(self._blotted(text.split("\n", 1)[0]))

    def _blotted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def checked_url(value: Any, what: str) -> str:
    """The value, if it is an http or https address. ValueError names it as `what`."""
    try:
        url = URL(str(value or ""))
    except ValueError:
        url = URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{what} is {value!r}, expected an address as http://127.0.0.1:8000")
    return str(value)


def shown_url(url: str) -> str:
    """Scheme, host, port and path: what may be shown of an address. Queries and passwords may be keys."""
    try:
        parsed = URL(url)
        return str(parsed.with_user(None).with_query(None).with_fragment(None))
    except ValueError:
        return "the address"


def with_default_path(url: str, path: str) -> str:
    """The address, with the path if it has none of its own."""
    parsed = URL(url)
    if parsed.path not in ("", "/"):
        return url
    return str(parsed.with_path(path).with_query(parsed.query))


def expand_environment(value: Any, what: str) -> tuple[Any, tuple[str, ...]]:
    """Replaces ${NAME} in every string of a config value; also returns the values put in, to be kept out of messages.

    ValueError names a variable that is not set.
    """
    secrets: list[str] = []

    def put(match: re.Match[str]) -> str:
        found = os.environ.get(match[1])
        if not found:
            raise ValueError(
                f"{what} names the environment variable {match[1]}, which is not set; export it first"
            )
        secrets.append(found)
        return found

    def expand(item: Any) -> Any:
        if isinstance(item, str):
            return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", put, item)
        if isinstance(item, dict):
            return {key: expand(each) for key, each in item.items()}
        if isinstance(item, list):
            return [expand(each) for each in item]
        return item

    return expand(value), tuple(secrets)


def positive_seconds(config: Mapping[str, Any], *names: str, default: float) -> float:
    """The first of these keys that is set, as seconds above 0."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ValueError(f"{name} is {value!r}, expected seconds above 0")
        return float(value)
    return default


def positive_count(config: Mapping[str, Any], name: str, default: int) -> int:
    """This key as a whole number of at least 1."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least 1")
    return value


def _explanation(data: bytes) -> str:
    """What a JSON error body says: the usual keys, and FastAPI's list of fields at fault."""
    try:
        body = json.loads(data[:65536])
    except (ValueError, RecursionError):
        return ""
    detail = body
    if isinstance(body, dict):
        detail = body.get("detail") or body.get("message") or body.get("error") or ""
    if isinstance(detail, dict):
        detail = detail.get("message") or ""
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        place = detail[0].get("loc")
        name = place[-1] if isinstance(place, list) and place else ""
        detail = f"{name}: {detail[0].get('msg', '')}".removeprefix(": ")
    return detail if isinstance(detail, str) else ""


def _connect_problem(error: aiohttp.ClientConnectorError) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known"
    if error.errno == errno.ECONNREFUSED or "refused" in str(error.os_error).lower():
        return "the connection was refused (is the service running?)"
    return _one_line(error.os_error.strerror or str(error.os_error))


def _seconds(text: str) -> float:
    return min(float(text), 3600.0) if re.fullmatch(r"\d{1,9}(\.\d+)?", text) else 0.0


def _one_line(text: str) -> str:
    text = safe_text(" ".join(text.split()))
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."
