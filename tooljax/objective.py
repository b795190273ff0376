"""What an update minimises: GRPO's loss with its metrics, and the supervised loss of a cold start.

An objective is asked twice. On the host, before the update, `prepare` gives each token what its loss needs to know of
other tokens. On the device, for each microbatch, calling it gives the loss and the metrics: sums over tokens that are
divided by what belongs to the whole batch, so that microbatches and devices add up.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollout_sidecar.profiles import get_profile
from tooljax.batch import PackedBatch, TrainBatch
from tooljax.config import Config
from tooljax.config.schema import GrpoConfig
from tooljax.grpo.aggregation import token_mean
from tooljax.grpo.kl import k3, kl_estimate
from tooljax.grpo.policy_losses import PolicyLoss, importance_ratio
from tooljax.grpo.preparation import Correction, LogProbs, Preparation, Rejection
from tooljax.model.decoder import Decoder
from tooljax.model.remat import Remat
from tooljax.sampled import Sampled, sampled_log_probs, sampled_loss

Batch = TypeVar("Batch", bound=TrainBatch | PackedBatch)

Means = dict[str, Array]
"""Metrics of a microbatch: parts of a mean over the batch's loss tokens, or the largest of its tokens."""

LARGEST = ("policy/ratio_max",)
"""Metrics that are the largest over tokens; the others are means."""


@runtime_checkable
class Objective(Protocol):
    """What an update minimises."""

    def prepare(
        self, batch: Batch, log_probs: LogProbs, *, kl_coef: float | None = None
    ) -> tuple[Batch, dict[str, float]]:
        """The whole batch, on the host, with what tokens need to know of each other; and metrics of that.

        `kl_coef` is the weight of the KL in this update, where it is not the config's. ValueError if it cannot.
        """
        ...

    def metrics(self, batch: TrainBatch | PackedBatch) -> list[str]:
        """Names of the metrics that calling it gives for such a batch."""
        ...

    def __call__(
        self,
        decoder: Decoder | Sampled,
        batch: TrainBatch,
        denominator: Float[Array, ""],
        *,
        temperature: float,
        remat: Remat,
    ) -> tuple[Float[Array, ""], Means, Sampled]:
        """The loss of a microbatch, its metrics, and the log-probs that both were made from. `denominator` is the
        number of loss tokens of the whole batch. A replay has no decoder, but what it said then."""
        ...


@dataclass(frozen=True)
class GrpoObjective:
    """A policy loss, less entropy_coef times the entropy, plus kl_coef times the KL to the reference."""

    preparation: Preparation
    kl_coef: float
    """In the loss; 0 where the KL is in the reward."""
    kl_loss_type: str = "k3"

    def prepare(
        self, batch: Batch, log_probs: LogProbs, *, kl_coef: float | None = None
    ) -> tuple[Batch, dict[str, float]]:
        """As Objective.prepare. ValueError if the reference's log-probs are missing."""
        coefficient = self.kl_coef if kl_coef is None or not self.kl_coef else kl_coef
        if batch.loss_tokens == 0:
            return batch, {}
        if coefficient > 0 and not batch.has_ref:
            raise ValueError(
                f"kl_coef={coefficient} needs the log-probs of the reference policy: fill "
                "batch.ref_log_probs, or set grpo.kl_coef=0"
            )
        return self.preparation(batch, log_probs, coefficient)

    def metrics(self, batch: TrainBatch | PackedBatch) -> list[str]:
        """As Objective.metrics."""
        names = ["policy/loss", "policy/entropy", "policy/clip_frac", "policy/kl_mismatch"]
        names += [*LARGEST]
        return [*names, "policy/kl_ref"] if batch.has_ref else names

    def __call__(
        self,
        decoder: Decoder | Sampled,
        batch: TrainBatch,
        denominator: Float[Array, ""],
        *,
        temperature: float,
        remat: Remat,
    ) -> tuple[Float[Array, ""], Means, Sampled]:
        """As Objective.__call__, for a batch that has been prepared.

        Gradients of log-probs and the loss are made in one pass over the head; the gradient of an entropy takes two.
        """
        given = {"advantages": batch.advantages, "old": batch.old_log_probs} | batch.token_values
        given["ref"] = batch.ref_log_probs if "kl" in given else None
        options = {"temperature": temperature, "remat": remat}
        if self.preparation.entropy_coef and not isinstance(decoder, Sampled):
            log_probs, entropy = sampled_log_probs(decoder, batch, **options)
            loss = self._summed(log_probs, entropy, given, batch.loss_mask)
            log_probs, entropy = jax.lax.stop_gradient((log_probs, entropy))
        elif isinstance(decoder, Sampled):
            log_probs, entropy = decoder
            loss = self._summed(log_probs, entropy, given, batch.loss_mask)
        else:
            loss, log_probs, entropy = sampled_loss(
                decoder, batch, self._loss_of_token, given, denominator, **options
            )
        old = log_probs if batch.old_log_probs is None else batch.old_log_probs
        # Where the engine's log-probs stand for the old ones, only the current ones are the trainer's.
        trainers = log_probs if self.preparation.correction.bypass else old
        mean = partial(token_mean, mask=batch.loss_mask, denominator=denominator)
        sequence = given.get("sequence_log_ratio")
        clipped = self.preparation.policy(log_probs, old, batch.advantages, sequence)[1]
        ratio = importance_ratio(log_probs, old)
        means = {
            "policy/clip_frac": mean(clipped.astype(jnp.float32)),
            "policy/entropy": mean(entropy),
            "policy/kl_mismatch": mean(k3(batch.rollout_log_probs, trainers)),
            "policy/ratio_max": jnp.max(jnp.where(batch.loss_mask, ratio, 0.0)),
        }
        if batch.ref_log_probs is not None:
            means["policy/kl_ref"] = mean(k3(log_probs, batch.ref_log_probs))
        return loss, means | {"policy/loss": loss}, Sampled(log_probs, entropy)

    def _summed(self, log_probs: Array, entropy: Array, given: dict, mask: Array) -> Array:
        """The loss of a microbatch, from values that may have gradients."""
        losses = self._loss_of_token(log_probs, given)
        if self.preparation.entropy_coef:
            losses = losses - entropy * given["entropy"]
        return jnp.sum(jnp.where(mask, losses, 0.0))

    def _loss_of_token(self, log_probs: Array, given: dict[str, Array]) -> Array:
        """All but the entropy, token by token, with the weights that were prepared."""
        old = given["old"]
        # Before a batch's first update the two are equal: the ratio is 1, and only its gradient matters.
        old = jax.lax.stop_gradient(log_probs) if old is None else old
        sequence = given.get("sequence_log_ratio")
        loss = self.preparation.policy(log_probs, old, given["advantages"], sequence)[0]
        loss = loss * given["weight"]
        if "kl_cov" in given:
            loss = loss + given["kl_cov"] * jnp.abs(log_probs - old)
        if given["ref"] is not None:
            loss = loss + given["kl"] * kl_estimate(self.kl_loss_type, log_probs, given["ref"])
        return loss


@dataclass(frozen=True)
class SftObjective:
    """Mean negative log-likelihood of the loss tokens, under the untempered distribution."""

    def prepare(
        self, batch: Batch, log_probs: LogProbs, *, kl_coef: float | None = None
    ) -> tuple[Batch, dict[str, float]]:
        """Nothing is needed."""
        return batch, {}

    def metrics(self, batch: TrainBatch | PackedBatch) -> list[str]:
        """As Objective.metrics."""
        return ["policy/loss", "policy/entropy"]

    def __call__(
        self,
        decoder: Decoder | Sampled,
        batch: TrainBatch,
        denominator: Float[Array, ""],
        *,
        temperature: float,
        remat: Remat,
    ) -> tuple[Float[Array, ""], Means, Sampled]:
        """As Objective.__call__, but at temperature 1 whatever is given."""
        loss, log_probs, entropy = sampled_loss(
            decoder, batch, _negative, {}, denominator, temperature=1.0, remat=remat
        )
        means = {"policy/entropy": token_mean(entropy, batch.loss_mask, denominator)}
        return loss, means | {"policy/loss": loss}, Sampled(log_probs, entropy)


def make_objective(config: Config) -> GrpoObjective:
    """The objective that a config asks for."""
    grpo = config.grpo
    preparation = Preparation(
        policy=PolicyLoss(
            grpo.loss_mode,
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
            clip_dual=grpo.clip_dual,
            tau_positive=grpo.sapo_tau_positive,
            tau_negative=grpo.sapo_tau_negative,
        ),
        aggregation=grpo.loss_agg_mode,
        norm=float(grpo.loss_scale_factor or config.limits.max_trajectory_tokens),
        batch_mean=get_profile(config.sidecar.profile).seq_mean_token_sum_norm
        == "batch_mean_scale",
        entropy_coef=grpo.entropy_coef,
        cov_fraction=grpo.cov_fraction,
        clip_cov_low=grpo.clip_cov_low,
        clip_cov_high=grpo.clip_cov_high,
        kl_cov_coef=grpo.kl_cov_coef,
        correction=_correction(grpo),
    )
    in_loss = grpo.kl_in == "loss"
    return GrpoObjective(preparation, grpo.kl_coef if in_loss else 0.0, grpo.kl_loss_type)


def _correction(grpo: GrpoConfig) -> Correction:
    bounds = zip(
        grpo.rollout_rs,
        grpo.rollout_rs_low or (0.0,) * len(grpo.rollout_rs),
        grpo.rollout_rs_high,
        strict=True,
    )
    return Correction(
        level=grpo.rollout_is,
        low=grpo.rollout_is_low,
        high=grpo.rollout_is_high,
        normalize=grpo.rollout_is_normalize,
        # A ratio that has no lower bound of its own is bounded by the inverse of the upper one, as in verl.
        rejections=tuple(Rejection(kind, low or 1.0 / high, high) for kind, low, high in bounds),
        bypass=grpo.rollout_correction == "bypass",
    )


def _negative(log_probs: Array, given: dict[str, Array]) -> Array:
    return -log_probs * given["share"]
