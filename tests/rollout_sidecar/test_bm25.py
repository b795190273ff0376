"""The embedded index: ranking against a reference, order, text, the stored index, the server."""

import json
import math
import subprocess
import sys
import time
from collections import Counter

import aiohttp
import numpy as np
import pytest

from rollout_sidecar.tools import bm25_index
from rollout_sidecar.tools.bm25 import Bm25SearchTool
from rollout_sidecar.tools.bm25_index import open_index, words
from rollout_sidecar.tools.search import SearchTool


def write(file, documents):
    lines = [
        json.dumps(each if isinstance(each, dict) else {"id": f"d{i}", "contents": each})
        for i, each in enumerate(documents)
    ]
    file.write_text("\n".join(lines))
    return file


def ids(index, query, topk=10):
    return [entry.id for entry, _ in index.search(query, topk)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path


# --- ranking ----------------------------------------------------------------------------------------------------


def reference(documents, query, k1=1.5, b=0.75):
    split = [words(text) for text in documents]
    average = sum(map(len, split)) / len(split)
    scores = []
    for document in split:
        count, score = Counter(document), 0.0
        for word in words(query):
            df = sum(word in other for other in split)
            idf = math.log(1 + (len(split) - df + 0.5) / (df + 0.5))
            tf = count[word]
            score += idf * tf / (tf + k1 * (1 - b + b * len(document) / average))
        scores.append(score)
    return scores


def test_scores_and_order_are_those_of_the_formula(folder):
    rng = np.random.default_rng(0)
    documents = [
        " ".join(f"w{min(n, 40)}" for n in rng.zipf(1.4, rng.integers(3, 30))) for _ in range(60)
    ]
    index = open_index(write(folder / "c.jsonl", documents), use_cache=False)
    for query in ("w1 w2", "w3 w7 w40", "w5 w5 nowhere"):
        expected = reference(documents, query)
        found = index.search(query, 60)
        assert len(found) == sum(score > 0 for score in expected)
        for entry, score in found:
            assert score == pytest.approx(expected[int(entry.id[1:])], rel=1e-5)
        assert [score for _, score in found] == sorted((s for _, s in found), reverse=True)


def test_equal_scores_come_in_the_order_of_the_file(folder):
    documents = ["same words here"] * 50 + ["same words here twice same"] + ["same words here"] * 49
    index = open_index(write(folder / "c.jsonl", documents), use_cache=False)
    order = ["d50", *(f"d{i}" for i in range(100) if i != 50)]
    for topk in (1, 2, 7, 99, 100, 1000):
        assert ids(index, "same", topk) == order[:topk]


def test_what_shares_no_word_is_not_found(folder):
    index = open_index(write(folder / "c.jsonl", ["one two", "two three", "!!!"]), use_cache=False)
    assert ids(index, "two", 3) == ["d0", "d1"]
    for query in ("", " ", "?!", "four"):
        assert index.search(query, 3) == []
    assert index.search("two", 0) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The CAT's 3rd_hat, 1.5!", ["the", "cat", "s", "3rd_hat", "1", "5"]),
        ("Café naïve Straße", ["cafe", "naive", "strasse"]),
        ("ﬁne №5 ½", ["fine", "no5", "1", "2"]),
        ("東京タワー is tall", ["東", "京", "タ", "ワ", "ー", "is", "tall"]),
        ("Привет, МИР", ["привет", "мир"]),
        ("\ud800x", ["x"]),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


def test_unicode_is_found(folder):
    index = open_index(
        write(folder / "c.jsonl", ["Tōkyō\n東京は首都", "Zürich\nStadt"]), use_cache=False
    )
    assert ids(index, "zurich") == ["d1"]
    assert ids(index, "首都") == ["d0"]
    assert ids(index, "TOKYO") == ["d0"]


# --- the file ---------------------------------------------------------------------------------------------------


def test_both_kinds_of_documents(folder):
    documents = [
        {"id": 7, "contents": "A\nalpha"},
        {"title": "B", "text": "beta\ngamma"},
        {"text": "delta"},
    ]
    file = write(folder / "c.jsonl", documents)
    file.write_text(file.read_text() + "\n\n  \n")
    entries = open_index(file, use_cache=False).entries
    assert entries == [("7", "A\nalpha"), ("1", "B\nbeta\ngamma"), ("2", "\ndelta")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"contents": "a"}\n{"contents"', r"c\.jsonl:2: not valid JSON"),
        ('{"contents": 1}', r'c\.jsonl:1: expected {"id", "contents"} or {"title", "text"}, got'),
        ("[1]", r"c\.jsonl:1: expected"),
        ("\n", r"c\.jsonl has no documents"),
        ('{"contents": "?!"}', "the corpus has no words"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused(folder, text, problem):
    file = folder / "c.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        open_index(file)
    assert list(folder.iterdir()) == [file]


def test_a_missing_file_is_told(folder):
    with pytest.raises(ValueError, match="no such corpus; expected a JSONL file"):
        open_index(folder / "none.jsonl")


# --- the stored index -------------------------------------------------------------------------------------------


def stored(folder):
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_the_index_is_built_once(folder, caplog):
    file = write(folder / "c.jsonl", ["one two", "two three"])
    with caplog.at_level("INFO"):
        first = open_index(file)
        second = open_index(file)
    assert [": built " in r.message for r in caplog.records if r.name == bm25_index.__name__] == [
        True,
        False,
    ]
    assert first.search("two three", 2) == second.search("two three", 2)
    assert len(stored(folder)) == 1
    open_index(file, k1=1.2)
    write(file, ["one two", "two three", "three four"])
    assert ids(open_index(file), "four") == ["d2"]
    assert len(stored(folder)) == 3


@pytest.mark.parametrize("name", ["indptr.csc.index.npy", "vocab.index.json", "params.index.json"])
def test_a_damaged_index_is_built_again(folder, name, caplog):
    file = write(folder / "c.jsonl", ["one two", "two three"])
    expected = open_index(file).search("three", 2)
    damaged = stored(folder)[0] / name
    damaged.write_bytes(damaged.read_bytes()[:10])
    assert open_index(file).search("three", 2) == expected
    assert "is damaged" in caplog.text
    assert len(damaged.read_bytes()) > 10
    assert len(stored(folder)) == 1


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(folder, monkeypatch, caplog):
    file = write(folder / "c.jsonl", ["one two"])

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    assert ids(open_index(file), "one") == ["d0"]
    assert "could not be stored beside its file" in caplog.text


# --- the tool and the server ------------------------------------------------------------------------------------


async def test_the_tool_shows_what_a_retrieval_server_would(folder):
    file = write(folder / "c.jsonl", ["Alpha\none two", "Beta\ntwo three"])
    tool = Bm25SearchTool({"corpus": str(file), "topk": 2, "type": "native"}, None)
    await tool.startup()
    response, reward, metrics = await tool.execute("i", {"query_list": ["two", "three"]})
    await tool.shutdown()
    assert json.loads(response.text or "")["result"] == (
        "Doc 1 (Title: Alpha)\none two\n\nDoc 2 (Title: Beta)\ntwo three\n---\n"
        "Doc 1 (Title: Beta)\ntwo three"
    )
    assert (reward, metrics) == (0.0, {"queries": 2, "documents": 3, "status": "success"})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "corpus is None, expected the path of a JSONL file"),
        ({"corpus": "c", "b": 2}, "b is 2, expected a number from 0 to 1"),
        ({"corpus": "c", "cache": "no"}, "cache is 'no', expected true or false"),
    ],
)
def test_config_that_cannot_work_is_refused(config, problem):
    with pytest.raises(ValueError, match=problem):
        Bm25SearchTool(config, None)


async def test_the_server_answers_the_retrieval_client(folder):
    """In a process of its own; and there, JAX stays unloaded although it is installed."""
    file = write(folder / "c.jsonl", ["Alpha\none two", "Beta\ntwo three"])
    code = (
        "import sys; from rollout_sidecar.tools import bm25, bm25_index; bm25_index._import_bm25s();"
        f"print('jax' in sys.modules, flush=True); bm25.main(['serve', '--corpus', {str(file)!r}, '--port', '0'])"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "False\n"
        line = server.stdout.readline()
        assert line.startswith("2 documents at http://127.0.0.1:")
        tool = SearchTool({"retrieval_service_url": line.split()[-1], "topk": 1}, None)
        response, _, _ = await tool.execute("i", {"query_list": ["three"]})
        assert response.text == '{"result": "Doc 1 (Title: Beta)\\ntwo three"}'
        for body, problem in (
            ({"queries": "x"}, "queries must be a list of texts"),
            ({"queries": ["x"], "topk": -1}, "topk must be a whole number"),
        ):
            with pytest.raises(Exception, match=f"status 422: {problem}"):
                await tool._http.request_json("POST", tool._url, body=body, timeout_s=5)
        async with aiohttp.ClientSession() as session, session.post(tool._url, data=b"bad") as bad:
            assert bad.status == 422
            assert (await bad.json())["detail"].startswith("the body is not JSON: Expecting value")
        await tool.shutdown()
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


def test_a_larger_corpus_is_quick(folder):
    """5,000 documents; the 50,000 of the docstring take ten times as long."""
    rng = np.random.default_rng(0)
    drawn = np.minimum(rng.zipf(1.3, (5_000, 100)), 30_000)
    file = write(folder / "c.jsonl", [" ".join(f"w{n}" for n in row) for row in drawn])
    index = open_index(file, use_cache=False)
    started = time.monotonic()
    for n in range(100):
        index.search(f"w1 w2 w{n}", 3)
    assert time.monotonic() - started < 2.0
