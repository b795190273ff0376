"""How values are spread: what trackers draw, and the quantiles that stand for it where there are no histograms."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

Values = Float[np.ndarray, " _values"]

QUANTILES = {"min": 0.0, "p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
BUCKETS = 40


def finite(of: Mapping[str, Values]) -> dict[str, Values]:
    """The same without what is not finite, and without names that nothing is left of."""
    left = {name: values[np.isfinite(values)] for name, values in of.items()}
    return {name: values for name, values in left.items() if values.size}


def quantiles(of: Mapping[str, Values]) -> dict[str, float]:
    """<name>/<quantile> of each; linear between values."""
    found = {name: np.quantile(values, list(QUANTILES.values())) for name, values in of.items()}
    return {
        f"{name}/{quantile}": float(value)
        for name, values in found.items()
        for quantile, value in zip(QUANTILES, values, strict=True)
    }


def buckets(values: Values) -> tuple[Int[np.ndarray, " buckets"], Float[np.ndarray, " edges"]]:
    """Counts of BUCKETS equal parts of the range, and their edges."""
    counts, edges = np.histogram(values, bins=BUCKETS)
    return counts, edges
