"""Question answering: SQuAD's normalisation and its measures, worked by hand."""

import pytest

from rollout_sidecar.rewards.search_qa import compute_score, f1, normalise


def score(text: str, truth, **options) -> dict[str, float]:
    return compute_score("searchR1_nq", text, truth, {}, **options)


def test_normalisation():
    assert normalise("  The  U.S.A.,\n an A-bomb ") == "usa abomb"
    assert normalise("Theatre and another") == "theatre and another"  # articles are whole words


@pytest.mark.parametrize(
    "truth",
    ["Paris", ["London", "Paris"], {"target": ["Paris"]}, {"target": "paris"}, ("the Paris",)],
)
def test_every_form_of_ground_truth(truth):
    assert score("<answer> PARIS! </answer>", truth)["score"] == 1.0


def test_numbers_are_answers():
    assert score("<answer>1969</answer>", 1969)["score"] == 1.0


def test_the_last_answer_counts_over_line_breaks():
    text = "<answer>Rome</answer> no: <answer>\nParis\n</answer>"
    assert score(text, "Paris")["acc"] == 1.0
    assert score(text, "Rome")["acc"] == 0.0


@pytest.mark.parametrize("text", ["", "Paris", "<answer>Paris", "Paris</answer>"])
def test_without_an_answer_there_is_no_reward(text: str):
    result = score(text, "Paris", format_score=0.2)
    assert (result["score"], result["answered"]) == (0.0, 0.0)


def test_the_measures():
    text = "<answer>It is the big red dog of Ann</answer>"
    # 7 words (it is big red dog of ann) and 3 (big red dog), 3 in common: 2 * 3 / 10
    values = {"acc": 0.0, "sub_em": 1.0, "f1": 0.6, "answered": 1.0}
    for measure, expected in (("em", 0.0), ("sub_em", 1.0), ("f1", 0.6)):
        result = score(text, "Big Red Dog", measure=measure)
        assert result.pop("score") == pytest.approx(expected)
        assert result == pytest.approx(values)


def test_f1_counts_a_word_as_often_as_it_occurs():
    # "a a b" has two a's, of which "a" matches one: 2 * 1 / 4
    assert f1("x x b", "x") == pytest.approx(0.5)
    assert f1("x", "x") == 1.0
    assert f1("y", "x") == 0.0
    assert f1("", "x") == 0.0


def test_a_sub_match_is_of_whole_words():
    assert score("<answer>category</answer>", "cat", measure="sub_em")["score"] == 0.0
    assert score("<answer>my cat.</answer>", "cat", measure="sub_em")["score"] == 1.0


def test_the_best_known_answer_counts():
    result = score("<answer>new york city</answer>", ["york", "new york"], measure="f1")
    # 2 * 2 / 5 against "new york", 2 * 1 / 4 against "york"
    assert result["score"] == pytest.approx(0.8)


def test_scores_can_be_set():
    assert score("<answer>Paris</answer>", "Paris", score=2.0)["score"] == 2.0
    assert score("<answer>Rome</answer>", "Paris", format_score=0.1)["score"] == 0.1


@pytest.mark.parametrize("truth", [None, [], {"target": []}, {"answers": ["x"]}, "", "the", [None]])
def test_a_ground_truth_without_an_answer_is_an_error(truth):
    with pytest.raises(ValueError, match="holds no answer; expected a text, a list of texts"):
        score("<answer>x</answer>", truth)


def test_a_misspelt_key_of_a_ground_truth_can_be_seen():
    with pytest.raises(
        ValueError, match=r"the ground truth \{'targets': \['x'\]\} holds no answer"
    ):
        score("<answer>x</answer>", {"targets": ["x"]})


def test_the_measure_must_be_known():
    with pytest.raises(ValueError, match="measure='rouge' must be"):
        score("", "x", measure="rouge")
