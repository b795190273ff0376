"""Our parsers against those of smg (Shepherd Model Gateway), over a few thousand generated turns.

TOOLJAX_TEST_SMG names its executable (`pip install smg` in an environment of its own). Where the two disagree, ours has
to be the answer that training wants; `EXPLAINED` says for each kind of disagreement why it is. Rows that are not seen
any more, and disagreements that no row explains, fail.
"""

import asyncio
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import aiohttp
import pytest
from format_cases import TEXTS, tool

from rollout_sidecar.formats import get_format

SMG = os.environ.get("TOOLJAX_TEST_SMG", "")
pytestmark = pytest.mark.skipif(not SMG, reason="set TOOLJAX_TEST_SMG to smg's executable")

PARSERS = {
    "hermes": "qwen",
    "qwen3_coder": "qwen_coder",
    "llama3_json": "llama",
    "pythonic": "pythonic",
    "mistral_v3": "mistral",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek31",
    "deepseek_v32": "deepseek32",
    "deepseek_v4": "deepseek_v4",
    "glm45": "glm45_moe",
    "glm47": "glm47_moe",
    "kimi_k2": "kimik2",
    "minimax_m2": "minimax_m2",
    "gemma4": "gemma4",
}
"""Ours and theirs. smg 1.13 serves no parser for the other formats."""

UNESCAPED = ("qwen3_coder", "deepseek_v32", "deepseek_v4", "glm45", "glm47", "minimax_m2")

ANY = tuple(PARSERS)

Calls = list[tuple[str, Any]]


class Turn(NamedTuple):
    kind: str
    text: str
    arguments: dict[str, Any]
    tools: list[dict[str, Any]]


class Row(NamedTuple):
    formats: tuple[str, ...]
    kinds: tuple[str, ...]
    why: str


WHOLE = ("call", "after text", "after thinking", "two calls", "before text")
CUT = ("cut by 1", "cut by 2", "cut by 5")

EXPLAINED = [
    Row(
        ANY,
        ("call in thinking", "call in open thinking"),
        "smg leaves thinking to a reasoning parser that runs before; a call there must not count",
    ),
    Row(
        UNESCAPED,
        ("bad value", "bad, then good"),
        "smg hands over the text where the schema wants an object; the policy should be told that it is not JSON",
    ),
    Row(
        ("deepseek_v32", "deepseek_v4"),
        ("bad number",),
        'the same for a value that the policy itself marked as string="false"',
    ),
    Row(
        ("pythonic", "gemma4"),
        ("bad value", "bad number"),
        "smg takes a bare word for a text; only literals are values, a variable has none",
    ),
    Row(
        ("llama3_json",),
        ("after text", "after thinking", "two calls", "before text", "bad, then good"),
        "smg reads a turn that is one object and nothing else; calls on lines of their own are as plain",
    ),
    Row(
        ("llama3_json",),
        ("call",),
        "smg looks for <|python_tag|> first, inside a text too; what a text holds is text",
    ),
    Row(
        ("pythonic", "mistral_v3"),
        ("bad, then good",),
        "smg finds one list; a bad one must not hide the next",
    ),
    Row(
        ("hermes", "glm45", "mistral_v3"),
        ("without line breaks",),
        "smg wants the white space of the models' templates around the JSON or the name; it carries no meaning",
    ),
    Row(
        ("gemma4",),
        CUT,
        "smg takes a call whose closing token is missing, as engines strip it when it stops them; ours keep it",
    ),
    Row(
        ("gemma4",),
        WHOLE,
        "smg makes texts of the numbers and words in lists and objects whose items the schema does not describe",
    ),
    Row(
        ("qwen3_coder",),
        WHOLE,
        "smg trims white space off texts; the policy's text is what it wrote",
    ),
    Row(
        ("qwen3_coder", "glm45", "glm47"),
        (*WHOLE, *CUT),
        "smg ends a call at a closing tag inside a text, and runs it without that argument; the text ends it",
    ),
]
"""Every kind of disagreement, and why ours is the answer wanted here."""


def some_arguments() -> Iterator[dict[str, Any]]:
    yield {}
    yield {"city": "Zürich", "days": 3, "exact": True, "note": None}
    yield {"s": "3", "t": "true", "u": "", "v": " padded "}
    yield {"code": "if a < b && c > d:\n    print('x')\n", "x": 1.5}
    yield {"deep": {"k": [1, {"z": "y"}, None]}, "big": 2**62, "neg": -5}
    source = random.Random(0)
    texts = [text for text in TEXTS if "\x00" not in text and "\r" not in text]

    def value(depth: int = 0) -> Any:
        kind = source.randrange(7 if depth < 2 else 5)
        if kind == 5:
            return [value(depth + 1) for _ in range(source.randrange(3))]
        if kind == 6:
            return {source.choice("abc"): value(depth + 1) for _ in range(source.randrange(3))}
        return [
            source.choice(texts),
            source.randrange(-1000, 1000),
            source.random(),
            source.choice([True, False, None]),
            source.choice(texts),
        ][kind]

    for _ in range(20):
        yield {f"p{i}": value() for i in range(source.randrange(1, 4))}


def turns(name: str) -> Iterator[Turn]:
    found = get_format(name)
    opened, closed = found.think
    broken = found.render_call("f", {"p": 12345})
    other = tool("g", {})
    for arguments in some_arguments():
        try:
            call = found.render_calls([("f", arguments)])
            two = found.render_calls([("f", arguments), ("g", {})])
        except ValueError:  # a text that this format cannot write
            continue
        for kind, text in [
            ("call", call),
            ("after text", found.render_turn("Let me see.", [("f", arguments)])),
            ("two calls", two),
            ("after thinking", f"{opened}\nhm\n{closed}\n\n{call}"),
            ("call in thinking", f"{opened}\n{call}\n{closed}\n\nNo."),
            ("call in open thinking", f"{opened}\n{call}"),
            ("before text", f"{call}\nDone."),
            *((f"cut by {k}", call[:-k]) for k in (1, 2, 5)),
            ("cut in half", call[: len(call) // 2]),
        ]:
            yield Turn(kind, text, arguments, [tool("f", arguments), other])
    integer, any_object = tool("f", {"p": 1}), tool("f", {"p": {}})
    yield Turn("bad value", broken.replace("12345", "{x:1}"), {}, [any_object])
    yield Turn("bad number", broken.replace("12345", "three"), {}, [integer])
    good = found.render_call("g", {})
    yield Turn(
        "bad, then good", broken.replace("12345", "{x:") + "\n" + good, {}, [any_object, other]
    )
    yield Turn("unknown tool", found.render_call("h", {"a": "x"}), {}, [other])
    bare = found.render_call("f", {"p": 1}).replace("\n", "").replace("] [", "][")
    yield Turn("without line breaks", bare, {}, [integer])
    for text in ("", "The answer is 4.", '{"answer": 4}', "[1, 2]"):
        yield Turn("answer", text, {}, [other])


@pytest.fixture
async def smg(tmp_path) -> AsyncIterator[str]:
    ports = free_ports(3)
    url = f"http://127.0.0.1:{ports[0]}"
    command = ["launch", "--host", "127.0.0.1", "--port", str(ports[0]), "--prometheus-port"]
    command += [str(ports[1]), "--worker-urls", f"http://127.0.0.1:{ports[2]}"]
    with open(tmp_path / "smg.log", "wb") as log:
        process = await asyncio.create_subprocess_exec(SMG, *command, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(200):
                try:
                    await session.get(url)
                    break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        yield url
    finally:
        process.kill()
        await process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


async def test_every_disagreement_is_explained(smg: str):
    seen: set[int] = set()
    unexplained = []
    compared = 0
    async with aiohttp.ClientSession() as session:
        for name, parser in PARSERS.items():
            for turn in turns(name):
                # smg's parser knows the list only with a space before it, as in Mistral 7B's template.
                text = turn.text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
                if turn.kind == "without line breaks":
                    text = turn.text
                parsed = get_format(name).parse(text, tools=turn.tools)
                ours = [(call.name, call.arguments) for call in parsed if not call.error]
                theirs = await parse_with_smg(session, smg, parser, text, turn.tools)
                compared += 1
                if canonical(ours) == canonical(theirs):
                    continue
                rows = [
                    i
                    for i, row in enumerate(EXPLAINED)
                    if name in row.formats and turn.kind in row.kinds
                ]
                seen.update(rows)
                if not rows or not ours_is_right(turn, ours):
                    unexplained.append((name, turn.kind, text, ours, theirs))
    assert compared > 2000
    assert not unexplained
    assert seen == set(range(len(EXPLAINED)))


def ours_is_right(turn: Turn, ours: Calls) -> bool:
    """What a turn of this kind holds, whoever reads it."""
    call, other = ("f", turn.arguments), ("g", {})
    expected = {
        "call": [call],
        "after text": [call],
        "after thinking": [call],
        "before text": [call],
        "two calls": [call, other],
        "without line breaks": [("f", {"p": 1})],
        "bad, then good": [other],
    }
    if turn.kind == "bad value" and ours:  # an object with a bare key, in Gemma's notation
        return ours == [("f", {"p": {"x": 1}})]
    return canonical(ours) == canonical(expected.get(turn.kind, []))


def canonical(calls: Calls) -> str:
    """Calls as text; 1 and 1.0 are one number to JSON readers."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps([[name, plain(arguments)] for name, arguments in calls], sort_keys=True)


async def parse_with_smg(
    session: aiohttp.ClientSession, url: str, parser: str, text: str, tools: list[dict[str, Any]]
) -> Calls:
    body = {"text": text, "tool_call_parser": parser, "tools": tools}
    async with session.post(f"{url}/parse/function_call", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    functions = [call["function"] for call in answer["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]
