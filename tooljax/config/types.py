"""Types of settings, with the values that they take. Standard library only, like the schema that is written in them."""

from typing import Annotated, Literal, NamedTuple


class Range(NamedTuple):
    """The values a number may take: from `low` to `high`, both included unless `above`/`below` exclude them."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None


Count = Annotated[int, Range(low=1)]
CountOrZero = Annotated[int, Range(low=0)]
Seconds = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(low=0)]
Positive = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(low=0, high=1)]

Remat = Literal["none", "dots_attention", "dots", "attention", "offload", "full"]
