"""A BM25 index over a JSONL file, in memory: search without a server. The scores are those of the library bm25s.

A line of the file is {"id", "contents"} as in Search-R1's corpora (the first line of contents is the title), or
{"title", "text"}. Text is folded for searching (case, accents, compatibility forms) and cut into words; Chinese and
Japanese, which have no spaces, into characters. No word is left out and none is stemmed.

The index is kept in a folder beside the file, named after the contents of the file and the settings, so it is built
once and can never be out of date; it appears there as a whole or not at all. Folders of earlier contents are not
removed. Documents stay in memory: 50,000 of 100 words take 7 s and 290 MB to build, 1.2 s and 130 MB to open again, and
0.3 ms a query (2 CPU cores, 2026-11-30). A corpus of many millions needs a retrieval server.

Equal scores come in the order of the file, and documents that share no word with the query not at all.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rollout_sidecar.errors import safe_text

_log = logging.getLogger(__name__)

K1, B = 1.5, 0.75
MAX_QUERY_WORDS = 256
"""Further words of a query are not looked at."""

# Part of the name of the stored index: change it with anything that changes what is in there.
_LAYOUT = "1"

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Entry(NamedTuple):
    """A document of the corpus."""

    id: str
    contents: str
    """Title, line break, text."""


class Bm25Index:
    """Made by `open_index`. Searching is safe from several threads at once."""

    def __init__(self, entries: list[Entry], scores: Any):
        """`scores` is a bm25s.BM25 over these entries."""
        self.entries = entries
        self._scores = scores

    def search(self, query: str, topk: int) -> list[tuple[Entry, float]]:
        """The best entries with their scores, best first; fewer than topk if fewer share a word with the query."""
        vocabulary = self._scores.vocab_dict
        ids = [vocabulary[word] for word in words(query)[:MAX_QUERY_WORDS] if word in vocabulary]
        if not ids or topk < 1:
            return []
        scores = self._scores.get_scores_from_ids(ids)
        if topk < len(scores):
            # Everything that ties with the last place is kept until the file's order has decided.
            least = np.partition(scores, len(scores) - topk)[len(scores) - topk]
            candidates = np.flatnonzero(scores >= max(least, np.finfo(scores.dtype).tiny))
        else:
            candidates = np.flatnonzero(scores > 0)
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
        return [(self.entries[i], float(scores[i])) for i in best]


def open_index(
    corpus: str | Path, *, k1: float = K1, b: float = B, use_cache: bool = True
) -> Bm25Index:
    """The index of a JSONL file: opened if it was built before, else built. ValueError names the line at fault.

    Takes long for a large file: call it in a thread.
    """
    bm25s = _import_bm25s()
    file = Path(corpus)
    started = time.monotonic()
    entries, digest = _read(file)
    settings = f"{_LAYOUT} {k1!r} {b!r} {bm25s.__version__}"
    key = xxhash.xxh3_128_hexdigest(digest + settings.encode())
    folder = file.with_name(f"{file.name}.bm25-{key}")
    scores = _load(bm25s, folder, len(entries)) if use_cache else None
    how = "opened"
    if scores is None:
        how = "built"
        scores = bm25s.BM25(k1=k1, b=b)
        scores.index(
            bm25s.tokenization.Tokenized(*_numbered(entry.contents for entry in entries)),
            create_empty_token=False,
            show_progress=False,
        )
        if use_cache:
            _save(scores, folder)
    _log.info(
        "%s: %s the index of %d documents in %.1f s",
        file,
        how,
        len(entries),
        time.monotonic() - started,
    )
    return Bm25Index(entries, scores)


def words(text: str) -> list[str]:
    """What is searched for: folded words, in order."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text).translate(_marks())
    return _WORD.findall(text.casefold())


@cache
def _marks() -> dict[int, None]:
    return {code: None for code in range(0x10000) if unicodedata.combining(chr(code))}


def _numbered(texts: Iterable[str]) -> tuple[list[list[int]], dict[str, int]]:
    """Each text's words as numbers, in order of first appearance: the same in every process."""
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in texts]
    if not vocabulary:
        raise ValueError("the corpus has no words, so nothing can be found in it")
    return ids, vocabulary


def _read(file: Path) -> tuple[list[Entry], bytes]:
    """The documents, and a hash of the file."""
    if not file.is_file():
        raise ValueError(f"{file}: no such corpus; expected a JSONL file of documents")
    digest = xxhash.xxh3_128()
    entries = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            digest.update(line)
            if line.strip():
                entries.append(_entry(line, f"{file}:{number}", len(entries)))
    if not entries:
        raise ValueError(f"{file} has no documents")
    return entries, digest.digest()


def _entry(line: bytes, where: str, index: int) -> Entry:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error
    record = record if isinstance(record, dict) else {}
    contents = record.get("contents")
    if contents is None and isinstance(record.get("text"), str):
        contents = f"{record.get('title') or ''}\n{record['text']}"
    if not isinstance(contents, str):
        raise ValueError(
            f'{where}: expected {{"id", "contents"}} or {{"title", "text"}}, got {line[:80]!r}'
        )
    return Entry(str(record.get("id", index)), safe_text(contents))


def _load(bm25s: Any, folder: Path, documents: int) -> Any:
    """The stored index; None if there is none, or it is damaged."""
    if not folder.is_dir():
        return None
    try:
        scores = bm25s.BM25.load(folder, load_corpus=False, show_progress=False)
        data, indices, indptr = (scores.scores[name] for name in ("data", "indices", "indptr"))
        whole = (
            len(indptr) == len(scores.vocab_dict) + 1
            and len(data) == len(indices) == indptr[-1]
            and indices.max(initial=0) < documents == scores.scores["num_docs"]
        )
    except (OSError, ValueError, KeyError, EOFError, TypeError) as error:
        _log.warning("%s is damaged (%s), and is built again", folder, error)
        return None
    return scores if whole else None


def _save(scores: Any, folder: Path) -> None:
    """Stores the index as a whole or not at all. A folder that cannot be written to is no reason to stop."""
    temporary = ""
    try:
        temporary = tempfile.mkdtemp(prefix=".bm25-", dir=folder.parent)
        scores.save(temporary, show_progress=False)
        os.chmod(temporary, 0o755)
        if folder.exists():  # a damaged one, or another process was faster
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    except OSError as error:
        _log.warning(
            "the index could not be stored beside its file, and is built each time: %s", error
        )
        shutil.rmtree(temporary or folder, ignore_errors=True)


def _import_bm25s() -> Any:
    if "bm25s" in sys.modules:
        return sys.modules["bm25s"]
    try:
        with _without("jax"):
            import bm25s
    except ImportError as error:
        raise ImportError(
            f"BM25 search needs the library bm25s ({error}): pip install 'tooljax[tools]'"
        ) from error
    return bm25s


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Makes `import module` fail. Where JAX is installed, bm25s imports it and runs a computation when it is itself
    imported, which would take hold of every accelerator of the machine. A process that has JAX already goes on."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
