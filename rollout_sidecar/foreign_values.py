"""Reading what foreign code returned: nothing in it is taken for granted, and an odd part costs no more than itself."""

import math
from collections.abc import Mapping
from typing import Any

from rollout_sidecar.errors import safe_text


def to_number(value: Any) -> float | None:
    """A Python number, or a scalar of NumPy, PyTorch or JAX, as a float; None for anything else. It may be NaN."""
    try:
        if hasattr(value, "item"):  # raises for an array of several
            value = value.item()
        return float(value) if isinstance(value, (bool, int, float)) else None
    except Exception:  # an int too large for a float, or an object of the user's
        return None


def numbers(metrics: Any) -> dict[str, float]:
    """What a reward or a tool reported beside its answer: entries that are no finite numbers are left out, keys become
    text that can be sent."""
    if not isinstance(metrics, Mapping):
        return {}
    found = {}
    for key, value in metrics.items():
        number = to_number(value)
        if number is not None and math.isfinite(number) and (name := _text(key)) is not None:
            found[name] = number
    return found


def _text(key: Any) -> str | None:
    try:
        return safe_text(str(key))
    except Exception:  # an object of the user's
        return None
