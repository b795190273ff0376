"""From the trajectories of a step to the batch that is trained on: which of them count, and for how much."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Bool, Float

from rollout_sidecar.protocol import Trajectory
from tooljax.batch import (
    Batch,
    PackedBatch,
    PackItem,
    packed,
    trajectory_items,
    unpack,
    unpack_field,
    with_advantages,
)
from tooljax.config import Config
from tooljax.config.schema import GrpoConfig
from tooljax.grpo.advantages import zero_variance
from tooljax.grpo.estimators import (
    NOT_RELATIVE,
    WHITENED,
    decoupled_advantages,
    discounted_returns,
    estimated_advantages,
    turn_advantages,
    whitened,
)
from tooljax.grpo.kl import kl_estimate
from tooljax.rollouts import Groups
from tooljax.store.store import Credit
from tooljax.update import Metrics

UNTRAINABLE = ("engine_error", "tool_error", "interaction_error", "context_rewritten", "aborted")
"""Trajectories that ended so say nothing about the policy, whatever was sampled before."""

ZERO_VARIANCE = "all rewards of its group are equal"
"""Why those trajectories are left out, unless grpo.zero_variance keeps them."""

SURPLUS = "the batch was full"
"""Why groups are left out that grpo.zero_variance = "refill" has sampled beyond data.prompts_per_step."""

BASELINE = "its reward is what its group is compared with"
"""Why the greedy trajectories are left out that remax takes as baselines."""

NO_BASELINE = "the greedy trajectory of its prompt has no reward that counts"
"""Why a group is left out that remax has nothing to compare with."""

Values = Float[np.ndarray, " _tokens"]
"""Of one trajectory's sampled tokens; each has its own number of them."""


@dataclass(frozen=True)
class Judged:
    """The trajectories of a step, by group and sample."""

    groups: Groups
    reward: Float[np.ndarray, "prompt group"]
    valid: Bool[np.ndarray, "prompt group"]
    """Whether something was sampled, and its reward says something about the policy."""
    flat: Bool[np.ndarray, " prompt"]
    """Groups whose rewards are all equal."""
    dropped: list[list[str]]
    """Why a trajectory is not trained on; "" for the others."""
    baseline: Float[np.ndarray, " prompt"] | None = None
    """remax: rewards of the greedy trajectories."""

    @property
    def members(self) -> list[tuple[int, int]]:
        """Group and sample of those that are trained on."""
        return [
            (i, j) for i, row in enumerate(self.dropped) for j, why in enumerate(row) if not why
        ]


def make_batch(config: Config, groups: Groups, *, shards: int = 1) -> tuple[Batch, Metrics, Credit]:
    """The batch to train on: every trajectory weighted with its advantage in its group. Beside it metrics, and who got
    what, and why not. `shards` is the number of devices that the rows of a microbatch are spread over.

    Trajectories without a sampled token, or that ended by somebody's fault but the policy's, count for nothing. A
    group whose rewards are all equal teaches nothing; grpo.zero_variance says whether its tokens stay for the KL term.
    """
    judged = _judged(config, groups)
    advantages = _advantages(config.grpo, judged)
    batch = packed(
        _items(judged, advantages),
        row_lengths=config.batch.row_lengths,
        rows_per_microbatch=config.batch.rows_per_microbatch,
        mixed_lengths=config.batch.mixed_lengths,
        shards=shards,
        shared_prompts=config.batch.shared_prompts == "auto",
    )
    metrics = {
        "reward/zero_variance_group_frac": float(judged.flat.mean()),
        "perf/padding_fraction": batch.padding_fraction,
        "perf/shared_prompt_frac": batch.saved_tokens / max(batch.tokens_of_items, 1),
        "perf/loss_tokens": float(batch.loss_tokens),
        "rollout/untrainable_frac": float(
            1 - judged.valid.sum() / len(sampled(config.grpo, groups))
        ),
    }
    if config.grpo.zero_variance == "refill":
        metrics["rollout/refill_batches"] = len(groups) / config.data.prompts_per_step
    each = np.zeros(judged.reward.shape, np.float32)
    for (i, j), values in zip(judged.members, advantages, strict=True):
        each[i, j] = values.mean()
    return batch, metrics, Credit(each, judged.dropped)


def with_kl_in_reward(
    config: Config, groups: Groups, batch: Batch, kl_coef: float
) -> tuple[Batch, float]:
    """The batch of make_batch with advantages of rewards less kl_coef times the KL of each token, and that KL's mean
    over trajectories. Old and reference log-probs must be filled in."""
    judged = _judged(config, groups)
    kl = [
        kl_estimate(
            config.grpo.kl_loss_type,
            jnp.asarray(part.old_log_probs),
            jnp.asarray(part.ref_log_probs),
        )
        for part in batch.groups
    ]
    of_streams = unpack(kl if isinstance(batch, PackedBatch) else kl[0], batch)
    streams = iter(zip(of_streams, unpack_field("loss_mask", batch), strict=True))
    found = []
    for i, j in judged.members:
        own = [next(streams) for _ in trajectory_items(groups[i][j], 0.0)]
        found.append(np.concatenate([values[mask] for values, mask in own]).astype(np.float64))
    advantages = _advantages(config.grpo, judged, [kl_coef * values for values in found])
    mean = float(np.mean([values.mean() for values in found])) if found else 0.0
    items = _items(judged, advantages)
    return with_advantages(batch, [item.advantage for item in items]), mean


def refilled(config: Config, sample: Callable[[int], Groups]) -> Groups:
    """The groups of a step. With grpo.zero_variance = "refill", `sample` is asked for more batches of prompts, by their
    number, until data.prompts_per_step groups teach something, at most grpo.refill_max_batches times."""
    groups = sample(0)
    if config.grpo.zero_variance != "refill":
        return groups
    for number in range(1, config.grpo.refill_max_batches):
        if _teaching(_judged(config, groups)).sum() >= config.data.prompts_per_step:
            break
        first = len(groups)
        groups = groups + [
            [msgspec.structs.replace(t, task_index=first + t.task_index) for t in group]
            for group in sample(number)
        ]
    return groups


def with_greedy(groups: Groups, greedy: Groups) -> Groups:
    """The groups, each with the greedy trajectory of its prompt behind its own: what remax compares them with."""
    return [
        [*group, *(msgspec.structs.replace(t, sample_index=len(group)) for t in own)]
        for group, own in zip(groups, greedy, strict=True)
    ]


def sampled(grpo: GrpoConfig, groups: Groups) -> list[Trajectory]:
    """All trajectories but those that `with_greedy` has added."""
    return [t for group in groups for t in group if not _is_greedy(grpo, t)]


def why_untrainable(trajectory: Trajectory) -> str:
    """Why a trajectory is left out of every batch; "" if it can be trained on."""
    if trajectory.status in UNTRAINABLE:
        return f"it ended by {trajectory.status}"
    if not any(any(stream.loss_mask) for stream in trajectory.streams):
        return "nothing was sampled"
    return "" if trajectory.scored else "it has no reward"


def _judged(config: Config, groups: Groups) -> Judged:
    grpo = config.grpo
    reward = np.array([[t.reward for t in group] for group in groups], np.float32)
    dropped = [[why_untrainable(trajectory) for trajectory in group] for group in groups]
    valid = np.array([[not why for why in row] for row in dropped])
    baseline = None
    if grpo.adv_estimator == "remax":
        assert all(_is_greedy(grpo, group[-1]) for group in groups), "see with_greedy"
        baseline, known = reward[:, -1].astype(np.float64), valid[:, -1].copy()
        dropped = [
            [*((why or NO_BASELINE * (not has)) for why in row[:-1]), BASELINE]
            for row, has in zip(dropped, known, strict=True)
        ]
        valid = np.array([[not why for why in row] for row in dropped])
    parts = _parts(grpo, groups) if grpo.reward_keys else reward[None]
    flat = np.all([np.asarray(zero_variance(part, valid=valid)) for part in parts], axis=0)
    judged = Judged(groups, reward, valid, flat, dropped, baseline)
    if grpo.zero_variance == "keep" or grpo.adv_estimator in NOT_RELATIVE:
        return judged
    wanted = config.data.prompts_per_step if grpo.zero_variance == "refill" else len(groups)
    taken = np.cumsum(_teaching(judged)) <= wanted
    for i, row in enumerate(dropped):
        why = ZERO_VARIANCE if flat[i] else "" if taken[i] else SURPLUS
        dropped[i] = [known or why for known in row]
    return judged


def _is_greedy(grpo: GrpoConfig, trajectory: Trajectory) -> bool:
    return grpo.adv_estimator == "remax" and trajectory.sample_index >= grpo.group_size


def _teaching(judged: Judged) -> Bool[np.ndarray, " prompt"]:
    return ~judged.flat


def _parts(grpo: GrpoConfig, groups: Groups) -> Float[np.ndarray, "key prompt group"]:
    """Each of grpo.reward_keys of every trajectory; 0 where one does not report it."""
    known = [[{**t.metrics, **t.reward_terms} for t in group] for group in groups]
    for key in grpo.reward_keys:
        if not any(key in values for row in known for values in row):
            names = sorted({name for row in known for values in row for name in values})
            raise ValueError(
                f"grpo.reward_keys has {key!r}, which no trajectory of this step reports; they report {names}"
            )
    return np.array(
        [[[v.get(key, 0.0) for v in row] for row in known] for key in grpo.reward_keys], np.float32
    )


def _advantages(
    grpo: GrpoConfig, judged: Judged, penalties: Sequence[Values] | None = None
) -> list[Values]:
    """Of each sampled token of each member, float64. `penalties` are taken off the rewards of their tokens."""
    members, kind = judged.members, grpo.adv_estimator
    lengths = np.array(
        [[sum(sum(s.loss_mask) for s in t.streams) for t in group] for group in judged.groups]
    )
    reward = judged.reward.astype(np.float64)
    for (i, j), penalty in zip(members, penalties or (), strict=bool(penalties)):
        reward[i, j] -= penalty.sum()
    if kind == "gdpo":
        weights = np.array(grpo.reward_weights or (1.0,) * len(grpo.reward_keys))
        parts = _parts(grpo, judged.groups)
        each = decoupled_advantages(
            parts, weights, valid=judged.valid, scale_by_std=grpo.scale_by_std
        )
    else:
        each = estimated_advantages(
            kind,
            reward,
            valid=judged.valid,
            lengths=lengths,
            scale_by_std=grpo.scale_by_std,
            baseline=judged.baseline,
        )
    out = [np.full(lengths[member], each[member]) for member in members]
    if kind in NOT_RELATIVE:
        out = []
        for m, member in enumerate(members):
            own = -penalties[m] if penalties else np.zeros(lengths[member])
            # On the last trained token, wherever the trajectory ends.
            own[-1] += judged.reward[member]
            out.append(discounted_returns(own, gamma=grpo.gamma))
            if judged.baseline is not None:
                out[-1] -= judged.baseline[member[0]]
    if kind in WHITENED and out:
        cuts = np.cumsum([values.size for values in out])[:-1]
        out = np.split(whitened(np.concatenate(out)), cuts)
    return _with_turns(grpo, judged, out) if grpo.turn_coef else out


def _with_turns(grpo: GrpoConfig, judged: Judged, advantages: list[Values]) -> list[Values]:
    """Adds how the rewards of each turn compare, over the members of a group that have such a turn."""
    out = [values.copy() for values in advantages]
    of_group: dict[int, list[int]] = {}
    for m, (i, _) in enumerate(judged.members):
        of_group.setdefault(i, []).append(m)
    for i, group in of_group.items():
        trajectories = {m: judged.groups[i][judged.members[m][1]] for m in group}
        turns = {m: _turn_of_token(t) for m, t in trajectories.items()}
        for k in range(max(len(t.turns) for t in trajectories.values())):
            there = [m for m in group if k < len(trajectories[m].turns)]
            rewards = np.array([_turn_reward(trajectories[m], k) for m in there])
            found = turn_advantages(rewards, scale_by_std=grpo.scale_by_std)
            for m, advantage in zip(there, found, strict=True):
                out[m][turns[m] == k] += grpo.turn_coef * advantage
    return out


def _turn_reward(trajectory: Trajectory, k: int) -> float:
    """What tools and interaction gave to a turn, unweighted."""
    turn = trajectory.turns[k]
    return sum(call.reward for call in turn.calls) + (turn.reply.score if turn.reply else 0.0)


def _turn_of_token(trajectory: Trajectory) -> np.ndarray:
    """The number of the turn that each sampled token belongs to."""
    found = []
    for index, stream in enumerate(trajectory.streams):
        numbers = np.full(len(stream.token_ids), -1)
        for k, turn in enumerate(trajectory.turns):
            if turn.stream == index:
                numbers[turn.start : turn.end] = k
        found.append(numbers[np.asarray(stream.loss_mask, bool)])
    return np.concatenate(found)


def _items(judged: Judged, advantages: Sequence[Values]) -> list[PackItem]:
    """The streams of each member, with the advantages of their tokens."""
    items = []
    for sequence, ((i, j), values) in enumerate(zip(judged.members, advantages, strict=True)):
        start = 0
        for item in trajectory_items(judged.groups[i][j], 0.0):
            mask = np.asarray(item.loss_mask, bool)
            laid = np.zeros(mask.shape)
            laid[mask] = values[start : start + mask.sum()]
            start += mask.sum()
            items.append(replace(item, advantage=laid.tolist(), sequence=sequence))
    return items
