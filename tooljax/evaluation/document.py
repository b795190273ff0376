"""A document of a few kinds of blocks, written as Markdown and as one HTML page that needs nothing beside it.

All text is plain text: what a policy or a tool wrote can become neither markup nor a script in either form.
"""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|~>-])")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { background: #f3f3f3; }
img { max-width: 100%; margin: .5rem 0; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is the document's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Text that flows."""

    text: str


@dataclass(frozen=True)
class Table:
    """A header and rows of as many cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG file beside the document; HTML holds it."""

    png: Path
    text: str


@dataclass(frozen=True)
class Verbatim:
    """Text as it is, folded under its title in HTML."""

    title: str
    text: str


Block = Heading | Paragraph | Table | Picture | Verbatim


def to_markdown(blocks: Sequence[Block]) -> str:
    """The document for a terminal or a code host."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """The document as one page: no script, nothing loaded, pictures inside."""
    titles = [block.text for block in blocks if isinstance(block, Heading) and block.level == 1]
    title = html.escape(titles[0] if titles else "")
    return _PAGE.format(title=title, style=_STYLE, body="\n".join(map(_html, blocks)))


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return "#" * block.level + " " + _plain(block.text)
    if isinstance(block, Paragraph):
        return _plain(block.text)
    if isinstance(block, Table):
        lines = [block.header, ["---"] + ["--:"] * (len(block.header) - 1)]
        head = ["| " + " | ".join(map(_plain, lines[0])) + " |", "|" + "|".join(lines[1]) + "|"]
        return "\n".join(head + ["| " + " | ".join(map(_plain, row)) + " |" for row in block.rows])
    if isinstance(block, Picture):
        return f"![{_plain(block.text)}]({block.png.name})"
    fence = "```"
    while fence in block.text:
        fence += "`"
    return f"{_plain(block.title)}\n\n{fence}text\n{block.text.rstrip()}\n{fence}"


def _plain(text: str) -> str:
    """Text on one line in which nothing is markup; < and & would start HTML, which Markdown lets through."""
    return _MARKUP.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Table):
        rows = [_row("th", block.header), *(_row("td", row) for row in block.rows)]
        return "<table>\n" + "\n".join(rows) + "\n</table>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.png.read_bytes()).decode()
        return f'<img alt="{html.escape(block.text)}" src="data:image/png;base64,{data}">'
    title, text = html.escape(block.title), html.escape(block.text)
    return f"<details><summary>{title}</summary><pre>{text}</pre></details>"


def _row(cell: str, values: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(value)}</{cell}>" for value in values) + "</tr>"
