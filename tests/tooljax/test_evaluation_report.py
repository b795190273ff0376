"""From trajectories to a report: answers and their majority, pass@k, paired differences, and pages that text of a
policy cannot break out of."""

import json
import math
import re
from dataclasses import replace
from itertools import combinations

import msgspec
import numpy as np
import pytest

from rollout_sidecar.protocol import Status, Task, ToolCallRecord, Trajectory, Turn
from tooljax.config import Config
from tooljax.config.schema import EvaluateConfig
from tooljax.evaluation.answers import answer_of, extract, plain
from tooljax.evaluation.comparison import Comparison, Measured
from tooljax.evaluation.conditions import Condition, chosen
from tooljax.evaluation.report import write_report
from tooljax.evaluation.result import Evaluation, majority
from tooljax.metrics import check_names


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("I think <answer> Paris </answer>, not 7", " Paris "),
        ("3 apples\n#### 12\n", "12"),
        ("first 3, then $1,234.50 in all.", "$1,234.50"),
        ("no idea", "no idea"),
        (r"\boxed{never closed", r"\boxed{never closed"),
    ],
)
def test_where_an_answer_is(text, answer):
    assert extract(text) == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [("1,234.50", "$1234.5"), ("0.50", "1/2"), (" PARIS. ", "paris"), ("50%", "50")],
)
def test_answers_that_are_the_same(one, other):
    assert plain(one) == plain(other)


def test_answers_that_are_not_the_same():
    assert (
        len({plain(text) for text in ("1", "10", "-1", "1/0", "paris", "rome", "a b", "ab")}) == 8
    )


def trajectory(
    said: str = "",
    *,
    right: bool = False,
    scored: bool = True,
    status: Status = "completed",
    calls: tuple[str, ...] = (),
    task: int = 0,
    sample: int = 0,
) -> Trajectory:
    records = [ToolCallRecord(name="t", status=s, result="") for s in calls]  # type: ignore[arg-type]
    return Trajectory(
        task_index=task,
        sample_index=sample,
        task_id=f"t{task}",
        seed=0,
        status=status,
        token_ids=[1, 2, 3],
        prompt_tokens=1,
        loss_mask=[False, True, False],
        turns=[Turn(start=1, end=2, policy_version=0, finish="stop", calls=records)],
        scored=scored,
        reward=float(right),
        messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": said}],
    )


def test_a_trajectory_that_did_not_come_to_an_end_has_no_answer():
    assert answer_of(trajectory("#### 7")) == "7"
    assert answer_of(trajectory("#### 7", status="max_tokens")) is None
    assert answer_of(trajectory("")) is None


def test_majorities_worked_by_hand():
    votes = [("4", True), ("4", True), ("5", False)]
    assert majority(votes, 3) == 1.0
    assert majority(votes, 1) == pytest.approx(2 / 3)
    # Of pairs: 4 4 is right, 4 5 twice a tie
    assert majority(votes, 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    # No answer is no vote, and none at all is wrong.
    assert majority([(None, False), ("4", True), (None, False)], 3) == 1.0
    assert majority([(None, False), (None, False)], 2) == 0.0
    # A text that the reward called right once of twice
    assert majority([("x", True), ("x", False), ("y", True)], 3) == 0.5
    with pytest.raises(ValueError, match=r"maj@4 of 3 votes; needs 1 <= k <= votes"):
        majority(votes, 4)


def test_a_majority_of_many_is_close_to_that_of_all_subsets():
    rng = np.random.default_rng(0)
    votes = [(str(rng.integers(3)), False) for _ in range(20)]
    votes = [(answer, answer == "1") for answer, _ in votes]
    exact = np.mean([_slow(subset) for subset in combinations(votes, 5)])
    assert math.comb(20, 5) > 1000
    # 1000 draws: a standard error of 0.015
    assert majority(votes, 5) == pytest.approx(exact, abs=0.06)
    assert majority(votes, 5) == majority(votes, 5)


def _slow(votes) -> float:
    counts = {answer: sum(a == answer for a, _ in votes) for answer, _ in votes}
    best = [answer for answer, count in counts.items() if count == max(counts.values())]
    return best.count("1") / len(best)


def problems(*rights: str) -> list[list[Trajectory]]:
    """One problem each; r is a right sample, w a wrong one, - one whose reward failed."""
    return [
        [
            trajectory(
                "#### 1" if mark == "r" else f"#### {9 + j}",
                right=mark == "r",
                scored=mark != "-",
                task=i,
                sample=j,
            )
            for j, mark in enumerate(marks)
        ]
        for i, marks in enumerate(rights)
    ]


def test_the_numbers_of_an_evaluation():
    found = Evaluation(problems("rrww", "wwww", "rrr-"))
    # 2 of 4, 0 of 4, 3 of 3
    assert found.accuracy == pytest.approx(5 / 11)
    assert found.scores == [0.5, 0.0, 1.0]
    assert found.ks == [1, 2, 3]
    # 1 - C(2, 2) / C(4, 2) = 5/6, 0 and 1
    assert found.pass_at(2) == pytest.approx([5 / 6, 0, 1])
    assert found.pass_at(4)[:2] == [1.0, 0.0]
    assert math.isnan(found.pass_at(4)[2])
    # Pairs of r r w w, whose wrong answers differ: rr 1, rw four ties 1/2, ww 0
    assert found.majority_at(2) == pytest.approx([(1 + 4 * 0.5) / 6, 0, 1])
    assert found.metrics["eval/pass_at_2"] == pytest.approx((5 / 6 + 1) / 3)
    assert found.metrics["eval/maj_at_2"] == pytest.approx(1.5 / 3)
    check_names(found.metrics)


def test_rewards_that_all_failed_are_no_accuracy():
    found = Evaluation(problems("--", "--"))
    assert math.isnan(found.accuracy)
    assert "eval/accuracy" not in found.metrics
    assert found.ks == []


def test_tool_use_and_accuracy_with_and_without_a_call():
    found = Evaluation(
        [
            [trajectory(right=True, calls=("ok", "timeout")), trajectory(right=False)],
            [trajectory(right=False, calls=("ok",)), trajectory(right=False, status="max_turns")],
        ]
    )
    rows = {row.label: row for row in found.rows()}
    assert rows["accuracy with a call"].value == 0.5
    assert rows["accuracy without a call"].value == 0.0
    assert rows["tool use"].value == 0.5
    assert rows["calls"].value == 0.75
    assert rows["calls that succeeded"].value == pytest.approx(2 / 3)
    assert rows["calls: timeout"].value == pytest.approx(1 / 3)
    assert rows["ended: completed"].value == 0.75
    assert rows["turns"].value == 1
    assert (rows["tokens sampled"].value, rows["tokens of tools"].value) == (1, 1)
    for row in rows.values():
        if row.interval is not None:
            assert 0 <= row.interval.low <= row.value <= row.interval.high <= 1


def compared() -> Comparison:
    """The trained policy wins two problems of four, loses one, and one has no value in the base."""
    return Comparison(
        [
            Measured(Condition("base"), Evaluation(problems("ww", "ww", "rr", "--"))),
            Measured(Condition("trained"), Evaluation(problems("rr", "rw", "ww", "rr"))),
            Measured(
                Condition("trained", "no_tools"), Evaluation(problems("ww", "ww", "ww", "ww"))
            ),
        ],
        source="step 7",
    )


def test_differences_are_paired_by_problem():
    comparison = compared()
    assert comparison.reference.condition.name == "trained"
    over_base, *_ = [d for d in comparison.differences() if d.measure == "accuracy"]
    # Over three problems: (1, 1/2, 0) less (0, 0, 1)
    assert over_base.other.name == "base"
    assert over_base.value == pytest.approx(1.5 / 3 - 1 / 3)
    assert (over_base.problems, over_base.won, over_base.lost) == (3, 2, 1)
    assert over_base.interval.low <= over_base.value <= over_base.interval.high
    measures = {d.measure for d in comparison.differences() if d.other.name == "trained/no_tools"}
    assert measures == {"accuracy", "pass@2", "maj@2"}


def test_a_policy_compared_with_itself_differs_by_nothing():
    same = Evaluation(problems("rw", "rr", "ww"))
    comparison = Comparison(
        [Measured(Condition("base"), same), Measured(Condition("trained"), same)]
    )
    for difference in comparison.differences():
        assert (difference.value, *difference.interval) == (0, 0, 0)


def test_conditions_fall_back_on_what_there_is():
    asked = ("trained/no_tools", "base", "trained")
    names = [c.name for c in chosen(asked, model=True, trained=True)]
    assert names == ["base", "trained/no_tools", "trained"]
    assert [c.name for c in chosen(asked, model=True, trained=False)] == ["base/no_tools", "base"]
    assert [c.name for c in chosen(asked, model=False, trained=False)] == [
        "served/no_tools",
        "served",
    ]
    with pytest.raises(ValueError, match=r"evaluate.conditions=\(\) compares nothing"):
        chosen((), model=True, trained=True)


def test_a_report_holds_every_number_and_no_text_gets_out(tmp_path):
    comparison = compared()
    evil = "</pre><script>alert(1)</script> ```\n# not a title"
    wrong = comparison.measured[1].evaluation.problems[2][0]
    comparison.measured[1].evaluation.problems[2][0] = msgspec.structs.replace(
        wrong, messages=[{"role": "assistant", "content": evil}]
    )
    config = replace(Config(), evaluate=EvaluateConfig(samples=2))
    tasks = [Task(task_id=f"t{i}", messages=[]) for i in range(4)]
    page = write_report(config, comparison, tasks, tmp_path / "report")
    html = page.read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert not re.search(r'(src|href)="(?!data:image/png;base64,)', html)
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "````text" in markdown  # a fence longer than the one in the text
    assert "| over base | accuracy | \\+0.167 |" in markdown
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert results["reference"] == "trained"
    assert results["conditions"]["base"]["problems"]["3:t3"] is None
    assert results["conditions"]["trained"]["numbers"]["accuracy"]["value"] == pytest.approx(5 / 8)
    assert results["differences"][0]["won"] == 2
    lines = (tmp_path / "report" / "trained_no_tools.jsonl").read_text().splitlines()
    assert len(lines) == 8
    for name in ("differences.png", "accuracy.png", "pass_at_k.png", "endings.png"):
        assert (tmp_path / "report" / name).stat().st_size > 1000
