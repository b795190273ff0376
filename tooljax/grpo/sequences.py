"""Sums over trajectories of values per token, on the host in float64.

Values are those of the loss tokens of a whole batch, one after the other; `sequence` says which trajectory each belongs
to. A trajectory of several token streams is one sequence, wherever its streams were packed.
"""

import numpy as np
from jaxtyping import Float, Int


def sequence_sums(
    values: Float[np.ndarray, " tokens"], sequence: Int[np.ndarray, " tokens"]
) -> Float[np.ndarray, " tokens"]:
    """Sum over each sequence, given to each of its tokens."""
    return np.bincount(sequence, values.astype(np.float64))[sequence] if values.size else values


def sequence_means(
    values: Float[np.ndarray, " tokens"], sequence: Int[np.ndarray, " tokens"]
) -> Float[np.ndarray, " tokens"]:
    """Mean over each sequence, given to each of its tokens."""
    return sequence_sums(values, sequence) / sequence_sums(np.ones(values.shape), sequence)


def sequence_largest(
    values: Float[np.ndarray, " tokens"], sequence: Int[np.ndarray, " tokens"]
) -> Float[np.ndarray, " tokens"]:
    """The largest of each sequence, given to each of its tokens."""
    if not values.size:
        return values
    largest = np.full(sequence.max() + 1, -np.inf)
    np.maximum.at(largest, sequence, values)
    return largest[sequence]


def mean_of_sequences(
    values: Float[np.ndarray, " tokens"], sequence: Int[np.ndarray, " tokens"]
) -> float:
    """Mean over sequences of their means over tokens; 0 without tokens."""
    if not values.size:
        return 0.0
    counts = np.bincount(sequence)
    means = np.bincount(sequence, values.astype(np.float64))[counts > 0] / counts[counts > 0]
    return float(means.mean())
