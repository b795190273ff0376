"""The parts of verl's multi-turn records that name interactions and tools, wherever they stand."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tooljax.data.records import read_tasks, to_task

PROMPT = [{"role": "user", "content": "2 + 2?"}]


def task(**fields):
    """The task of a record with these fields."""
    return to_task({"prompt": PROMPT, **fields}, task_id="t")


def test_the_interaction_is_named_by_its_kwargs_which_are_all_passed_on():
    kwargs = {"name": "tutor", "query": "2 + 2?", "ground_truth": ["4"]}
    found = task(extra_info={"interaction_kwargs": kwargs})
    assert (found.interaction, found.interaction_kwargs) == ("tutor", kwargs)


def test_kwargs_without_a_name_are_the_gsm8k_interactions():
    found = task(extra_info={"interaction_kwargs": {"name": None, "query": "q"}})
    assert (found.interaction, found.interaction_kwargs) == ("gsm8k", {"query": "q"})


@pytest.mark.parametrize("kwargs", [None, {}, {"name": None}])
def test_no_kwargs_no_interaction(kwargs):
    found = task(extra_info={"interaction_kwargs": kwargs})
    assert (found.interaction, found.interaction_kwargs) == ("", {})


def test_a_single_turn_agent_has_neither_tools_nor_an_interaction():
    extra_info = {"interaction_kwargs": {"name": "tutor"}, "tools_kwargs": {"x": {}}}
    found = task(agent_name="single_turn_agent", extra_info=extra_info)
    assert (found.interaction, found.interaction_kwargs, found.tools) == ("", {}, [])


def test_kwargs_may_be_columns_and_extra_info_comes_first():
    columns = {
        "tools_kwargs": {"search": {"create_kwargs": {"a": 1, "b": None}}},
        "interaction_kwargs": {"name": "tutor"},
    }
    found = task(**columns, extra_info={"tools_kwargs": None})
    assert found.tools_kwargs == {"search": {"create_kwargs": {"a": 1}}}
    assert (found.interaction, found.interaction_kwargs) == ("tutor", {"name": "tutor"})
    both = task(
        **columns,
        extra_info={"tools_kwargs": {"calc": {}}, "interaction_kwargs": {"name": "user"}},
    )
    assert (both.tools_kwargs, both.interaction) == ({"calc": {}}, "user")


def test_a_tool_that_arrow_added_to_a_row_is_not_the_rows():
    # A row's tools are those named in its tools_kwargs (profile A). One whose kwargs are all empty is still named.
    found = task(extra_info={"tools_kwargs": {"calc": {"create_kwargs": None}, "search": None}})
    assert found.tools_kwargs == {"calc": {}}


def test_the_names_of_columns_can_be_chosen(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"chat": PROMPT, "source": "openai/gsm8k"}]), path)
    (found,) = read_tasks([path], prompt_key="chat", reward_key="source")
    assert (found.messages, found.data_source) == (PROMPT, "openai/gsm8k")
    with pytest.raises(
        ValueError, match=r"row 0 .*: question is missing \(the row has: chat, source"
    ):
        read_tasks([path], prompt_key="question")


def test_rows_that_need_tools_kwargs_and_have_none_are_counted(tmp_path, caplog):
    rows = [
        {"prompt": PROMPT, "extra_info": {"need_tools_kwargs": True, "tools_kwargs": kwargs}}
        for kwargs in ({"calc": {}}, {}, None)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        assert len(read_tasks([path])) == 3
    (record,) = caplog.records
    assert record.message == (
        f"2 rows say need_tools_kwargs but have no tools_kwargs, the first is {path}, row 1 (the first is 0; line 2)"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"extra_info": {"interaction_kwargs": {"name": 3}}},
            r"the record: extra_info\.interaction_kwargs\.name must be the name of an interaction, got 3",
        ),
        (
            {"interaction_kwargs": {"name": ""}},
            r"the record: interaction_kwargs\.name must be the name of an interaction, got ''",
        ),
        ({"interaction_kwargs": "gsm8k"}, r"the record: interaction_kwargs must be an object"),
        ({"tools_kwargs": {"calc": 1}}, r"the record: tools_kwargs\.calc must be an object, got 1"),
    ],
)
def test_kwargs_that_cannot_be_read_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        task(**fields)
