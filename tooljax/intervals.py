"""Confidence intervals of evaluation results: Wilson for one rate, a paired bootstrap for the difference of two."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """From low to high."""

    low: float
    high: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate (Wilson 1927).

    Unlike estimate ± 1.96 standard errors it stays inside [0, 1] and has a width at 0 and n successes.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(
            f"{successes} successes of {n} is not a rate; needs 0 <= successes <= n, n >= 1"
        )
    z = _z(confidence)
    rate = successes / n
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * (rate * (1 - rate) / n + z * z / (4 * n * n)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], *, seed: int, n: int = 10_000, confidence: float = 0.95
) -> Interval:
    """Interval of mean(b) - mean(a): percentiles over `n` resamplings of the problems.

    `a[i]` and `b[i]` are the scores of two policies on the same problem: resampling problems keeps the pairing, so
    that problems hard for both do not widen the interval.
    """
    if len(a) != len(b) or not a:
        raise ValueError(
            f"a has {len(a)} scores and b has {len(b)}; a paired comparison needs one of each per problem"
        )
    differences = np.asarray(b, np.float64) - np.asarray(a, np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(n)
    block = max(1, 1_000_000 // len(differences))  # bounds the index array, whatever n is
    for start in range(0, n, block):
        rows = min(block, n - start)
        picks = rng.integers(len(differences), size=(rows, len(differences)))
        means[start : start + rows] = differences[picks].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be between 0 and 1, for example 0.95")
    return NormalDist().inv_cdf((1 + confidence) / 2)
