"""GSM8K's lines become verl records that read back with the right answers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollout_sidecar.formats import get_format
from rollout_sidecar.rewards.gsm8k import compute_score
from rollout_sidecar.tools.calculator import calculate, format_number
from tooljax.data.prepare import gsm8k
from tooljax.data.prepare.__main__ import main
from tooljax.data.records import read_tasks

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "gsm8k"

ROWS = [
    {"question": "Clips?", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 72"},
    {"question": "Dollars?", "answer": "Much.\n#### 1,234,500"},
    {"question": "Loss?", "answer": "#### -3.50"},
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_fields_are_those_of_verl(tmp_path, capsys):
    output = tmp_path / "new" / "gsm8k.parquet"
    source = write_lines(tmp_path / "test.jsonl", ROWS)
    arguments = ["gsm8k", "--input", source, "--output", str(output), "--split", "test"]
    assert main([*arguments, "--limit", "2", "--system", "Use the tool."]) == 0
    assert capsys.readouterr().out == f"wrote 2 records to {output}\n"
    assert pq.read_table(output).to_pylist()[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": "Dollars?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234500"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "answer": "Much.\n#### 1,234,500",
            "question": "Dollars?",
            "need_tools_kwargs": True,
            "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": "1234500"}}},
        },
    }


def test_records_read_back_as_tasks_and_two_runs_write_the_same(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    for name in ("one", "two"):
        assert main(["gsm8k", "--input", source, "--output", f"{tmp_path / name}.parquet"]) == 0
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    tasks = read_tasks([tmp_path / "one.parquet"])
    assert [task.ground_truth for task in tasks] == ["72", "1234500", "-3.50"]
    assert tasks[0].messages[0] == {"role": "system", "content": gsm8k.SYSTEM}
    assert tasks[0].tools is None
    assert tasks[0].tools_kwargs == {"calculator": {"create_kwargs": {"ground_truth": "72"}}}


def test_the_real_files_read_back_with_their_answers(tmp_path):
    if not REAL.is_dir():
        pytest.skip("needs GSM8K's train.jsonl and test.jsonl in ../shared/data/gsm8k")
    counts = {}
    for split in ("train", "test"):
        source = REAL / f"{split}.jsonl"
        output = tmp_path / f"{split}.parquet"
        assert main(["gsm8k", "--input", str(source), "--output", str(output)]) == 0
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        tasks = read_tasks([output])
        counts[split] = len(tasks)
        for row, task in zip(rows, tasks, strict=True):
            # The reward function reads the answer by a pattern of its own.
            score = compute_score(task.data_source, row["answer"], task.ground_truth)
            assert score["acc"] == 1.0, task.task_id
            assert task.messages[-1]["content"] == row["question"]
    assert counts["train"] == 7473


@pytest.mark.parametrize("count", range(len(gsm8k.EXAMPLES) + 1))
def test_worked_examples_are_whole_turns_before_the_question(count):
    record = gsm8k.to_record("Clips?", "#### 72", split="train", index=0, examples=count)
    system, *examples, question = record["prompt"]
    assert (system["role"], question) == ("system", {"role": "user", "content": "Clips?"})
    assert [m["role"] for m in examples] == ["user", "assistant", "tool", "assistant"] * count


def test_the_worked_examples_are_right():
    turns = gsm8k.example_messages(len(gsm8k.EXAMPLES))
    for call_turn, result, answer in zip(turns[1::4], turns[2::4], turns[3::4], strict=True):
        (call,) = get_format("hermes").parse(call_turn["content"])
        assert (call.name, call.error) == ("calculator", "")
        assert call.arguments is not None
        assert format_number(calculate(call.arguments["expression"])) == result["content"]
        assert compute_score("", answer["content"], result["content"])["acc"] == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "x"', "not valid JSON: "),
        ('{"question": "x"}', "answer must be text, got nothing; a GSM8K row has question and"),
        ('{"answer": "#### 3"}', "question must be text, got nothing"),
        (
            '{"question": "x", "answer": "It is 3."}',
            "answer must end with '#### <number>', got ...",
        ),
        ('{"question": "x", "answer": "#### three"}', "answer must end with '#### <number>'"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, capsys, row, message):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(ROWS[0]) + "\n" + row + "\n")
    output = tmp_path / "a.parquet"
    assert main(["gsm8k", "--input", str(source), "--output", str(output)]) == 1
    where = f"tooljax.data.prepare gsm8k: {source}, row 1 (the first is 0; line 2): "
    assert capsys.readouterr().err.startswith(where + message)
    assert not output.exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--examples", "9"], "--examples 9: there are 0 to 6 worked examples"),
        (["--limit", "-1"], "--limit -1: must be 0 (all rows) or more"),
        (["--output", "a.csv"], "--output a.csv: the name must end in .parquet"),
    ],
)
def test_a_bad_option_is_named(tmp_path, capsys, option, message):
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    output = str(tmp_path / "a.parquet")
    assert main(["gsm8k", "--input", source, "--output", output, *option]) == 1
    assert re.fullmatch(
        re.escape(f"tooljax.data.prepare gsm8k: {message}") + "\n", capsys.readouterr().err
    )


def test_the_module_runs_and_lists_its_commands():
    command = [sys.executable, "-m", "tooljax.data.prepare", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "gsm8k" in done.stdout
    assert "arithmetic" in done.stdout
