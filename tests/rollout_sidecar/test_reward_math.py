"""Mathematical answers: what is read, what is equal, and comparisons that never end."""

import asyncio
import resource
import sys
import time
from pathlib import Path

import pytest

from rollout_sidecar.rewards import math_answer
from rollout_sidecar.rewards.base import compute
from rollout_sidecar.rewards.math_answer import (
    answer_line,
    compute_dapo_score,
    compute_score,
    last_boxed,
)

TOWER = r"\boxed{9^{9^{9^{9}}}}"
"""No computer will compare it."""


@pytest.fixture(scope="module", autouse=True)
def _no_process_stays():
    yield
    math_answer._workers.close()


def score(text: str, truth, **options) -> dict[str, float]:
    return compute_score("lighteval/MATH", text, truth, {}, **options)


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        (r"\boxedness{1}", None),
        ("42", None),
    ],
)
def test_the_last_box(text: str, inside: str | None):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: 42", "42"),
        ("answer : 41\nAnswer: $42$\nmore", "$42$"),
        (r"Answer: so it is \boxed{42} then", "42"),
        ("The answer is 42", None),
    ],
)
def test_the_last_answer_line(text: str, found: str | None):
    assert answer_line(text) == found


# --- what is equal ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("42", "42"),
        ("42", 42),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac12", "1/2"),
        (r"\dfrac{1}{2}", r"\boxed{\tfrac{1}{2}}"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        ("1,000", "1000"),
        ("5", "x=5"),
        (r"5\text{ cm}", "5"),
        (r"10\%", "0.1"),
        (r"90^\circ", "90"),
        (r"\text{east}", "east"),
        ("[0, 1)", r"\left[0,1\right)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("$7$", "7."),
    ],
)
def test_equal_answers(answer: str, truth):
    assert score(rf"so \boxed{{{answer}}}", truth) == {"score": 1.0, "acc": 1.0, "answered": 1.0}


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("41", "42"),
        ("3.14", r"\pi"),
        ("(0, 1)", "[0, 1)"),
        ("(2, 1)", "(1, 2)"),
        ("x^2", "x^3"),
        ("west", r"\text{east}"),
        (r"\frac{1}{", "1"),
        ("1" * 3000, "1"),
        ("__import__('os').getcwd()", "1"),
    ],
)
def test_other_answers(answer: str, truth):
    assert score(rf"so \boxed{{{answer}}}", truth)["score"] == 0.0


def test_without_a_box_there_is_no_answer():
    assert score("so 42", "42") == {"score": 0.0, "acc": 0.0, "answered": 0.0}
    assert score(r"so \boxed{ }", "42")["answered"] == 0.0
    assert score("so 42", "42", wrong_score=-0.5)["score"] == -0.5


def test_dapos_scores():
    """arXiv:2503.14476, eq. 7."""
    for text, expected in (
        ("Answer: 1/2", 1.0),
        ("Answer: $\\frac{1}{2}$.", 1.0),
        (r"so \boxed{0.5}", 1.0),
        ("Answer: 2", -1.0),
        ("Answer: 2, 1/2", -1.0),
        (r"Answer: 2} \boxed{0.5", -1.0),
        ("no", -1.0),
    ):
        assert compute_dapo_score("aime_2024", text, "0.5", {})["score"] == expected


# --- what goes wrong --------------------------------------------------------------------------------------------


async def test_a_comparison_that_never_ends_is_no_verdict_and_holds_up_nobody():
    def run(text: str, timeout_s: float):
        return compute(
            compute_score,
            data_source="math",
            solution_str=text,
            ground_truth="3",
            timeout_s=timeout_s,
        )

    await run(r"\boxed{\sqrt{9}}", 5.0)  # a worker that is up
    started = time.monotonic()
    results = await asyncio.gather(
        run(TOWER, 0.5), *(run(r"\boxed{\sqrt{9}}", 5.0) for _ in range(4)), return_exceptions=True
    )
    assert str(results[0]) == "the answer could not be compared within 0.5 s"
    assert isinstance(results[0], TimeoutError)
    assert [result.reward for result in results[1:]] == [1.0] * 4  # type: ignore[union-attr]
    assert time.monotonic() - started < 10


def test_the_process_that_compares_has_little_of_the_machine(monkeypatch):
    monkeypatch.setenv("SOME_SECRET", "x")
    worker = math_answer._Worker()
    try:
        pid = worker._process.pid
        assert resource.prlimit(pid, resource.RLIMIT_AS) == (2 * 2**30, 2 * 2**30)
        assert resource.prlimit(pid, resource.RLIMIT_FSIZE) == (0, 0)
        assert b"SOME_SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        worker.close()


@pytest.mark.parametrize("truth", [None, "", " ", r"\boxed{}"])
def test_an_empty_ground_truth_is_an_error(truth):
    with pytest.raises(ValueError, match="is empty"):
        score(r"\boxed{1}", truth)


def test_a_ground_truth_that_is_no_mathematics_is_an_error():
    with pytest.raises(RuntimeError, match="ground truth '}' is no mathematical expression"):
        score(r"\boxed{1}", "}")


def test_without_the_library_the_way_out_is_told(monkeypatch, tmp_path):
    broken = tmp_path / "math_verify.py"
    broken.write_text("raise ImportError('No module named math_verify')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    math_answer._workers.close()
    with pytest.raises(RuntimeError, match=r"needs it: pip install 'tooljax\[tools\]'"):
        score(r"\boxed{1}", "2")
    assert "math_verify" not in sys.modules


def test_a_worker_is_replaced_after_a_while(monkeypatch):
    monkeypatch.setattr(math_answer, "REQUESTS_PER_WORKER", 1)
    assert score(r"\boxed{0.25}", "1/4")["score"] == 1.0
    assert math_answer._workers._idle == []


def test_the_reading_must_be_known():
    with pytest.raises(ValueError, match="answer='last' must be"):
        score("", "1", answer="last")
