"""Confidence intervals of evaluation results: Wilson for rates, a bootstrap over problems for other means and for the
difference of two policies on the same problems."""

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
    return _wilson(successes / n, n, confidence)


def clustered_wilson(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> Interval:
    """Wilson's interval of the mean of 0s and 1s that come in groups, such as the samples of one problem.

    Samples of a problem resemble each other, so that as many of other problems would say more. The count in Wilson's
    formula is therefore divided by the design effect (Kish 1965, section 8.2): the variance of the mean, estimated
    between groups, over that of independent draws. It stays between the number of groups and that of draws; with one
    draw a group it is `wilson`. Groups may differ in size, and those without any are left out.
    """
    groups = [group for group in groups if len(group)]
    n, total = sum(map(len, groups)), sum(map(sum, groups))
    if not groups or not 0 <= total <= n:
        raise ValueError(f"{total:g} successes of {n} is not a rate; needs 0s and 1s, one at least")
    rate = total / n
    count = len(groups)
    between = sum((sum(group) - rate * len(group)) ** 2 for group in groups)
    variance = between * count / max(count - 1, 1) / n**2
    effective = rate * (1 - rate) / variance if variance > 0 else 0.0
    if variance == 0 and 0 < rate < 1:
        effective = n  # every group has exactly the mean: less than independent draws would differ
    return _wilson(rate, min(max(effective, count), n), confidence)


def bootstrap_mean(values: Sequence[float], *, seed: int) -> Interval:
    """95 % interval of a mean over problems: percentiles over resamplings of them."""
    return paired_bootstrap([0.0] * len(values), values, seed=seed)


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


def _wilson(rate: float, n: float, confidence: float) -> Interval:
    z = _z(confidence)
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * (rate * (1 - rate) / n + z * z / (4 * n * n)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be between 0 and 1, for example 0.95")
    return NormalDist().inv_cdf((1 + confidence) / 2)
