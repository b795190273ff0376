"""Checks one value against the type of its field in the schema, and says what that type takes."""

import ast
import math
from typing import Annotated, Any, Literal, get_args, get_origin

from tooljax.config.types import Range


class WrongValue(Exception):
    """The value does not fit; the message is what the field takes, and the value."""


def describe(hint: Any) -> str:
    """What a field of this type takes, for people: `int >= 1`, `one of 'a', 'b'`, `tuple of str`."""
    base, limits = _split(hint)
    if get_origin(base) is Literal:
        return "one of " + ", ".join(map(repr, get_args(base)))
    if get_origin(base) is tuple:
        return f"tuple of {describe(get_args(base)[0])}"
    return base.__name__ + _range_text(limits)


def takes_text(hint: Any) -> bool:
    """Whether the field holds a string, so that the command line may leave out the quotes."""
    base, _ = _split(hint)
    return base is str or (
        get_origin(base) is Literal and all(isinstance(choice, str) for choice in get_args(base))
    )


def literal(text: str) -> Any:
    """The Python literal that the text is. Raises WrongValue if it is none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise WrongValue(f"{text.strip()!r}, which is not a Python literal") from None


def convert(value: Any, hint: Any) -> Any:
    """The value as the field holds it: ints become floats where floats are asked for, lists tuples.

    Raises WrongValue for any other type (a bool is not an int), a number out of range, or a choice that is not offered.
    """
    base, limits = _split(hint)
    if get_origin(base) is Literal:
        if value not in get_args(base) or type(value) is not type(get_args(base)[0]):
            raise WrongValue(_shown(value))
        return value
    if get_origin(base) is tuple:
        return _convert_tuple(value, get_args(base)[0])
    if base is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not base:
        raise WrongValue(_shown(value) + _way_out(value, base))
    if base is float and not math.isfinite(value):
        raise WrongValue(f"{value}, which is not finite")
    if not _in_range(value, limits):
        raise WrongValue(_shown(value))
    return value


def _convert_tuple(value: Any, element: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        way_out = f"; write ({value!r},) for a single one" if _fits(value, element) else ""
        raise WrongValue(_shown(value) + way_out)
    for index, item in enumerate(value):
        if not _fits(item, element):
            raise WrongValue(f"{value!r}, whose element {index} is {_shown(item)}")
    return tuple(convert(item, element) for item in value)


def _fits(value: Any, hint: Any) -> bool:
    try:
        convert(value, hint)
    except WrongValue:
        return False
    return True


def _shown(value: Any) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"


def _way_out(value: Any, base: Any) -> str:
    if base is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if base is bool:
        return "; write True or False"
    if base is float and isinstance(value, str):
        return "; write it without quotes" if _is_number(value) else ""
    if base is int and isinstance(value, str):
        return "; write it without quotes" if value.isdecimal() else ""
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _split(hint: Any) -> tuple[Any, Range]:
    """The bare type and its range."""
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        return base, next((note for note in notes if isinstance(note, Range)), Range())
    return hint, Range()


def _in_range(value: Any, limits: Range) -> bool:
    return (
        (limits.low is None or value >= limits.low)
        and (limits.high is None or value <= limits.high)
        and (limits.above is None or value > limits.above)
        and (limits.below is None or value < limits.below)
    )


def _range_text(limits: Range) -> str:
    lower = [f">= {limits.low}"] * (limits.low is not None)
    lower += [f"> {limits.above}"] * (limits.above is not None)
    upper = [f"<= {limits.high}"] * (limits.high is not None)
    upper += [f"< {limits.below}"] * (limits.below is not None)
    return "".join(f" {bound}" for bound in [" and ".join(lower + upper)] if bound)
