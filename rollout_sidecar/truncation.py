"""Fitting tool results into what is left of a trajectory's tokens. Only tool results are cut, never sampled tokens.

A result that is too long loses its middle, counted in tokens: what a tool says first and last is what matters most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_sidecar.tokenizer import ChatTokenizer

MARKER = "...(truncated)..."
"""Stands for what was removed. A cut result is never shorter than this."""

# No token is longer, so text beyond this many characters a token cannot be part of what is kept.
_MAX_TOKEN_CHARACTERS = 512


@dataclass(frozen=True)
class FittedResult:
    """A tool result as the policy will see it."""

    text: str
    tokens: int
    truncated: bool


def truncate(tokenizer: ChatTokenizer, text: str, max_tokens: int) -> FittedResult:
    """The text, without its middle if it has more than max_tokens tokens. Never makes it longer: a text as short as
    the marker stays, so below the marker's length max_tokens is taken as that."""
    marker_tokens = len(tokenizer.encode(MARKER, plain=True))
    max_tokens = max(max_tokens, marker_tokens)
    head, tail, cut = text, "", False
    limit = max_tokens * _MAX_TOKEN_CHARACTERS
    if len(text) > 2 * limit:  # keeps an enormous result from being tokenised as a whole
        head, tail, cut = text[:limit], text[len(text) - limit :], True
    ids = tokenizer.encode(head, plain=True) + (tokenizer.encode(tail, plain=True) if cut else [])
    if len(ids) <= max_tokens and not cut:
        return FittedResult(text, len(ids), False)
    keep = max_tokens - marker_tokens
    while True:
        # Half a character at the cut decodes to U+FFFD.
        head = tokenizer.decode(ids[: (keep + 1) // 2]).rstrip("\ufffd")
        tail = tokenizer.decode(ids[len(ids) - keep // 2 :]).lstrip("\ufffd")
        fitted = head + MARKER + tail
        tokens = len(tokenizer.encode(fitted, plain=True))
        if tokens <= max_tokens or keep == 0:
            return FittedResult(fitted, tokens, True)
        keep = max(0, keep - max(1, tokens - max_tokens))


def fit(
    tokenizer: ChatTokenizer,
    texts: Sequence[str],
    max_tokens_per_result: int,
    room: int,
    render: Callable[[Sequence[str]], list[int]],
) -> tuple[list[FittedResult], list[int]] | None:
    """The results, cut as little as needed for their rendered tokens to fit `room`, and those tokens.

    None if not even markers in place of the long ones fit. Exactly `room` tokens fit.
    """

    def attempt(cap: int) -> tuple[list[FittedResult], list[int]] | None:
        results = [truncate(tokenizer, text, cap) for text in texts]
        ids = render([result.text for result in results])
        return (results, ids) if len(ids) <= room else None

    best = attempt(max_tokens_per_result)
    if best is not None:
        return best
    low, high = 0, min(max_tokens_per_result, max(room, 0)) + 1
    best = attempt(low)
    if best is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best
