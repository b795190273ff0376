"""What each token's loss needs to know of other tokens, found out on the host before an update, for the whole batch:
its weight in the aggregation, its sequence's ratio, its importance weight, and whether it is rejected or held back.

With it the loss of a token depends on its own log-prob alone. Where that takes the log-probs of the current weights,
they are computed once more, without gradients; before a batch's first update the ratios are 1 and none are needed.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tooljax.batch import PackedBatch, TrainBatch
from tooljax.grpo.aggregation import token_weights
from tooljax.grpo.correction import (
    accepted,
    correction_metrics,
    importance_weights,
    weight_metrics,
)
from tooljax.grpo.covariance import clip_cov_tokens, covariances, kl_cov_tokens
from tooljax.grpo.policy_losses import PolicyLoss, one_sided_log_ratio
from tooljax.grpo.sequences import sequence_means

LogProbs = Callable[[Any], Any]
"""Log-probs of a batch's loss tokens under the weights that are about to be updated: [rows time], or a list of them for
a batch of several row lengths."""

Values = Float[np.ndarray, " tokens"]


class Rejection(NamedTuple):
    """A bound beyond which tokens leave the loss; `correction.accepted` says what `kind` may be."""

    kind: str
    low: float
    high: float


@dataclass(frozen=True)
class Correction:
    """What is done about tokens that another policy sampled; see `correction.py`."""

    level: str = ""
    """Importance weights of a token or of a sequence; "" for none."""
    low: float = 0.0
    high: float = 2.0
    normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    bypass: bool = False
    """The engine's log-probs stand for the old ones, and the current policy is the anchor of weights and rejections."""

    @property
    def used(self) -> bool:
        """Whether anything is weighted or rejected."""
        return bool(self.level or self.rejections)


@dataclass(frozen=True)
class Preparation:
    """How a batch is prepared."""

    policy: PolicyLoss
    aggregation: str = "token-mean"
    norm: float = 1.0
    """L of seq-mean-token-sum-norm."""
    batch_mean: bool = True
    entropy_coef: float = 0.0
    cov_fraction: float = 0.0002
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_coef: float = 1.0
    correction: Correction = field(default_factory=Correction)

    def __call__(
        self, batch: TrainBatch | PackedBatch, log_probs: LogProbs, kl_coef: float
    ) -> tuple[Any, dict[str, float]]:
        """The batch with token_values, without what is rejected; and metrics of what was done."""
        parts = batch.groups
        if self.correction.bypass:
            parts = tuple(replace(part, old_log_probs=part.rollout_log_probs) for part in parts)
        tokens = Tokens.of(parts, lambda: _listed(log_probs(batch)))
        parts, tokens, weights, metrics = self._corrected(parts, tokens)
        share = token_weights(
            self.aggregation, tokens.sequence, norm=self.norm, batch_mean=self.batch_mean
        )
        values = {"weight": share * weights}
        if kl_coef > 0:
            values["kl"] = share * kl_coef
        if self.entropy_coef:
            values["entropy"] = share * self.entropy_coef
        self._of_mode(tokens, share, values)
        parts = tuple(
            replace(part, token_values={n: laid[i] for n, laid in _laid_out(values, parts).items()})
            for i, part in enumerate(parts)
        )
        return (
            replace(batch, groups=parts) if isinstance(batch, PackedBatch) else parts[0]
        ), metrics

    def _corrected(
        self, parts: tuple[TrainBatch, ...], tokens: "Tokens"
    ) -> tuple[tuple[TrainBatch, ...], "Tokens", Values, dict[str, float]]:
        """Without rejected tokens, and the importance weights of those that stay."""
        how = self.correction
        if not how.used:
            return parts, tokens, np.ones(tokens.sequence.shape), {}
        anchor = tokens.old if tokens.old is not None and not how.bypass else tokens.current()
        log_ratio = anchor - tokens.rollout
        metrics = correction_metrics(anchor, tokens.rollout, tokens.sequence)
        weights = np.ones(tokens.sequence.shape)
        if how.level:
            weights = importance_weights(
                log_ratio,
                tokens.sequence,
                level="token" if how.level == "token" else "sequence",
                low=how.low,
                high=how.high,
                normalize=how.normalize,
            )
            metrics |= weight_metrics(weights, high=how.high)
        if how.rejections:
            kept = np.ones(tokens.sequence.shape, bool)
            for kind, low, high in how.rejections:
                kept &= accepted(log_ratio, tokens.sequence, kind=kind, low=low, high=high)
            metrics["policy/rejected_frac"] = float(1 - kept.mean()) if kept.size else 0.0
            masks = _laid_out({"kept": kept}, parts)["kept"]
            parts = tuple(
                replace(part, loss_mask=np.asarray(part.loss_mask) & (mask > 0))
                for part, mask in zip(parts, masks, strict=True)
            )
            tokens, weights = tokens.only(kept), weights[kept]
        return parts, tokens, weights, metrics

    def _of_mode(self, tokens: "Tokens", share: Values, values: dict[str, Values]) -> None:
        """Adds what the policy loss needs: sequences' log-ratios, or which tokens are held back."""
        mode, clip = self.policy.mode, (self.policy.clip_low, self.policy.clip_high)
        if mode in ("gspo", "geo_mean") and tokens.old is not None:
            log_ratio = tokens.current() - tokens.old
            if mode == "geo_mean":
                log_ratio = one_sided_log_ratio(
                    log_ratio, tokens.advantages, clip_low=clip[0], clip_high=clip[1], xp=np
                )
            values["sequence_log_ratio"] = sequence_means(log_ratio, tokens.sequence)
        if mode in ("clip_cov", "kl_cov"):
            covariance = covariances(tokens.current(), tokens.advantages)
            if mode == "kl_cov":
                chosen = kl_cov_tokens(covariance, fraction=self.cov_fraction)
                values["kl_cov"] = values["weight"] * chosen * self.kl_cov_coef
                return
            old = tokens.current() if tokens.old is None else tokens.old
            ratio = np.exp(np.clip(tokens.current() - old, -20.0, 20.0))
            up = tokens.advantages > 0
            clipped = np.where(up, ratio > 1 + clip[1], ratio < 1 - clip[0])
            order, chosen = tokens.order(), np.zeros(covariance.shape, bool)
            chosen[order] = clip_cov_tokens(
                covariance[order],
                (clipped & (tokens.advantages != 0))[order],
                fraction=self.cov_fraction,
                low=self.clip_cov_low,
                high=self.clip_cov_high,
                rng=tokens.rng(),
            )
            values["weight"] = values["weight"] * ~chosen


@dataclass(frozen=True)
class Tokens:
    """The loss tokens of a whole batch, one after the other, in float64."""

    sequence: Int[np.ndarray, " tokens"]
    advantages: Values
    rollout: Values
    old: Values | None
    current: Callable[[], Values]
    """Log-probs under the current weights; computed when they are first asked for."""

    @classmethod
    def of(cls, parts: Sequence[TrainBatch], log_probs: Callable[[], list[Any]]) -> "Tokens":
        """Those of a batch, given as its groups of rows of one length."""
        masks = [np.asarray(part.loss_mask) for part in parts]

        def flat(arrays: Sequence[Any]) -> Values:
            cut = [np.asarray(x)[mask] for x, mask in zip(arrays, masks, strict=True)]
            return np.concatenate(cut).astype(np.float64)

        found: list[Values] = []

        def current() -> Values:
            if not found:
                found.append(flat(log_probs()))
            return found[0]

        old = [part.old_log_probs for part in parts]
        return cls(
            sequence=flat([part.sequence_ids for part in parts]).astype(np.int64),
            advantages=flat([part.advantages for part in parts]),
            rollout=flat([part.rollout_log_probs for part in parts]),
            old=None if old[0] is None else flat(old),
            current=current,
        )

    def only(self, kept: Bool[np.ndarray, " tokens"]) -> "Tokens":
        """Those that are kept."""
        return Tokens(
            sequence=self.sequence[kept],
            advantages=self.advantages[kept],
            rollout=self.rollout[kept],
            old=None if self.old is None else self.old[kept],
            current=lambda: self.current()[kept],
        )

    def order(self) -> Int[np.ndarray, " tokens"]:
        """One that is the same however the batch was packed."""
        return np.lexsort((self.rollout, self.sequence))

    def rng(self) -> np.random.Generator:
        """Draws that derive from what was sampled: the same tokens give the same ones, in a resumed run too, and in
        rows of other lengths."""
        return np.random.default_rng(zlib.crc32(self.rollout[self.order()].tobytes()))


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _laid_out(
    values: dict[str, np.ndarray], parts: Sequence[TrainBatch]
) -> dict[str, list[np.ndarray]]:
    """Values per loss token as float32 [rows time] of each part, 0 elsewhere."""
    masks = [np.asarray(part.loss_mask) for part in parts]
    cuts = np.cumsum([mask.sum() for mask in masks])[:-1]
    out: dict[str, list[np.ndarray]] = {}
    for name, flat in values.items():
        laid = [np.zeros(mask.shape, np.float32) for mask in masks]
        for array, mask, piece in zip(laid, masks, np.split(flat, cuts), strict=True):
            array[mask] = piece
        out[name] = laid
    return out
