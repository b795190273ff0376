"""Problems are right, graded and repeatable; held-out numbers occur nowhere else; demonstrations err as asked."""

import argparse
import json
import random
import re

import pyarrow.parquet as pq
import pytest

from rollout_sidecar.formats import get_format
from rollout_sidecar.tools.calculator import calculate
from tooljax.data.prepare import arithmetic


def make(folder, **options):
    parser = argparse.ArgumentParser()
    arithmetic.add_arguments(parser)
    arguments = [
        "--output_dir",
        str(folder),
        "--train",
        "60",
        "--heldout",
        "20",
        "--demonstrations",
        "40",
    ]
    for name, value in options.items():
        arguments += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    arithmetic.run(parser.parse_args(arguments))
    return folder


def test_a_problem_worked_by_hand():
    # (37 + 58) * 12 = 1140
    changes = (("+", 58), ("*", 12))
    assert arithmetic.to_expression(37, changes) == "(37+58)*12"
    assert arithmetic.evaluate(37, changes) == 1140
    assert arithmetic.to_expression(37, (("*", 12), ("-", 4))) == "37*12-4"


def test_the_calculator_agrees_with_every_answer():
    numbers, _ = arithmetic.split_numbers(0)
    for problem in arithmetic.make_problems(0, "train", numbers, [1, 2, 3], 300):
        assert calculate(problem.expression) == problem.answer
        assert problem.answer > 0


def test_level_is_the_number_of_changes():
    numbers, _ = arithmetic.split_numbers(0)
    problems = arithmetic.make_problems(0, "train", numbers, [1, 3], 10)
    assert [len(p.changes) for p in problems] == [1, 3] * 5


def test_heldout_numbers_occur_in_no_training_problem_and_no_demonstration(tmp_path):
    make(tmp_path)
    questions = [
        r["prompt"][0]["content"] for r in pq.read_table(tmp_path / "train.parquet").to_pylist()
    ]
    asked = set(re.findall(r"\d+", " ".join(questions)))
    heldout = pq.read_table(tmp_path / "heldout.parquet").to_pylist()
    for row in heldout:
        numbers = set(re.findall(r"\d+", row["prompt"][0]["content"]))
        assert numbers
        assert not numbers & asked
    # Results and guesses in demonstrations may coincide with anything; numbers in their questions may not.
    demonstrated = [
        json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    ]
    told = set(re.findall(r"\d+", " ".join(d["messages"][0]["content"] for d in demonstrated)))
    assert not told & {
        n for row in heldout for n in re.findall(r"\d+", row["prompt"][0]["content"])
    }


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    first, again, other = (
        make(tmp_path / name, seed=seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    name = "demonstrations.jsonl"
    assert (first / name).read_text() == (again / name).read_text()
    assert (first / name).read_text() != (other / name).read_text()
    assert pq.read_table(first / "train.parquet").equals(pq.read_table(again / "train.parquet"))


def test_shares_of_calls_and_of_mistakes_are_as_asked():
    rng, numbers = random.Random(0), arithmetic.split_numbers(0)[0]
    hermes = get_format("hermes")
    calls = right = broken = 0
    problems = arithmetic.make_problems(0, "demonstrations", numbers, [1, 2], 1000)
    for problem in problems:
        messages = arithmetic.make_demonstration(rng, problem, tool_share=0.6, error_share=0.5)[
            "messages"
        ]
        parsed = hermes.parse(messages[1]["content"])
        if not parsed:
            assert len(messages) == 2
            continue
        calls += 1
        if parsed[0].error:
            broken += 1
        elif parsed[0].arguments == {"expression": problem.expression}:
            right += 1
            assert messages[2]["content"] == str(problem.answer)
            assert messages[3]["content"] == f"#### {problem.answer}"
        else:
            assert parsed[0].arguments is not None
            assert calculate(parsed[0].arguments["expression"]) == int(messages[2]["content"])
    # Three standard deviations around 600 calls, half of them right, a quarter not JSON.
    assert abs(calls - 600) < 47
    assert abs(right / calls - 0.5) < 0.062
    assert abs(broken / calls - 0.25) < 0.054


def test_a_level_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--levels \[0\]: a problem needs at least one change"):
        make(tmp_path, levels=[0])


def test_fewer_than_one_problem_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--train -3: it takes at least one"):
        make(tmp_path, train=-3)
