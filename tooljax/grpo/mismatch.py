"""How far two sets of log-probs of the same sampled tokens are apart: the engine's, which sampled, and the trainer's.

    d_t = log_probs_t - rollout_log_probs_t,   w_t = exp(d_t)

    mean KL   mean of w_t - 1 - d_t     k3 estimate of KL(engine || trainer), as in `kl.py`
    ESS       (sum w)^2 / (n sum w^2)   share of the sample that is left after weighting by importance

Differs from `kl.py`: NumPy float64 on the host, for tokens that have left the device.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


@dataclass(frozen=True)
class Mismatch:
    """Differences over a set of tokens, in nats where they have a unit."""

    tokens: int
    mean_kl: float
    mean_difference: float
    """rollout_log_probs - log_probs; the k1 estimate of the same KL. Its sign says who is the surer."""
    rms: float
    p99: float
    """99 % of the differences are smaller."""
    max_abs: float
    ess: float
    within_1pct: float
    """Share of tokens whose ratio w is from 0.99 to 1.01."""
    within_5pct: float

    def metrics(self, area: str) -> dict[str, float]:
        """Every field as a metric of that area."""
        return {f"{area}/{name}": float(value) for name, value in vars(self).items()}


def measure(
    log_probs: Float[np.ndarray, " tokens"], rollout_log_probs: Float[np.ndarray, " tokens"]
) -> Mismatch:
    """Compares the two. What is not finite counts as a difference of 20 nats, the most that there is.

    ValueError without tokens.
    """
    if not log_probs.size:
        raise ValueError("there are no sampled tokens to compare")
    d = log_probs.astype(np.float64) - rollout_log_probs.astype(np.float64)
    d = np.clip(np.nan_to_num(d, nan=_MAX_LOG_RATIO), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    w = np.exp(d)
    size = np.abs(d)
    off = np.abs(np.expm1(d))
    return Mismatch(
        tokens=d.size,
        mean_kl=float(np.minimum(np.expm1(d) - d, _MAX_K3).mean()),
        mean_difference=float(-d.mean()),
        rms=float(np.sqrt(np.mean(d * d))),
        p99=float(np.percentile(size, 99)),
        max_abs=float(size.max()),
        ess=float(w.sum() ** 2 / (d.size * np.sum(w * w))),
        within_1pct=float(np.mean(off <= 0.01)),
        within_5pct=float(np.mean(off <= 0.05)),
    )
