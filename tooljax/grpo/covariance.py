"""Which tokens clip_cov and kl_cov hold back ("The entropy mechanism", arXiv:2505.22617, section 4.2):

    cov_t = (A_t - mean A) (log_probs_t - mean log_probs)

Tokens of high covariance are those that make the policy's entropy fall. clip_cov takes the gradient of a few of them
away; kl_cov adds a penalty |log_probs - old_log_probs| to those of the highest.

On the host, over the loss tokens of the whole batch: verl asks each microbatch, so that its choice depends on the cut.
"""

import numpy as np
from jaxtyping import Bool, Float

Values = Float[np.ndarray, " tokens"]


def covariances(log_probs: Values, advantages: Values) -> Values:
    """cov_t of each loss token."""
    log_probs, advantages = log_probs.astype(np.float64), advantages.astype(np.float64)
    if not log_probs.size:
        return log_probs
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def clip_cov_tokens(
    covariance: Values,
    clipped: Bool[np.ndarray, " tokens"],
    *,
    fraction: float,
    low: float,
    high: float,
    rng: np.random.Generator,
) -> Bool[np.ndarray, " tokens"]:
    """Tokens that lose their gradient: a random `fraction` of all, at least one, among those between the bounds that
    are not clipped already."""
    candidates = np.flatnonzero((covariance > low) & (covariance < high) & ~clipped)
    count = min(max(int(fraction * covariance.size), 1), candidates.size)
    chosen = np.zeros(covariance.shape, bool)
    chosen[rng.permutation(candidates)[:count]] = True
    return chosen


def kl_cov_tokens(covariance: Values, *, fraction: float) -> Bool[np.ndarray, " tokens"]:
    """Tokens that are penalised: the `fraction` of all with the highest covariance, at least one."""
    chosen = np.zeros(covariance.shape, bool)
    count = min(max(int(fraction * covariance.size), 1), covariance.size)
    chosen[np.argsort(-covariance, kind="stable")[:count]] = True
    return chosen
