"""Cutting tool results to size; in whole trajectories, see test_agent."""

import pytest

from rollout_sidecar.truncation import MARKER, fit, truncate


class Characters:
    """A tokenizer with a token for each character; decoding adds a space, as SentencePiece's does at a start."""

    def encode(self, text, *, plain=False):
        return list(map(ord, text))

    def decode(self, ids, *, skip_special=False):
        return " " + "".join(map(chr, ids)) if ids else ""


def test_what_fits_is_left_alone(tiny_tokenizer):
    result = truncate(tiny_tokenizer, "0123456789", 10)
    assert (result.text, result.tokens, result.truncated) == ("0123456789", 10, False)


def test_the_middle_goes_and_the_marker_counts(tiny_tokenizer):
    # 20 tokens: 17 for the marker, 2 in front, 1 behind.
    result = truncate(tiny_tokenizer, "0123456789" * 3, 20)
    assert (result.text, result.tokens, result.truncated) == ("01" + MARKER + "9", 20, True)


def test_less_than_the_marker_is_the_marker(tiny_tokenizer):
    assert truncate(tiny_tokenizer, "0123456789" * 3, 3).text == MARKER


def test_a_short_result_is_never_made_longer(tiny_tokenizer):
    assert truncate(tiny_tokenizer, "b", 0).text == "b"
    assert truncate(tiny_tokenizer, "c" * 17, 3).text == "c" * 17
    assert truncate(tiny_tokenizer, "c" * 18, 3).text == MARKER


@pytest.mark.parametrize("limit", range(17, 40))
def test_the_limit_holds_where_pieces_grow_when_they_are_put_together(limit):
    result = truncate(Characters(), "x" * 100, limit)  # type: ignore[arg-type]
    assert result.truncated
    assert len(result.text) == result.tokens <= limit
    # No more is lost than the two added spaces explain.
    assert result.tokens >= limit - 2 or result.text == MARKER


def test_several_results_are_cut_to_the_same_length(tiny_tokenizer):
    def render(texts):
        return [0] * (5 + sum(len(tiny_tokenizer.encode(text)) for text in texts))

    texts = ["a" * 30, "b", "c" * 40]
    fitted = fit(tiny_tokenizer, texts, 1000, 60, render)
    assert fitted is not None
    results, ids = fitted
    # 60 tokens: 5 of frame, 1 for b, and 27 each for the long ones: 17 for the marker, 10 of the text.
    assert [result.tokens for result in results] == [27, 1, 27]
    assert len(ids) == 60
    assert fit(tiny_tokenizer, texts, 1000, 5 + 17 + 1 + 17 - 1, render) is None
    assert fit(tiny_tokenizer, texts, 1000, 5 + 17 + 1 + 17, render) is not None
