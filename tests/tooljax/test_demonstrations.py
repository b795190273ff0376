"""Demonstrations from JSON Lines and Parquet, and their batches."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tooljax.data.demonstrations import Demonstration, DemonstrationSource, read_demonstrations

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "default": None}}},
    },
}
CALL = {"type": "function", "function": {"name": "calculator", "arguments": '{"x": "2+2"}'}}
MESSAGES = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "#### 4"},
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_lines(tmp_path):
    plain = MESSAGES[::3]
    rows = [
        {"messages": MESSAGES, "tools": [SCHEMA]},
        {"messages": plain, "tools": None},
        {"messages": plain},
        {"messages": plain, "tools": []},
    ]
    assert read_demonstrations([write_lines(tmp_path / "d.jsonl", rows)]) == [
        Demonstration(MESSAGES, [SCHEMA], "d:0"),
        Demonstration(plain, None, "d:1"),
        Demonstration(plain, None, "d:2"),
        Demonstration(plain, None, "d:3"),
    ]


def test_parquet(tmp_path):
    other = {"type": "function", "function": {"name": "search", "description": "Finds."}}
    rows = [
        {"messages": MESSAGES, "tools": json.dumps([SCHEMA, other])},
        {"messages": MESSAGES[::3], "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "text.parquet")
    schemas = [{"messages": MESSAGES, "tools": [other, {**other, "function": {"name": "x"}}]}]
    pq.write_table(pa.Table.from_pylist(schemas), tmp_path / "schemas.parquet")
    read = read_demonstrations([tmp_path / "text.parquet", tmp_path / "schemas.parquet"])
    assert read == [
        Demonstration(MESSAGES, [SCHEMA, other], "text:0"),
        Demonstration(MESSAGES[::3], None, "text:1"),
        # "description" of the second schema, which Arrow filled in with None, is left out again
        Demonstration(MESSAGES, schemas[0]["tools"], "schemas:0"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": []}, "messages is missing (the row has: prompt); a demonstration is"),
        ({"messages": "x"}, "messages must be a list of at least one {role, content} message"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content must be text, got nothing"),
        (
            {"messages": MESSAGES[:1]},
            "messages has no assistant message, so there is nothing to imitate; leave the row out",
        ),
        ({"messages": MESSAGES, "tools": "[{"}, "tools is text, but not valid JSON: Expecting"),
        ({"messages": MESSAGES, "tools": {}}, "tools must be a list of function schemas, got {}"),
        (
            {"messages": MESSAGES, "tools": [SCHEMA, {"name": "f"}]},
            'tools[1] must be {"type": "function", "function": {"name": ..., "parameters": ...}}, '
            "got {'name': 'f'}",
        ),
    ],
)
def test_a_bad_field_is_named_with_its_file_and_row(tmp_path, row, message):
    path = write_lines(tmp_path / "d.jsonl", [{"messages": MESSAGES}, row])
    where = f"{path}, row 1 (the first is 0; line 2): "
    with pytest.raises(ValueError, match="^" + re.escape(where + message)):
        read_demonstrations([path])


def test_batches_are_reproducible_and_name_their_own_settings():
    rows = [Demonstration(MESSAGES, None, f"d:{i}") for i in range(5)]
    one, two = (DemonstrationSource(rows, per_step=2, seed=3, shuffle=True) for _ in range(2))
    one.next()
    two.restore(json.loads(json.dumps(one.state())))
    assert two.next() == one.next()
    with pytest.raises(
        ValueError, match=r"sft\.conversations_per_step=6 does not fit 5 demonstrat"
    ):
        DemonstrationSource(rows, per_step=6, seed=0, shuffle=True)
    with pytest.raises(ValueError, match=r"no demonstrations; name their files in sft\.demonst"):
        DemonstrationSource(read_demonstrations([]), per_step=1, seed=0, shuffle=True)
