"""What an update minimises: GRPO's loss with its metrics, and the supervised loss of a cold start.

An objective is asked twice. On the host, before the update, `prepare` gives each token what its loss needs to know of
other tokens. On the device, for each microbatch, calling it gives the loss and the metrics: sums over tokens that are
divided by what belongs to the whole batch, so that microbatches and devices add up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tooljax.batch import TrainBatch
from tooljax.config.schema import GrpoConfig
from tooljax.grpo.aggregation import token_mean
from tooljax.grpo.kl import k3
from tooljax.grpo.policy_losses import clipped_ratio_loss, importance_ratio
from tooljax.model.decoder import Decoder
from tooljax.sampled import Sampled, sampled_loss

Means = dict[str, Array]
"""Metrics of a microbatch: parts of a mean over the batch's loss tokens, or the largest of its tokens."""

LARGEST = ("policy/ratio_max",)
"""Metrics that are the largest over tokens; the others are means."""

LogProbs = Callable[[TrainBatch], Float[np.ndarray, "rows time"]]
"""Log-probs of a batch's loss tokens under the weights that are about to be updated."""


@runtime_checkable
class Objective(Protocol):
    """What an update minimises."""

    def prepare(self, batch: TrainBatch, log_probs: LogProbs) -> TrainBatch:
        """The whole batch, on the host, with what tokens need to know of each other. ValueError if it cannot."""
        ...

    def metrics(self, batch: TrainBatch) -> list[str]:
        """Names of the metrics that calling it gives for such a batch."""
        ...

    def __call__(
        self,
        decoder: Decoder | Sampled,
        batch: TrainBatch,
        denominator: Float[Array, ""],
        *,
        temperature: float,
        remat: bool,
    ) -> tuple[Float[Array, ""], Means, Sampled]:
        """The loss of a microbatch, its metrics, and the log-probs that both were made from. `denominator` is the
        number of loss tokens of the whole batch. A replay has no decoder, but what it said then."""
        ...


@dataclass(frozen=True)
class GrpoObjective:
    """Token mean of the clipped surrogate plus kl_coef times k3."""

    clip_low: float
    clip_high: float
    kl_coef: float

    def prepare(self, batch: TrainBatch, log_probs: LogProbs) -> TrainBatch:
        """Nothing is added. ValueError if the reference's log-probs are missing."""
        if self.kl_coef > 0 and batch.ref_log_probs is None:
            raise ValueError(
                f"kl_coef={self.kl_coef} needs the log-probs of the reference policy: fill "
                "batch.ref_log_probs, or set grpo.kl_coef=0"
            )
        return batch

    def metrics(self, batch: TrainBatch) -> list[str]:
        """As Objective.metrics."""
        names = ["policy/loss", "policy/entropy", "policy/clip_frac", "policy/kl_mismatch"]
        names += [*LARGEST]
        return names if batch.ref_log_probs is None else [*names, "policy/kl_ref"]

    def __call__(
        self,
        decoder: Decoder | Sampled,
        batch: TrainBatch,
        denominator: Float[Array, ""],
        *,
        temperature: float,
        remat: bool,
    ) -> tuple[Float[Array, ""], Means, Sampled]:
        """As Objective.__call__."""
        given = {"advantages": batch.advantages, "old": batch.old_log_probs}
        given["ref"] = batch.ref_log_probs if self.kl_coef > 0 else None
        loss, log_probs, entropy = sampled_loss(
            decoder,
            batch,
            self._loss_of_token,
            given,
            denominator,
            temperature=temperature,
            remat=remat,
        )
        old = log_probs if batch.old_log_probs is None else batch.old_log_probs
        mean = partial(token_mean, mask=batch.loss_mask, denominator=denominator)
        clipped = self._surrogate(log_probs, old, batch.advantages)[1]
        ratio = importance_ratio(log_probs, old)
        means = {
            "policy/clip_frac": mean(clipped.astype(jnp.float32)),
            "policy/entropy": mean(entropy),
            "policy/kl_mismatch": mean(k3(batch.rollout_log_probs, old)),
            "policy/ratio_max": jnp.max(jnp.where(batch.loss_mask, ratio, 0.0)),
        }
        if batch.ref_log_probs is not None:
            means["policy/kl_ref"] = mean(k3(log_probs, batch.ref_log_probs))
        return loss, means | {"policy/loss": loss}, Sampled(log_probs, entropy)

    def _loss_of_token(self, log_probs: Array, given: dict[str, Array]) -> Array:
        """The clipped surrogate plus kl_coef times k3, token by token."""
        old = given["old"]
        # Before a batch's first update the two are equal: the ratio is 1, and only its gradient matters.
        old = jax.lax.stop_gradient(log_probs) if old is None else old
        loss = self._surrogate(log_probs, old, given["advantages"])[0]
        if given["ref"] is not None:
            loss = loss + self.kl_coef * k3(log_probs, given["ref"])
        return loss * given["share"]

    def _surrogate(self, log_probs, old, advantages) -> tuple[Array, Array]:
        return clipped_ratio_loss(
            log_probs, old, advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )


@dataclass(frozen=True)
class SftObjective:
    """Mean negative log-likelihood of the loss tokens, under the untempered distribution."""

    def prepare(self, batch: TrainBatch, log_probs: LogProbs) -> TrainBatch:
        """Nothing is needed."""
        return batch

    def metrics(self, batch: TrainBatch) -> list[str]:
        """As Objective.metrics."""
        return ["policy/loss", "policy/entropy"]

    def __call__(
        self,
        decoder: Decoder | Sampled,
        batch: TrainBatch,
        denominator: Float[Array, ""],
        *,
        temperature: float,
        remat: bool,
    ) -> tuple[Float[Array, ""], Means, Sampled]:
        """As Objective.__call__, but at temperature 1 whatever is given."""
        loss, log_probs, entropy = sampled_loss(
            decoder, batch, _negative, {}, denominator, temperature=1.0, remat=remat
        )
        means = {"policy/entropy": token_mean(entropy, batch.loss_mask, denominator)}
        return loss, means | {"policy/loss": loss}, Sampled(log_probs, entropy)


def make_objective(config: GrpoConfig) -> GrpoObjective:
    """The objective that a config asks for."""
    return GrpoObjective(
        clip_low=config.clip_low, clip_high=config.clip_high, kl_coef=config.kl_coef
    )


def _negative(log_probs: Array, given: dict[str, Array]) -> Array:
    return -log_probs * given["share"]
