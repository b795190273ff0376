"""What a step's trajectories and tokens are like beyond their means: the values that trackers make histograms of."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_sidecar.protocol import Trajectory
from tooljax.batch import Batch
from tooljax.histograms import Values
from tooljax.sampled import Sampled
from tooljax.store.store import Credit

NAMES = (
    "distribution/reward",
    "distribution/advantage",
    "distribution/ratio",
    "distribution/mismatch_ratio",
    "distribution/completion_tokens",
    "distribution/observation_tokens",
    "distribution/turns",
)
"""All that there are. What has no value in a step is left out of it."""


def distributions(
    groups: Sequence[Sequence[Trajectory]],
    credit: Credit,
    batch: Batch,
    seen: Sequence[Sampled | None],
    prepared: Any = None,
) -> dict[str, Values]:
    """The values of a step under NAMES, in float64.

    Args:
        groups: all trajectories of the step; aborted ones count for nothing.
        credit: what was made of them; advantages are of those that were trained on.
        batch: what was trained on, as the update gave it back.
        seen: Updater.seen of the last update: log-probs of each microbatch. If there are none, ratios are left out.
        prepared: Updater.prepared of it, [rows time] or a list of them; None if nothing was.
    """
    kept = [t for group in groups for t in group if t.status != "aborted"]
    sampled = [sum(sum(stream.loss_mask) for stream in t.streams) for t in kept]
    beyond_prompt = [sum(len(s.token_ids) - s.prompt_tokens for s in t.streams) for t in kept]
    advantages = [
        credit.advantages[i, j]
        for i, row in enumerate(credit.dropped)
        for j, why in enumerate(row)
        if not why
    ]
    found = {
        "distribution/reward": [t.reward for t in kept if t.scored],
        "distribution/advantage": advantages,
        "distribution/completion_tokens": sampled,
        "distribution/observation_tokens": np.subtract(beyond_prompt, sampled),
        "distribution/turns": [len(t.turns) for t in kept],
    } | _ratios(batch, seen, prepared)
    arrays = {name: np.asarray(found[name], np.float64) for name in NAMES if name in found}
    return {name: values for name, values in arrays.items() if values.size}


def _ratios(batch: Batch, seen: Sequence[Sampled | None], prepared: Any) -> dict[str, Values]:
    """Of each loss token: policy to old policy, where that is another; trainer's old policy to engine."""
    if not seen:
        return {}
    own, left = [], iter(seen)
    rows = sum(part.tokens.shape[0] for part in batch.groups) // len(seen)
    for part in batch.groups:
        none = np.zeros((rows, part.tokens.shape[1]), np.float32)
        pieces = [next(left) for _ in range(part.tokens.shape[0] // rows)]
        # 0 where a microbatch had nothing to learn from, and at tokens that off-policy rejection left out.
        log_probs = [none if each is None else np.asarray(each.log_probs) for each in pieces]
        own.append(np.concatenate(log_probs))
    before = list(prepared) if isinstance(prepared, list) else [prepared] * len(own)
    update, mismatch = [], []
    for part, now, asked in zip(batch.groups, own, before, strict=True):
        mask, old = np.asarray(part.loss_mask), part.old_log_probs
        if old is not None:
            trained = mask & (now != 0)
            update.append(np.exp((now - np.asarray(old))[trained]))
        trainers = next(np.asarray(each) for each in (asked, old, now) if each is not None)
        compared = mask & (trainers != 0)
        mismatch.append(np.exp((trainers - np.asarray(part.rollout_log_probs))[compared]))
    ratios = {"distribution/mismatch_ratio": np.concatenate(mismatch)}
    return ratios | ({"distribution/ratio": np.concatenate(update)} if update else {})
