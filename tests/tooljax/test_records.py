"""Data files become tasks with nothing lost, and every fault is named: file, row, field, way out."""

import datetime
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_sidecar import protocol
from rollout_sidecar.protocol import Task
from tooljax.data.records import read_rows, read_tasks, to_task

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def record(**changes):
    """A verl multi-turn record."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": PROMPT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {
            "split": "train",
            "index": 7,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": "4"}}},
        },
        **changes,
    }


def write(path, rows):
    """Writes rows in the format of the suffix."""
    if path.suffix == ".parquet":
        columns = {
            key: None for row in rows for key in row
        }  # pyarrow would only take the first row's
        pq.write_table(pa.Table.from_pylist([{**columns, **row} for row in rows]), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl", ".ndjson"])
def test_a_record_becomes_a_task(tmp_path, suffix):
    path = write(tmp_path / f"train{suffix}", [record(), record(agent_name="single_turn_agent")])
    first, second = read_tasks([path])
    assert first == Task(
        task_id="train:0",
        messages=PROMPT,
        data_source="openai/gsm8k",
        ground_truth="4",
        extra_info=record()["extra_info"],
        tools=None,
        tools_kwargs={"calculator": {"create_kwargs": {"ground_truth": "4"}}},
    )
    assert (second.task_id, second.tools) == ("train:1", [])


def test_fields_that_arrow_adds_are_missing(tmp_path):
    with_search = record(
        prompt=[{"role": "user", "content": "who?", "name": "ann"}],
        agent_name="tool_agent",
        extra_info={
            "tools_kwargs": {"search": {"create_kwargs": {"topk": 3}, "execute_kwargs": {"a": 1}}},
            "interaction_kwargs": {"name": "gsm8k"},
            "tool_selection": ["search"],
        },
    )
    with_both = record(
        extra_info={"tools_kwargs": {"search": {"create_kwargs": {"key": "k"}}, "calculator": None}}
    )
    path = write(tmp_path / "a.parquet", [record(), with_search, with_both])
    # Arrow really does unify: else this test would show nothing.
    assert pq.read_table(path).to_pylist()[0]["extra_info"]["tools_kwargs"]["search"] is None

    first, second, third = read_tasks([path])
    assert first.messages == PROMPT
    assert first.extra_info == record()["extra_info"]
    assert first.tools_kwargs == {"calculator": {"create_kwargs": {"ground_truth": "4"}}}
    assert second.messages == with_search["prompt"]
    assert second.extra_info == with_search["extra_info"]
    assert (second.interaction, first.interaction) == ("gsm8k", "")
    assert second.tools == ["search"]
    assert second.tools_kwargs == with_search["extra_info"]["tools_kwargs"]
    assert third.tools_kwargs == {"search": {"create_kwargs": {"key": "k"}}}


def test_none_is_missing_in_json_too(tmp_path):
    extra_info = {"index": None, "tools_kwargs": {"x": None, "y": {"create_kwargs": None}}}
    rows = [
        record(data_source=None, extra_info=extra_info, agent_name=None),
        record(extra_info=None),
    ]
    first, second = read_tasks([write(tmp_path / "a.jsonl", rows)])
    assert (first.data_source, first.tools, first.tools_kwargs) == ("", None, {"y": {}})
    assert (second.extra_info, second.tools_kwargs) == ({}, {})


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_ground_truth_is_kept_as_it_is(tmp_path, suffix):
    truth = {"numbers": [1, 2], "note": None}
    rows = [record(reward_model={"style": "rule", "ground_truth": truth})]
    assert read_tasks([write(tmp_path / f"a{suffix}", rows)])[0].ground_truth == truth
    del rows[0]["reward_model"]
    assert read_tasks([write(tmp_path / f"b{suffix}", rows)])[0].ground_truth is None


@pytest.mark.parametrize(
    ("agent_name", "selection", "tools"),
    [
        (None, None, None),
        ("tool_agent", None, None),
        ("tool_agent", ["a", "b"], ["a", "b"]),
        (None, [], None),  # as in verl, where an empty selection is no selection
        ("single_turn_agent", ["a"], []),
    ],
)
def test_which_tools_are_offered(agent_name, selection, tools):
    task = to_task(
        record(agent_name=agent_name, extra_info={"tool_selection": selection}), task_id="t"
    )
    assert task.tools == tools


def test_ids_are_unique_and_rows_are_limited_file_by_file(tmp_path):
    paths = []
    for folder in "abc":
        (tmp_path / folder).mkdir()
        paths.append(write(tmp_path / folder / "train.jsonl", [record() for _ in range(3)]))
    paths.insert(1, write(tmp_path / "train#2.jsonl", [record()]))
    ids = [task.task_id for task in read_tasks(paths, max_rows=2)]
    assert ids == [
        *("train:0", "train:1"),
        "train#2:0",
        *("train#3:0", "train#3:1"),
        *("train#4:0", "train#4:1"),
    ]
    assert read_tasks([]) == []


def test_numpy_values_become_plain_ones():
    extra_info = {"index": np.int64(3), "scores": np.array([0.5, 1.0]), "ok": np.bool_(True)}
    truth = {"target": np.array(["a", "b"])}
    task = to_task(
        record(prompt=tuple(PROMPT), extra_info=extra_info, reward_model={"ground_truth": truth}),
        task_id="t",
    )
    assert task.extra_info == {"index": 3, "scores": [0.5, 1.0], "ok": True}
    assert type(task.extra_info["index"]) is int
    assert task.ground_truth == {"target": ["a", "b"]}
    for encoding in (protocol.JSON, protocol.MSGPACK):
        assert protocol.decode(protocol.encode(task, encoding), encoding, Task) == task


def test_messages_with_tool_calls_need_no_content(tmp_path):
    call = {
        "type": "function",
        "function": {"name": "f", "arguments": {"x": None}},
    }
    prompt = [*PROMPT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (task,) = read_tasks([write(tmp_path / "a.jsonl", [record(prompt=prompt)])])
    # JSON has no unified fields: the null that somebody wrote as an argument stays.
    assert task.messages[2] == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_text_parts_are_content(tmp_path):
    prompt = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]
    (task,) = read_tasks([write(tmp_path / "a.parquet", [record(prompt=prompt)])])
    assert task.messages == prompt


def test_json_files_may_hold_lines_blank_lines_and_a_byte_order_mark(tmp_path):
    line = json.dumps({"text": "line\u2028separator"}, ensure_ascii=False)
    path = tmp_path / "a.json"
    path.write_bytes(f"\ufeff{line}\n\n{line}\r\n".encode())
    rows = list(read_rows(path))
    assert [row.values for row in rows] == [{"text": "line\u2028separator"}] * 2
    assert rows[1].number == 1
    assert "row 1 (the first is 0; line 3)" in rows[1].where
    path.write_bytes(f"\ufeff\n[{line}]".encode())
    assert [row.values for row in read_rows(path)] == [{"text": "line\u2028separator"}]


def without(field):
    changed = record()
    del changed[field]
    return changed


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (without("prompt"), "prompt is missing (the row has: data_source, ability, reward_model"),
        (
            record(prompt=[]),
            "prompt must be a list of at least one {role, content} message, got []",
        ),
        (record(prompt=[{"content": "x"}]), "prompt[0].role must be text such as user"),
        (
            record(prompt=[PROMPT[0], {"role": "user"}]),
            "prompt[1].content must be text, got nothing; write an empty string for no text",
        ),
        (
            record(prompt=[{"role": "user", "content": [{"type": "image", "image": "x"}]}]),
            "prompt[0].content must be text, got [{'type': 'image', 'image': 'x'}]",
        ),
        (record(images=["x"]), "images is not empty; only text can be trained on"),
        (record(agent_name="mine"), "agent_name 'mine' is an agent loop of your own"),
        (record(data_source=3), "data_source must be text, got 3"),
        (record(extra_info="x"), "extra_info must be an object, got 'x'"),
        (record(reward_model="x"), "reward_model must be an object with ground_truth, got 'x'"),
        (
            record(extra_info={"tool_selection": "calculator"}),
            "extra_info.tool_selection must be a list of tool names, got 'calculator'",
        ),
        (
            record(extra_info={"tools_kwargs": {"calculator": 1}}),
            "extra_info.tools_kwargs.calculator must be an object, got 1",
        ),
        (
            record(extra_info={"tools_kwargs": {"calculator": {"create_kwargs": 3}}}),
            "extra_info.tools_kwargs.calculator.create_kwargs must be an object, got 3",
        ),
        (
            record(extra_info={"tools_kwargs": {"calculator": {"creat_kwargs": {"a": 1}}}}),
            "extra_info.tools_kwargs.calculator has the unknown key 'creat_kwargs'; did you mean 'create_kwargs'?",
        ),
        (
            record(prompt=[PROMPT[0], {"role": "usr", "content": "x"}]),
            "prompt[1].role is 'usr', expected one of system, developer, user, assistant, tool; did you mean 'user'?",
        ),
    ],
)
def test_a_bad_field_is_named_with_its_file_and_row(tmp_path, suffix, bad, message):
    good = [record()] if suffix != ".parquet" else []  # Arrow refuses columns of mixed types
    path = write(tmp_path / f"a{suffix}", [*good, bad])
    line = f"; line {len(good) + 1}" if suffix == ".jsonl" else ""
    where = f"{path}, row {len(good)} (the first is 0{line}): "
    with pytest.raises(ValueError, match="^" + re.escape(where + message)):
        read_tasks([path])


def test_a_prompt_that_is_missing_in_some_rows(tmp_path):
    path = write(tmp_path / "a.parquet", [record(), without("prompt")])
    with pytest.raises(
        ValueError, match=r"a\.parquet, row 1 \(the first is 0\): prompt is missing"
    ):
        read_tasks([path])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (datetime.date(2026, 1, 2), r"the record: extra_info\.x is a date; only text, numbers"),
        ([b"png"], r"the record: extra_info\.x\[0\] is a bytes"),
        (2**64, r"the record: extra_info\.x does not fit 64 bits; write the number as text"),
        ("\ud83d", r"the record: extra_info\.x holds half of a surrogate pair"),
    ],
)
def test_what_cannot_be_sent_is_refused_when_read(value, message):
    with pytest.raises(ValueError, match=message):
        to_task(record(extra_info={"x": value}), task_id="t")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", r"a\.csv: files of type \.csv cannot be read; convert it to \.parquet"),
        ("a", b"x", r"a: files of type \(no suffix\) cannot be read"),
        ("a.jsonl", b"", r"a\.jsonl: the file has no rows; write it again, or leave it out"),
        ("a.json", b"[]", r"a\.json: the file has no rows"),
        (
            "a.jsonl",
            b'{}\n\n{"a": 1',
            r"row 1 \(the first is 0; line 3\): not valid JSON: Expecting",
        ),
        ("a.jsonl", b"\xff\n", r"row 0 \(the first is 0; line 1\): not valid JSON: 'utf-8' codec"),
        ("a.jsonl", b"[1]\n", r"row 0 .*: a row must be an object with named fields, got \[1\]"),
        ("a.json", b"[{}, 1]", r"row 1 \(the first is 0\): a row must be an object"),
        ("a.json", b"[{},", r"a\.json: not valid JSON: "),
        ("a.json", b'{"a":\n1}', r"each line must be one row, or the whole file one list of rows"),
        ("a.parquet", b"PAR1junk", r"a\.parquet: not a readable Parquet file from row 0 on, write"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(tmp_path / name))


def test_a_parquet_file_without_rows(tmp_path):
    path = write(tmp_path / "a.parquet", [record()])
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ValueError, match=r"a\.parquet: the file has no rows"):
        read_tasks([path])


def test_a_path_that_is_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.jsonl: no such file \(looked from /"):
        read_tasks([tmp_path / "missing.jsonl"])
    with pytest.raises(ValueError, match=r"is a folder; name the files in it"):
        read_tasks([tmp_path])
    with pytest.raises(
        ValueError, match=r"expected a list of files, got the single text 'a\.json'"
    ):
        read_tasks("a.json")
