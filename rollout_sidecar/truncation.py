"""Fitting tool results into what is left of a trajectory's tokens. Only what tools and interactions say is cut, never
sampled tokens.

A result that is too long loses its middle, counted in tokens: what a tool says first and last is what matters most.
verl's options are there too: which end to keep, and a first cut in characters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rollout_sidecar.profiles import Profile
from rollout_sidecar.tokenizer import ChatTokenizer

MARKER = "...(truncated)..."
"""Stands for what was removed. A cut result is never shorter than this."""

Keep = Literal["both", "head", "tail"]
"""What stays of a text that is too long: both ends, its beginning, or its end."""

# No token is longer, so text beyond this many characters a token cannot be part of what is kept.
_MAX_TOKEN_CHARACTERS = 512
# Nearly always enough, and far cheaper for an enormous result.
_USUAL_TOKEN_CHARACTERS = 16


@dataclass(frozen=True)
class FittedResult:
    """A tool result as the policy will see it."""

    text: str
    tokens: int
    truncated: bool


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """How results that are too long are cut."""

    side: Literal["middle", "left", "right"] = "middle"
    """verl's tool_response_truncate_side. What "left" keeps is the profile's; "right" keeps the other end."""
    max_characters: int = 0
    """verl's max_tool_response_length: cut to so many characters, marker not counted, before tokens are. 0: not."""

    def keep(self, profile: Profile) -> Keep:
        """What stays, in that release of verl."""
        if self.side == "middle":
            return "both"
        if self.side == "left":
            return profile.left_keeps
        return "tail" if profile.left_keeps == "head" else "head"


def cut_characters(text: str, limit: int, keep: Keep) -> str:
    """The text, cut as verl cuts it: to `limit` characters and a marker. A limit of 0 leaves it as it is."""
    if not limit or len(text) <= limit:
        return text
    if keep == "head":
        return text[:limit] + "...(truncated)"
    if keep == "tail":
        return "(truncated)..." + text[-limit:]
    return text[: limit // 2] + MARKER + text[-limit // 2 :]


def truncate(
    tokenizer: ChatTokenizer, text: str, max_tokens: int, keep: Keep = "both"
) -> FittedResult:
    """The text, without its middle (or an end) if it has more than max_tokens tokens. Never makes it longer: a text as
    short as the marker stays, so below the marker's length max_tokens is taken as that."""
    marker_tokens = _marker_tokens(tokenizer)
    max_tokens = max(max_tokens, marker_tokens)
    head, tail = _ends(tokenizer, text, max_tokens)
    if tail is None and len(head) <= max_tokens:
        return FittedResult(text, len(head), False)
    tail = head if tail is None else tail
    left = max_tokens - marker_tokens
    while True:
        first = {"both": (left + 1) // 2, "head": left, "tail": 0}[keep]
        # Half a character at the cut decodes to U+FFFD.
        start = tokenizer.decode(head[:first]).rstrip("\ufffd")
        end = tokenizer.decode(tail[len(tail) - (left - first) :]).lstrip("\ufffd")
        fitted = start + MARKER + end
        tokens = len(tokenizer.encode(fitted, plain=True))
        if tokens <= max_tokens or left == 0:
            return FittedResult(fitted, tokens, True)
        left = max(0, left - max(1, tokens - max_tokens))


@lru_cache(maxsize=8)
def _marker_tokens(tokenizer: ChatTokenizer) -> int:
    return len(tokenizer.encode(MARKER, plain=True))


def _ends(
    tokenizer: ChatTokenizer, text: str, max_tokens: int
) -> tuple[list[int], list[int] | None]:
    """Ids of the text's beginning and end, at least max_tokens of each; of the whole text, and None, if it is short."""
    for characters in (_USUAL_TOKEN_CHARACTERS, _MAX_TOKEN_CHARACTERS):
        limit = max_tokens * characters
        if len(text) > 2 * limit:  # keeps an enormous result from being tokenised as a whole
            head = tokenizer.encode(text[:limit], plain=True)
            tail = tokenizer.encode(text[len(text) - limit :], plain=True)
            if min(len(head), len(tail)) > max_tokens or characters == _MAX_TOKEN_CHARACTERS:
                return head, tail
    return tokenizer.encode(text, plain=True), None


def fit(
    tokenizer: ChatTokenizer,
    texts: Sequence[str],
    max_tokens_per_result: int,
    room: int,
    render: Callable[[Sequence[str]], list[int]],
    *,
    size: Callable[[list[int]], int] = len,
    keep: Keep = "both",
) -> tuple[list[FittedResult], list[int]] | None:
    """The results, cut as little as needed for their rendered tokens to fit `room`, and those tokens.

    None if not even markers in place of the long ones fit. Exactly `room` tokens fit.

    Args:
        size: how much of `room` rendered tokens take.
    """

    def attempt(cap: int) -> tuple[list[FittedResult], list[int]] | None:
        results = [truncate(tokenizer, text, cap, keep) for text in texts]
        ids = render([result.text for result in results])
        return (results, ids) if size(ids) <= room else None

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
