"""The only tolerances of the test suite. To loosen one, write the measured error and its cause on that line."""

import math
from typing import TypedDict

import numpy as np

# One rounding of each dtype, with a little room: float32 has 24 bits (6e-8), bfloat16 8 (4e-3), float16 11 (5e-4).
_BASE = {"float64": 1e-12, "float32": 5e-7, "bfloat16": 2e-3, "float16": 5e-4}


class Tolerance(TypedDict):
    """Keyword arguments of np.testing.assert_allclose."""

    rtol: float
    atol: float


def tol(dtype, reduced: int = 1, gradient: bool = False) -> Tolerance:
    """rtol and atol for np.testing.assert_allclose.

    `reduced` is how many terms the longest sum on the way has: rounding errors of n terms add up like sqrt(n).
    Gradients get ten times as much. Meant for values of order 1.
    """
    name = np.dtype(dtype).name
    if name not in _BASE:
        raise ValueError(
            f"no tolerance for dtype {name}; compare it exactly, or use one of {[*_BASE]}"
        )
    value = _BASE[name] * math.sqrt(reduced) * (10 if gradient else 1)
    return {"rtol": value, "atol": value}
