"""The sidecar's HTTP interface: the routes of protocol version 1, authentication, limits, and error answers.

Every answer with status 400 or above has an ErrorBody. Rollout streams are NDJSON lines, or MessagePack frames with a
4-byte big-endian length before each; an empty line, or a length of 0, only says that the sidecar is alive.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web

from rollout_sidecar.engine_memory import release_memory, resume_memory, served_weights
from rollout_sidecar.errors import RequestError, describe
from rollout_sidecar.protocol import (
    INSTANCE_HEADER,
    JSON,
    JSON_LINES,
    MSGPACK,
    PROTOCOL_VERSION,
    ErrorBody,
    Fault,
    Info,
    RolloutRequest,
    WeightsCommit,
    WeightsManifest,
    decode,
    encode,
)
from rollout_sidecar.rollout_stream import Reader, RolloutStream
from rollout_sidecar.sidecar import ServerOptions, Sidecar, check_exposure

__all__ = ["ServerOptions", "Sidecar", "check_exposure", "create_app"]

T = TypeVar("T")

OPEN_ROUTES = frozenset({"/healthz", "/readyz"})
"""Answered without a token: a launcher or load balancer asks for nothing else."""

_log = logging.getLogger(__name__)


SIDECAR = web.AppKey("sidecar", Sidecar)


def create_app(sidecar: Sidecar) -> web.Application:
    """The application. Starting and stopping the sidecar is the caller's."""
    app = web.Application(
        middlewares=[_answer_errors, _authenticate], client_max_size=sidecar.options.max_body_bytes
    )
    app[SIDECAR] = sidecar
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
            web.get("/metrics", _metrics),
            web.get("/v1/info", _info),
            web.post("/v1/rollouts", _post_rollouts),
            web.get("/v1/rollouts/{request_id}", _get_rollouts),
            web.delete("/v1/rollouts/{request_id}", _delete_rollouts),
            web.get("/v1/weights", _served_weights),
            web.post("/v1/engine/release", _release_engine),
            web.post("/v1/engine/resume", _resume_engine),
            web.post("/v1/weights/{version}", _begin_weights),
            web.put("/v1/weights/{version}/parts/{part}", _put_part),
            web.post("/v1/weights/{version}/commit", _commit_weights),
        ]
    )
    return app


# --- middlewares ------------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes an ErrorBody; every answer is counted."""
    try:
        response = await handler(request)
    except RequestError as error:
        response = _failed(request, error)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[SIDECAR].options.max_body_bytes
        response = _failed(
            request,
            RequestError(
                413,
                "too_large",
                f"the body exceeds this sidecar's {limit} bytes; send less at once, or start it with a"
                " larger --max_body_bytes",
            ),
        )
    except web.HTTPException as error:
        kind = error.reason.lower().replace(" ", "_")
        message = f"{error.reason}: {request.method} {request.path}"
        response = _failed(request, RequestError(error.status, kind, message))
        if hdrs.ALLOW in error.headers:
            response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        response = _failed(request, RequestError(500, "internal", describe(error)))
    _count(request, response.status)
    return response


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request.app[SIDECAR].options.token
    if token and request.path not in OPEN_ROUTES:
        given = request.headers.get(hdrs.AUTHORIZATION, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise RequestError(
                401, "unauthorized", "this sidecar wants the header Authorization: Bearer <token>"
            )
    return await handler(request)


def _count(request: web.Request, status: int) -> None:
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    method = request.method if resource is not None else "any"
    request.app[SIDECAR].metrics.count(
        "http_requests_total", method=method, route=route, status=str(status)
    )


def _failed(request: web.Request, error: RequestError) -> web.Response:
    fault = Fault(kind=error.kind, message=error.message, field=error.field)
    return _answer(request, ErrorBody(error=fault), error.status)


# --- bodies -----------------------------------------------------------------------------------------------------


def _answer_type(request: web.Request) -> str:
    """MessagePack if the client accepts it, or says nothing and sends it."""
    accept = request.headers.get(hdrs.ACCEPT, "")
    if accept in ("", "*/*"):
        accept = request.content_type
    return MSGPACK if MSGPACK in accept else JSON


def _answer(request: web.Request, value: Any, status: int = 200) -> web.Response:
    content_type = _answer_type(request)
    return web.Response(body=encode(value, content_type), status=status, content_type=content_type)


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except ConnectionError as error:  # nobody will read this answer, but it ends the request
        raise RequestError(
            400, "disconnected", "the connection was lost within the body"
        ) from error


async def _read(request: web.Request, wire_type: type[T]) -> T:
    body = await _body(request)
    content_type = MSGPACK if request.content_type == MSGPACK else JSON
    try:
        return decode(body, content_type, wire_type)
    except msgspec.ValidationError as error:
        message = str(error)
        # msgspec ends its messages with the path: "Expected `int`, got `str` - at `$.limits.max_turns`".
        field = message.rpartition(" - at `")[2].rstrip("`") if " - at `" in message else "$"
        raise RequestError(400, "invalid_request", message, field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            400, "invalid_body", f"the body is not valid {content_type}: {describe(error)}"
        ) from error


def _integer(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise RequestError(
            400, "invalid_request", f"{what} must be a whole number, got {text[:40]!r}", what
        )
    return int(text)


# --- routes -----------------------------------------------------------------------------------------------------


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"alive": True})


async def _readyz(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    version = request.query.get("version")
    why = sidecar.why_not_ready(None if version is None else _integer(version, "version"))
    if not why:
        return web.json_response({"ready": True})
    raise RequestError(503, "not_ready", why)


async def _metrics(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    text = sidecar.metrics.render() + await sidecar.engine_metrics()
    return web.Response(
        body=text.encode(), headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"}
    )


async def _info(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    agent, engine = sidecar.agent, sidecar.agent.engine
    sidecar.require_started()
    info = Info(
        protocol_version=PROTOCOL_VERSION,
        model=sidecar.options.model,
        vocab_size=agent.tokenizer.vocab_size,
        vocab_hash=agent.tokenizer.vocab_hash,
        engine=engine.name,
        policy_version=engine.policy_version,
        tool_format=agent.tool_format.name,
        tools=[tool.tool_schema for tool in agent.tools.values()],
        max_model_tokens=engine.max_model_tokens,
        content_hash=sidecar.weights.content_hash,
        instance=sidecar.instance,
        max_concurrent=sidecar.max_concurrent,
    )
    return _answer(request, info)


async def _post_rollouts(request: web.Request) -> web.StreamResponse:
    sidecar = request.app[SIDECAR]
    rollout_request = await _read(request, RolloutRequest)
    return await _stream(request, sidecar.rollouts.submit(rollout_request, sidecar.admit))


async def _get_rollouts(request: web.Request) -> web.StreamResponse:
    index = _integer(request.query.get("from", "0"), "from")
    stream = request.app[SIDECAR].rollouts.get(request.match_info["request_id"])
    return await _stream(request, stream, index)


async def _delete_rollouts(request: web.Request) -> web.Response:
    rollouts = request.app[SIDECAR].rollouts
    some = request.query.get("rollouts")
    ordinals = None if some is None else [_integer(text, "rollouts") for text in some.split(",")]
    stream = await rollouts.abort(request.match_info["request_id"], ordinals)
    return web.json_response({"request_id": stream.request_id, "frames": len(stream.frames)})


async def _stream(
    request: web.Request, stream: RolloutStream, index: int = 0
) -> web.StreamResponse:
    """Sends frames as they come. A reader that goes away changes nothing: the request runs on."""
    binary = _answer_type(request) == MSGPACK
    response = web.StreamResponse()
    response.content_type = MSGPACK if binary else JSON_LINES
    response.headers[INSTANCE_HEADER] = request.app[SIDECAR].instance
    alive_s = request.app[SIDECAR].options.alive_s
    reader = Reader(stream, index)
    try:
        await response.prepare(request)
        while not reader.done:
            for frame in await reader.read(alive_s) or [b""]:
                await response.write(_framed(frame, binary))
        await response.write_eof()
    except ConnectionError:
        _log.info("a reader of %s went away before frame %d", stream.request_id, reader.index)
    return response


def _framed(frame: bytes, binary: bool) -> bytes:
    if binary:
        return len(frame).to_bytes(4, "big") + frame
    return msgspec.json.encode(msgspec.msgpack.decode(frame)) + b"\n" if frame else b"\n"


async def _begin_weights(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    sidecar.require_started()
    version = _integer(request.match_info["version"], "version")
    manifest = await _read(request, WeightsManifest)
    return _answer(request, sidecar.weights.begin(version, manifest))


async def _put_part(request: web.Request) -> web.Response:
    version = _integer(request.match_info["version"], "version")
    part = _integer(request.match_info["part"], "part")
    push_id = request.query.get("push_id", "")
    weights = request.app[SIDECAR].weights
    try:
        status = await weights.receive(version, part, request.content.iter_any(), push_id)
    except ConnectionError as error:  # as in _body
        raise RequestError(
            400, "disconnected", "the connection was lost within the body"
        ) from error
    return _answer(request, status)


async def _commit_weights(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    version = _integer(request.match_info["version"], "version")
    order = await _read(request, WeightsCommit) if request.body_exists else WeightsCommit()
    try:
        committed = await sidecar.weights.commit(version, order)
    except RequestError as error:
        sidecar.metrics.count("weight_commits_total", result=error.kind)
        raise
    sidecar.metrics.count("weight_commits_total", result="ok")
    return _answer(request, committed)


async def _served_weights(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    sidecar.require_started()
    return _answer(request, await served_weights(sidecar.agent.engine, sidecar.weights))


async def _release_engine(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    sidecar.require_started()
    return _answer(request, await release_memory(sidecar.agent.engine, sidecar.weights))


async def _resume_engine(request: web.Request) -> web.Response:
    sidecar = request.app[SIDECAR]
    sidecar.require_started()
    return _answer(request, await resume_memory(sidecar.agent.engine, sidecar.weights))
