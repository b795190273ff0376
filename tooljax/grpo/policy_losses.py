"""Policy losses, token by token; verl's names. With A the advantage, and eps_low, eps_high the clip bounds:

    ratio_t  = exp(log_probs_t - old_log_probs_t)
    vanilla  -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)      PPO (arXiv:1707.06347, eq. 7), GRPO, DAPO
             and where A < 0 at most -c A, if c is given                  dual clip (arXiv:1912.09729)
    gspo     the same with s_t = s exp(log_probs_t - sg[log_probs_t])     GSPO-token (arXiv:2507.18071, section 4.3)
             for the ratio; s = exp(mean of log-ratios of the sequence)
    geo_mean -A s exp(m_t - sg[m_t]), s = exp(mean of m over a sequence)  GMPO (arXiv:2507.20673)
             m_t = the log-ratio, clipped to -eps_low, eps_high on the side that A rewards
    cispo    -sg[clip(ratio, 1 - eps_low, 1 + eps_high)] A log_probs      CISPO (arXiv:2506.13585)
    sapo     -A sigmoid(tau (ratio - 1)) 4 / tau                          SAPO (arXiv:2511.20347)
    gpg      -A log_probs                                                 GPG (arXiv:2504.02546)
    clip_cov, kl_cov   vanilla without dual clip, and -ratio A; `covariance.py` says which tokens they hold back

sg stops gradients. What belongs to a sequence is given, computed beforehand on the whole batch with the same weights:
then the loss of a token depends on its own log-prob alone, its gradient is that of the paper's loss, and neither
microbatches, devices nor the streams of a trajectory have to meet.

Differs from the papers: the log-ratio is first limited to +-20 (gspo: to at most 10), as in verl: a ratio cannot
overflow.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0
_MAX_GSPO_LOG_RATIO = 10.0

Losses = tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]
"""The loss of each token, and where clipping changed it or took its gradient away."""


@dataclass(frozen=True)
class PolicyLoss:
    """One of the losses above, by verl's name, with its settings."""

    mode: str
    clip_low: float
    clip_high: float
    clip_dual: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(
        self,
        log_probs: Float[Array, "*shape"],
        old_log_probs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequence_log_ratio: Float[Array, "*shape"] | None = None,
    ) -> Losses:
        """The loss of each token; without a sequence's log-ratio it is 0, as before a batch's first update."""
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        if sequence_log_ratio is None:
            sequence_log_ratio = jnp.zeros_like(log_probs)
        if self.mode == "kl_cov":  # it has its penalty in place of the clip
            ratio = importance_ratio(log_probs, jax.lax.stop_gradient(old_log_probs))
            return -advantages * ratio, jnp.zeros(ratio.shape, bool)
        if self.mode == "clip_cov":
            return clipped_ratio_loss(log_probs, old_log_probs, advantages, **clip)
        if self.mode == "vanilla":
            return clipped_ratio_loss(
                log_probs, old_log_probs, advantages, clip_dual=self.clip_dual, **clip
            )
        if self.mode == "gspo":
            return gspo_loss(log_probs, advantages, sequence_log_ratio, **clip)
        if self.mode == "geo_mean":
            return geo_mean_loss(log_probs, old_log_probs, advantages, sequence_log_ratio, **clip)
        if self.mode == "cispo":
            return cispo_loss(log_probs, old_log_probs, advantages, **clip)
        if self.mode == "sapo":
            taus = {"tau_positive": self.tau_positive, "tau_negative": self.tau_negative}
            return sapo_loss(log_probs, old_log_probs, advantages, **taus)
        if self.mode == "gpg":
            return gpg_loss(log_probs, advantages)
        raise ValueError(f"there is no policy loss {self.mode!r} (grpo.loss_mode)")


def importance_ratio(
    log_probs: Float[Array, "*shape"], old_log_probs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """exp(log_probs - old_log_probs), the log-ratio limited to +-20; float32."""
    return jnp.exp(_log_ratio(log_probs, old_log_probs))


def clipped_ratio_loss(
    log_probs: Float[Array, "*shape"],
    old_log_probs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> Losses:
    """vanilla. `clip_dual` is c, above 1; 0 for none."""
    ratio = importance_ratio(log_probs, jax.lax.stop_gradient(old_log_probs))
    loss, clipped = _clipped(ratio, advantages, clip_low, clip_high)
    if not clip_dual:
        return loss, clipped
    most = -advantages * clip_dual
    dual = (advantages < 0) & (loss > most)
    return jnp.where(dual, most, loss), clipped | dual


def gspo_loss(
    log_probs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    sequence_log_ratio: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
) -> Losses:
    """gspo. `sequence_log_ratio` is the mean log-ratio of the token's sequence, under the current weights."""
    own = log_probs - jax.lax.stop_gradient(log_probs)
    ratio = jnp.exp(jnp.minimum(own + sequence_log_ratio, _MAX_GSPO_LOG_RATIO))
    return _clipped(ratio, advantages, clip_low, clip_high)


def one_sided_log_ratio(log_ratio, advantages, *, clip_low: float, clip_high: float, xp=jnp):
    """geo_mean's m: the log-ratio, clipped where A says that it has gone far enough. `xp` is jax.numpy or numpy."""
    clipped = xp.clip(log_ratio, -clip_low, clip_high)
    bounded = xp.where(
        advantages > 0, xp.minimum(log_ratio, clipped), xp.maximum(log_ratio, clipped)
    )
    return xp.where(advantages == 0, xp.zeros_like(log_ratio), bounded)


def geo_mean_loss(
    log_probs: Float[Array, "*shape"],
    old_log_probs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    sequence_log_ratio: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
) -> Losses:
    """geo_mean. `sequence_log_ratio` is the mean of m over the token's sequence, under the current weights."""
    log_ratio = log_probs - jax.lax.stop_gradient(old_log_probs)
    m = one_sided_log_ratio(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    ratio = jnp.exp(sequence_log_ratio + m - jax.lax.stop_gradient(m))
    return -advantages * ratio, (m != log_ratio) & (advantages != 0)


def cispo_loss(
    log_probs: Float[Array, "*shape"],
    old_log_probs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
) -> Losses:
    """cispo: clipping bounds a token's weight, and takes no token's gradient away."""
    ratio = jax.lax.stop_gradient(importance_ratio(log_probs, old_log_probs))
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -bounded * advantages * log_probs, bounded != ratio


def sapo_loss(
    log_probs: Float[Array, "*shape"],
    old_log_probs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    *,
    tau_positive: float,
    tau_negative: float,
) -> Losses:
    """sapo: a soft gate in place of the clip. The first tau is for A > 0."""
    ratio = importance_ratio(log_probs, jax.lax.stop_gradient(old_log_probs))
    tau = jnp.where(advantages > 0, tau_positive, tau_negative).astype(ratio.dtype)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return -gate * advantages, jnp.zeros(ratio.shape, bool)


def gpg_loss(log_probs: Float[Array, "*shape"], advantages: Float[Array, "*shape"]) -> Losses:
    """gpg: the plain policy gradient."""
    return -advantages * log_probs, jnp.zeros(log_probs.shape, bool)


def _log_ratio(log_probs: Array, old_log_probs: Array) -> Array:
    log_ratio = log_probs.astype(jnp.float32) - old_log_probs.astype(jnp.float32)
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> Losses:
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(unclipped, clipped), clipped > unclipped
