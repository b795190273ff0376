"""Off-policy correction: what was sampled came from the engine's policy, which is not quite the one that is trained.

    r_t = old_log_probs_t - rollout_log_probs_t        the anchor's log-ratio; bypass takes the current policy for old

    truncated   w = min(exp r, high)                   TIS ("Your efficient RL framework secretly brings you off-policy
    IcePop      w = exp r if low <= exp r <= high      RL training", Yao et al. 2025); IcePop (arXiv:2510.18855)
                else 0

of a token, or with the sum of r over its sequence, limited to +-20 as in verl. Weights are constants of the loss.

Rejection leaves tokens out, of the loss and of its denominators, by an estimate of how far the policies are apart, with
r as above and k1 = -r, k2 = r^2 / 2, k3 = exp r - 1 - r: of a token, or of a sequence by the sum, mean or largest over
its tokens, which then rejects all of them. k1 is bounded on both sides, as a ratio of engine to trainer: low <= exp k1
<= high; k2 and k3 from above.

On the host, in float64, over the loss tokens of the whole batch, one after the other.
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from tooljax.grpo.sequences import (
    mean_of_sequences,
    sequence_largest,
    sequence_means,
    sequence_sums,
)

_MAX_LOG_RATIO = 20.0

Values = Float[np.ndarray, " tokens"]
Sequence = Int[np.ndarray, " tokens"]


def importance_weights(
    log_ratio: Values,
    sequence: Sequence,
    *,
    level: Literal["token", "sequence"],
    low: float,
    high: float,
    normalize: bool = False,
) -> Values:
    """w of each token. low = 0 truncates; above 0 it is IcePop. `normalize` divides by their mean over the batch."""
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio, sequence)
    ratio = np.exp(_limited(log_ratio))
    if low > 0:
        weights = np.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    else:
        weights = np.minimum(ratio, high)
    if normalize and weights.size:
        mean = weights.mean() if level == "token" else mean_of_sequences(weights, sequence)
        weights = weights / max(mean, 1e-8)
    return weights


def accepted(
    log_ratio: Values, sequence: Sequence, *, kind: str, low: float, high: float
) -> Bool[np.ndarray, " tokens"]:
    """Tokens that stay in the loss. `kind` is a name of verl: token_, seq_sum_, seq_mean_ or seq_max_ before k1, k2 or
    k3. `low` counts for k1 alone."""
    over, _, estimate = kind.rpartition("_")
    r = _limited(log_ratio)
    values = {"k1": -r, "k2": 0.5 * r * r, "k3": np.expm1(r) - r}[estimate]
    values = {
        "token": lambda: values,
        "seq_sum": lambda: sequence_sums(values, sequence),
        "seq_mean": lambda: sequence_means(values, sequence),
        "seq_max": lambda: sequence_largest(values, sequence),
    }[over]()
    if estimate == "k1":
        return (values >= np.log(low)) & (values <= np.log(high))
    return values <= high


def correction_metrics(
    log_probs: Values, rollout_log_probs: Values, sequence: Sequence
) -> dict[str, float]:
    """How far engine and trainer are apart, before anything is corrected."""
    if not log_probs.size:
        return {}
    r = log_probs.astype(np.float64) - rollout_log_probs.astype(np.float64)
    token, whole = (np.exp(_limited(x)) for x in (r, sequence_sums(r, sequence)))
    own, engine = (
        np.exp(np.minimum(-sequence_means(x.astype(np.float64), sequence), _MAX_LOG_RATIO))
        for x in (log_probs, rollout_log_probs)
    )
    return {
        "policy/mismatch/kl": float(-r.mean()),
        "policy/mismatch/k3_kl": float((np.expm1(_limited(r)) - _limited(r)).mean()),
        "policy/mismatch/chi2_token": float((token**2).mean() - 1.0),
        "policy/mismatch/chi2_seq": mean_of_sequences(whole**2, sequence) - 1.0,
        "policy/mismatch/training_ppl": mean_of_sequences(own, sequence),
        "policy/mismatch/rollout_ppl": mean_of_sequences(engine, sequence),
    }


def weight_metrics(weights: Values, *, high: float) -> dict[str, float]:
    """What the importance weights did."""
    if not weights.size:
        return {}
    squares = float(np.sum(weights * weights))
    return {
        "policy/is_weight/mean": float(weights.mean()),
        "policy/is_weight/max": float(weights.max()),
        "policy/is_weight/truncated_frac": float(np.mean((weights >= high) | (weights == 0))),
        "policy/is_weight/ess": float(weights.sum() ** 2 / (weights.size * squares))
        if squares
        else 0.0,
    }


def _limited(log_ratio: Values) -> Values:
    return np.clip(log_ratio.astype(np.float64), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
