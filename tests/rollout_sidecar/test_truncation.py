"""Cutting tool results to size; in whole trajectories, see test_agent."""

import pytest
from sidecar_cases import EchoTool, call, make_agent, play, tool_messages

from rollout_sidecar.profiles import get_profile
from rollout_sidecar.truncation import MARKER, Truncation, cut_characters, fit, truncate


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


@pytest.mark.parametrize(
    ("keep", "text"), [("head", f"012{MARKER}"), ("tail", f"{MARKER}789"), ("both", f"01{MARKER}9")]
)
def test_either_end_can_be_kept(tiny_tokenizer, keep, text):
    result = truncate(tiny_tokenizer, "0123456789" * 3, 20, keep)
    assert (result.text, result.tokens, result.truncated) == (text, 20, True)


@pytest.mark.parametrize("keep", ["head", "tail", "both"])
@pytest.mark.parametrize("length", [700, 70_000])
def test_an_enormous_text_is_cut_like_a_long_one(tiny_tokenizer, keep, length):
    """Only its ends are tokenised, which changes nothing: here every character is a token."""
    text = "".join(str(i % 10) for i in range(length))
    result = truncate(tiny_tokenizer, text, 27, keep)
    head, tail = {"both": (5, 5), "head": (10, 0), "tail": (0, 10)}[keep]
    assert result.text == text[:head] + MARKER + text[length - tail :]
    assert result.tokens == 27


class Hundreds:
    """A tokenizer with a token for each hundred characters."""

    def encode(self, text, *, plain=False):
        return [text[i : i + 100] for i in range(0, len(text), 100)]

    def decode(self, ids, *, skip_special=False):
        return "".join(ids)


def test_a_text_of_few_long_tokens_is_looked_at_as_a_whole():
    text = "".join(f"{i:100}" for i in range(40))
    result = truncate(Hundreds(), text, 40)  # type: ignore[arg-type]
    assert (result.text, result.tokens, result.truncated) == (text, 40, False)
    result = truncate(Hundreds(), text, 11)  # type: ignore[arg-type]
    assert result.text == text[:500] + MARKER + text[-500:]


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        ("head", "01234...(truncated)"),
        ("tail", "(truncated)...56789"),
        # As verl's slices: text[:5 // 2] and text[-5 // 2:].
        ("both", "01...(truncated)...789"),
    ],
)
def test_characters_are_cut_as_verl_cuts_them(keep, text):
    assert cut_characters("0123456789", 5, keep) == text
    assert cut_characters("01234", 5, keep) == "01234"
    assert cut_characters("0123456789", 0, keep) == "0123456789"


@pytest.mark.parametrize(
    ("side", "default", "b"),
    [("middle", "both", "both"), ("left", "tail", "head"), ("right", "head", "tail")],
)
def test_what_left_keeps_depends_on_the_release_of_verl(side, default, b):
    """Pain point 17."""
    truncation = Truncation(side=side)
    for name in ("default", "A", "C"):
        assert truncation.keep(get_profile(name)) == default
    assert truncation.keep(get_profile("B")) == b


async def test_sides_and_characters_hold_in_a_trajectory(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [call("echo", text="0123456789"), "#### 2"], EchoTool())
    agent.truncation = Truncation(side="left", max_characters=4)
    trajectory = await play(agent)
    assert tool_messages(trajectory) == ["(truncated)...6789"]
    record = trajectory.turns[0].calls[0]
    assert (record.result, record.truncated) == ("(truncated)...6789", True)
