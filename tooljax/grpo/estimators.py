"""Advantages by verl's names: rewards of the trajectories of each prompt in, one advantage a trajectory out.

With S_i the reward of a trajectory of a group of n, and std the sample standard deviation (n - 1):

    grpo                          (S_i - mean) / (std + 1e-6)                    arXiv:2402.03300
    dr_grpo                       S_i - mean                                     arXiv:2503.20783
    rloo                          n / (n - 1) (S_i - mean)                       arXiv:2402.14740
    opo                           S_i - sum_j len_j S_j / sum_j len_j            arXiv:2505.23585
    gpg                           alpha (S_i - mean)                             arXiv:2504.02546
                                  alpha = trajectories of the batch / those with a reward that is not 0, as in verl
    grpo_passk                    (largest - second) / (std + 1e-6) for the      arXiv:2503.19595
                                  best of the group, 0 for the others
    reinforce_plus_plus_baseline  S_i - mean, then whitened over tokens          arXiv:2501.03262
    reinforce_plus_plus           discounted reward, whitened over tokens        arXiv:2501.03262
    remax                         S_i - reward of the greedy trajectory          arXiv:2310.10505
    gdpo                          sum_k w_k grpo(reward_k), whitened over tokens arXiv:2601.05242

Differs from verl: members that could not be trained on are left out of n, of the statistics and of alpha; and a group
without two others, or whose rewards are all equal, gets exactly 0 from the estimators that compare within it.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from tooljax.grpo.advantages import group_advantages, zero_variance

WHITENED = ("reinforce_plus_plus_baseline", "reinforce_plus_plus", "gdpo")
"""Estimators whose advantages are whitened over the tokens of the batch."""

NOT_RELATIVE = ("reinforce_plus_plus", "remax")
"""Estimators that do not compare within a group: one whose rewards are all equal teaches them something."""

_STD_EPSILON = 1e-6
_WHITEN_EPSILON = 1e-8

Rewards = Float[np.ndarray, "prompt group"]
Members = Bool[np.ndarray, "prompt group"]


def estimated_advantages(
    kind: str,
    reward: Rewards,
    *,
    valid: Members,
    lengths: Int[np.ndarray, "prompt group"],
    scale_by_std: bool,
    baseline: Float[np.ndarray, " prompt"] | None = None,
) -> Rewards:
    """The advantage of each trajectory before any whitening, float64; 0 for members that are not valid.

    `lengths` are sampled tokens (opo), `baseline` the reward of each prompt's greedy trajectory (remax). Not gdpo,
    which has several rewards: see `decoupled_advantages`.
    """
    kind = kind.removesuffix("_vectorized")
    reward = np.where(valid, reward, 0.0).astype(np.float64)
    if kind in ("grpo", "dr_grpo", "reinforce_plus_plus_baseline"):
        scaled = scale_by_std and kind == "grpo"
        found = group_advantages(reward.astype(np.float32), scale_by_std=scaled, valid=valid)
        return np.asarray(found, np.float64)
    if kind == "reinforce_plus_plus":
        return reward
    if kind == "remax":
        if baseline is None:
            raise ValueError(
                "adv_estimator='remax' needs the reward of each prompt's greedy trajectory"
            )
        return np.where(valid, reward - baseline[:, None], 0.0)
    count = valid.sum(axis=1, keepdims=True)
    mean = reward.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    if kind == "rloo":
        out = (reward - mean) * count / np.maximum(count - 1, 1)
    elif kind == "opo":
        long = np.where(valid, lengths, 0).astype(np.float64)
        total = np.maximum(long.sum(axis=1, keepdims=True), 1.0)
        out = reward - (long * reward).sum(axis=1, keepdims=True) / total
    elif kind == "gpg":
        out = (reward - mean) * valid.sum() / max(np.count_nonzero(reward), 1)
    elif kind == "grpo_passk":
        out = _best_of_each(reward, valid, mean, scale_by_std)
    else:
        raise ValueError(f"there is no estimator {kind!r} of one reward (grpo.adv_estimator)")
    flat = np.asarray(zero_variance(reward.astype(np.float32), valid=valid))
    return np.where(valid & ~flat[:, None], out, 0.0)


def decoupled_advantages(
    rewards: Float[np.ndarray, "key prompt group"],
    weights: Float[np.ndarray, " key"],
    *,
    valid: Members,
    scale_by_std: bool,
) -> Rewards:
    """gdpo before whitening: each reward relative to its group on its own, so that none drowns the others."""
    parts = [
        np.asarray(
            group_advantages(reward.astype(np.float32), scale_by_std=scale_by_std, valid=valid),
            np.float64,
        )
        for reward in rewards
    ]
    return np.tensordot(np.asarray(weights, np.float64), np.stack(parts), axes=1)


def discounted_returns(
    reward: Float[np.ndarray, " tokens"], *, gamma: float
) -> Float[np.ndarray, " tokens"]:
    """Sum of a trajectory's rewards from each sampled token on, discounted once a sampled token.

    Observation tokens are no step: they are not among the tokens, and the return is carried over them.
    """
    out = np.zeros(reward.shape)
    running = 0.0
    for t in reversed(range(reward.size)):
        running = float(reward[t]) + gamma * running
        out[t] = running
    return out


def whitened(values: Float[np.ndarray, " tokens"]) -> Float[np.ndarray, " tokens"]:
    """Values of all loss tokens of the batch with mean 0 and variance 1 (n - 1, plus 1e-8), float64."""
    values = values.astype(np.float64)
    if values.size < 2:
        return np.zeros(values.shape)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + _WHITEN_EPSILON)


def turn_advantages(
    rewards: Float[np.ndarray, " members"], *, scale_by_std: bool
) -> Float[np.ndarray, " members"]:
    """How the rewards of one turn compare, over the trajectories of a group that have such a turn (turn-level credit,
    arXiv:2505.11821): they are added to these trajectories' advantages for the tokens of that turn alone."""
    whole = rewards.astype(np.float32)[None]
    return np.asarray(group_advantages(whole, scale_by_std=scale_by_std), np.float64)[0]


def _best_of_each(reward: Rewards, valid: Members, mean: np.ndarray, scale_by_std: bool) -> Rewards:
    known = np.where(valid, reward, -np.inf)
    best = np.argmax(known, axis=1)
    ranked = np.sort(known, axis=1)
    ranked = np.where(np.isfinite(ranked), ranked, 0.0)
    ahead = np.where(valid.sum(axis=1) > 1, ranked[:, -1] - ranked[:, -2], 0.0)
    if scale_by_std:
        squares = np.where(valid, (reward - mean) ** 2, 0.0).sum(axis=1)
        ahead = ahead / (np.sqrt(squares / np.maximum(valid.sum(axis=1) - 1, 1)) + _STD_EPSILON)
    out = np.zeros(reward.shape)
    out[np.arange(len(out)), best] = ahead
    return out
