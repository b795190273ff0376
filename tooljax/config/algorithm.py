"""Settings of the algorithm: advantages, losses, KL and off-policy correction. Names of verl are values here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tooljax.config.types import Count, CountOrZero, Fraction, NonNegative, Positive, Range

Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""Where a bound is asked of, and of which estimate of the KL between engine and trainer."""


@dataclass(frozen=True)
class GrpoConfig:
    """Group relative policy optimisation (arXiv:2402.03300), with the DAPO paper's token-mean (arXiv:2503.14476), and
    what was made of them since."""

    group_size: Annotated[int, Range(low=2)] = 8
    """Trajectories of one prompt. Advantages are relative within the group, so it takes at least 2."""
    adv_estimator: Literal[
        "grpo",
        "grpo_vectorized",
        "dr_grpo",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "grpo_passk",
        "reinforce_plus_plus_baseline",
        "reinforce_plus_plus",
        "remax",
        "gdpo",
    ] = "grpo"
    """How rewards become advantages; tooljax/grpo/estimators.py has the equations. remax samples one greedy trajectory
    more of each prompt, whose reward is the baseline."""
    scale_by_std: bool = True
    """Divide advantages by the group's standard deviation, in grpo, grpo_passk and gdpo; off is Dr.GRPO
    (arXiv:2503.20783)."""
    gamma: Fraction = 1.0
    """Discount of reinforce_plus_plus, once a sampled token."""
    reward_keys: tuple[str, ...] = ()
    """gdpo: the rewards that are compared each on its own, by their names in reward_terms or in what the reward
    function reports beside the score."""
    reward_weights: tuple[float, ...] = ()
    """gdpo: what each weighs. Empty: 1."""
    turn_coef: NonNegative = 0.0
    """Turn-level credit (arXiv:2505.11821): adds to the advantage of a turn's tokens so many times how the rewards that
    tools and interaction gave to this turn compare within the group. 0: a trajectory has one advantage."""
    loss_mode: Literal[
        "vanilla", "gspo", "geo_mean", "cispo", "sapo", "gpg", "clip_cov", "kl_cov"
    ] = "vanilla"
    """The policy loss; tooljax/grpo/policy_losses.py has the equations."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How losses of tokens become one. gspo and geo_mean take seq-mean-token-mean."""
    loss_scale_factor: CountOrZero = 0
    """What seq-mean-token-sum-norm divides by. 0: limits.max_trajectory_tokens. Whether the number of trajectories
    divides too depends on sidecar.profile: by default it does, as in verl from 0.8 on."""
    clip_low: Annotated[float, Range(low=0, below=1)] = 0.2
    """The ratio is clipped at 1 - clip_low. Epsilon_low in DAPO."""
    clip_high: NonNegative = 0.2
    """The ratio is clipped at 1 + clip_high. Epsilon_high in DAPO, whose clip-higher is 0.28."""
    clip_dual: NonNegative = 0.0
    """vanilla: a token of negative advantage costs at most so many times its size. verl's clip_ratio_c, 3 there. 0: no
    such bound."""
    sapo_tau_positive: Positive = 1.0
    """sapo: steepness of the gate where the advantage is positive."""
    sapo_tau_negative: Positive = 1.05
    """sapo: the same where it is not."""
    cov_fraction: Fraction = 0.0002
    """clip_cov and kl_cov: share of the tokens that is held back, at least one token."""
    clip_cov_low: float = 1.0
    """clip_cov: tokens are chosen among those of a covariance above this."""
    clip_cov_high: float = 5.0
    """clip_cov: and below this."""
    kl_cov_coef: NonNegative = 1.0
    """kl_cov: weight of the penalty."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is added to what is maximised. Its gradient costs a third of the head's work
    more."""
    kl_coef: NonNegative = 0.001
    """Weight of KL(policy || reference), per token, in nats. 0 skips the reference policy. Beta in GRPO."""
    kl_loss_type: Literal[
        "k1", "k1+", "kl", "kl+", "k2", "k2+", "mse", "mse+", "k3", "k3+", "low_var_kl", "low_var_kl+",
        "abs", "abs+",
    ] = "k3"  # fmt: skip
    """The estimate of the KL, by its name here or in verl; with "+" its gradient is that of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is: added to the loss, or taken off the reward of each token, before advantages."""
    kl_target: NonNegative = 0.0
    """kl_coef is steered so that the KL is this, in nats a token. 0: it stays as it is."""
    kl_horizon: Positive = 10_000.0
    """Trajectories over which it is steered."""
    zero_variance: Literal["skip", "keep", "refill"] = "skip"
    """A group whose rewards are all equal: leave its tokens out of the loss; keep them for the KL term; or sample more
    prompts in its place, DAPO's dynamic sampling."""
    refill_max_batches: Annotated[int, Range(low=2)] = 4
    """refill: batches of prompts that a step may sample at most. What is there then is trained on."""
    updates_per_batch: Count = 1
    """Optimizer updates made on each batch of rollouts, each on all of it."""
    rollout_correction: Literal["decoupled", "bypass"] = "decoupled"
    """Whose log-probs the ratio is relative to: the trainer's own before the batch's first update, with the settings
    below correcting for the engine; or the engine's, which saves their forward pass."""
    rollout_is: Literal["", "token", "sequence"] = ""
    """Importance weights trainer / engine, of each token or of each trajectory. Empty: none."""
    rollout_is_high: Positive = 2.0
    """Weights are truncated there. verl's rollout_is_threshold."""
    rollout_is_low: NonNegative = 0.0
    """Above 0 it is IcePop: ratios outside these two bounds weigh 0."""
    rollout_is_normalize: bool = False
    """Divide the weights by their mean. verl's rollout_is_batch_normalize."""
    rollout_rs: tuple[Rejection, ...] = ()
    """Tokens or trajectories beyond these bounds leave the loss: a KL estimate of each token, or its sum, mean or
    largest over a trajectory."""
    rollout_rs_high: tuple[float, ...] = ()
    """The upper bound of each: of the estimate, but for k1 of the ratio engine / trainer."""
    rollout_rs_low: tuple[float, ...] = ()
    """The lower bound of the ratio of each k1, 0 for 1 / high. Empty: all 0."""
