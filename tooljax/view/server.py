"""The page and its JSON over HTTP, for a browser on this machine. Every answer is to a GET; nothing is ever written.

Texts of trajectories are hostile: tools bring them from anywhere. They leave here as JSON only, the page puts them into
text nodes only, and the browser is told to run no script and load nothing but the files of static/. A page of another
site cannot read the answers: the Host header must name this machine, so no other name can be pointed here (DNS
rebinding).
"""

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web

from tooljax.metrics import describe as describe_metric
from tooljax.store import StoreError
from tooljax.view import conversation
from tooljax.view.library import Library, NotThere, curve
from tooljax.view.query import Filters, Page, parse

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer."""

LIBRARY = web.AppKey("library", Library)

Count = Annotated[int, msgspec.Meta(ge=0)]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that name a run."""

    run: str


class Step(Run, frozen=True, kw_only=True):
    """Parameters that name a step of it."""

    step: Count


class One(Step, frozen=True, kw_only=True):
    """Parameters that name a trajectory of that."""

    index: Count


class Curves(Run, frozen=True, kw_only=True):
    """Parameters of curves."""

    names: str = ""
    """Metrics, with commas between them."""
    points: Annotated[int, msgspec.Meta(ge=2, le=2000)] = 400


class Tokens(One, frozen=True, kw_only=True):
    """Parameters of tokens."""

    stream: Count = 0
    offset: Count = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=conversation.MAX_TOKENS)] = conversation.MAX_TOKENS


def is_loopback(host: str) -> bool:
    """Whether a host, without its port, is this machine as seen from itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def make_app(library: Library) -> web.Application:
    """The application that serves a library."""
    app = web.Application(middlewares=[_guard])
    app[LIBRARY] = library
    app.on_response_prepare.append(_harden)
    app.router.add_get("/", _static)
    app.router.add_get("/static/{name}", _static)
    for name, answer in {
        "runs": runs,
        "steps": steps,
        "metrics": metrics,
        "step": step,
        "trajectories": trajectories,
        "trajectory": trajectory,
        "tokens": tokens,
    }.items():
        app.router.add_get(f"/api/{name}", _json(answer))
    return app


# --- answers: each takes the library and the query's parameters --------------------------------------------------


def runs(library: Library, query: dict[str, str]) -> dict[str, Any]:
    """Every run, with its stored steps counted, the last of them, its last reward and accuracy, and its evaluations."""
    parse(query)
    found = []
    for run in library.runs():
        if library.evaluated(run) is not None:
            continue
        rows = library.metrics(run)
        found.append(
            {
                **_stored(library, run),
                "steps": rows[-1]["step"] if rows else None,
                "reward": _last(rows, "reward/mean"),
                "accuracy": _last(rows, "rollout/accuracy"),
                "evaluations": [_stored(library, name) for name in library.evaluations(run)],
            }
        )
    return {"root": library.root.name, "runs": found}


def _stored(library: Library, run: str) -> dict[str, Any]:
    stored = library.steps(run)
    last = stored[-1] if stored else None
    return {"run": run, "stored_steps": len(stored), "last_stored": last}


def steps(library: Library, query: dict[str, str]) -> dict[str, Any]:
    """The stored steps of a run with what metrics.jsonl says of them."""
    (asked,) = parse(query, Run)
    of_step = {row["step"]: row for row in library.metrics(asked.run)}
    names = ("reward/mean", "rollout/accuracy", "tools/use_rate", "rollout/trajectories")
    if (of := library.evaluated(asked.run)) is not None:
        here = dict(zip(names, (f"eval/{name}" for name in names), strict=True))
        here["rollout/accuracy"] = "eval/accuracy"
    else:
        here = {name: name for name in names}
    found = [
        {"step": n, **{name: of_step.get(n, {}).get(own) for name, own in here.items()}}
        for n in library.steps(asked.run)
    ]
    return {"run": asked.run, "evaluation_of": of, "steps": found}


def metrics(library: Library, query: dict[str, str]) -> dict[str, Any]:
    """Names and meanings of a run's metrics, and the curves of those that are asked for."""
    (asked,) = parse(query, Curves)
    rows = library.metrics(asked.run)
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    known = {name: describe_metric(name) for name in names}
    wanted = [name for name in asked.names.split(",") if name]
    return {
        "names": {
            name: {"meaning": m.meaning if m else "", "unit": m.unit if m else ""}
            for name, m in known.items()
        },
        "curves": {name: curve(rows, name, asked.points) for name in wanted},
    }


def step(library: Library, query: dict[str, str]) -> dict[str, Any]:
    """What a step came to, what its trajectories can be filtered by, and the worst of them."""
    (asked,) = parse(query, Step)
    found = library.step(asked.run, asked.step)
    rewards = [row.reward for row in found.rows if row.reward is not None]
    return {
        "run": asked.run,
        "step": asked.step,
        "trajectories": len(found.rows),
        "notes": found.notes,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "correct": sum(row.correct for row in found.rows),
        "trained_on": sum(not row.dropped for row in found.rows),
        "with_failed_calls": sum(bool(row.errors) for row in found.rows),
        "counts": found.counts(),
        "worst": found.rows[found.worst[0]] if found.worst else None,
        "update": found.header.metrics,
        "reward_weights": found.header.reward_weights,
        "config": found.header.config,
    }


def trajectories(library: Library, query: dict[str, str]) -> dict[str, Any]:
    """A page of a step's trajectories, filtered and ordered."""
    asked, filters, page = parse(query, Step, Filters, Page)
    rows = filters.select(library.step(asked.run, asked.step))
    return {
        "total": len(rows),
        "offset": page.offset,
        "rows": rows[page.offset : page.offset + page.limit],
    }


def trajectory(library: Library, query: dict[str, str]) -> dict[str, Any]:
    """One trajectory without its tokens, the others of its group, and its neighbours in the list of the filters."""
    asked, filters = parse(query, One, Filters)
    found = library.step(asked.run, asked.step)
    record = found.record(asked.index)
    order = [row.index for row in filters.select(found)]
    place = order.index(asked.index) if asked.index in order else None
    group = [row for row in found.rows if row.group == record.group]
    _, problem = conversation.tokenizer_of(library.folder(asked.run))
    return {
        **conversation.describe(record, found.header.tasks.get(record.trajectory.task_id)),
        "index": asked.index,
        "why": found.rows[asked.index].why,
        "correct": found.rows[asked.index].correct,
        "group_members": [
            {"index": row.index, "sample": row.sample, "reward": row.reward, "correct": row.correct}
            for row in group
        ],
        "tokenizer_problem": problem,
        "list": {
            "total": len(order),
            "position": place,
            "previous": order[place - 1] if place else None,
            "next": None if place is None or place + 1 == len(order) else order[place + 1],
        },
    }


def tokens(library: Library, query: dict[str, str]) -> dict[str, Any]:
    """Tokens of one stream of a trajectory."""
    (asked,) = parse(query, Tokens)
    record = library.step(asked.run, asked.step).record(asked.index)
    if asked.stream >= len(record.streams):
        raise NotThere(f"there is no stream {asked.stream}; there are {len(record.streams)}")
    tokenizer, _ = conversation.tokenizer_of(library.folder(asked.run))
    stream = record.streams[asked.stream]
    return conversation.tokens(stream, tokenizer, offset=asked.offset, limit=asked.limit)


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


# --- HTTP --------------------------------------------------------------------------------------------------------


def _json(
    answer: Callable[[Library, dict[str, str]], dict[str, Any]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        library = request.app[LIBRARY]
        try:
            body = await asyncio.to_thread(answer, library, dict(request.query))
        except (NotThere, IndexError) as error:
            return _refusal(404, str(error).strip("'"))
        except StoreError as error:
            return _refusal(422, str(error))
        except ValueError as error:  # msgspec's too
            return _refusal(400, str(error))
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    return handler


def _refusal(status: int, sentence: str) -> web.Response:
    body = msgspec.json.encode({"error": sentence})
    return web.Response(status=status, body=body, content_type="application/json")


async def _static(request: web.Request) -> web.Response:
    """A file of static/: looked up in the folder's listing, so that no name leads out of it."""
    name = request.match_info.get("name", "index.html")
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}
    if name not in files:
        return _refusal(404, "there is no such file")
    return web.Response(
        body=files[name].read_bytes(), content_type=TYPES[files[name].suffix], charset="utf-8"
    )


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    host = re.sub(r":\d*$", "", request.host)
    if not is_loopback(host):
        return _refusal(403, "the Host header names another machine; open the address as printed")
    return await handler(request)


async def _harden(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
