"""The async section of the schema: rollouts of coming steps while the trainer updates."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tooljax.config.types import CountOrZero, Range

if TYPE_CHECKING:
    from tooljax.config.schema import Config

Problem = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class AsyncConfig:
    """Rollouts ahead of the update, and more of them than are waited for. By default neither."""

    max_policy_lag: CountOrZero = 0
    """How many steps older than the policy that is trained the one may be that sampled a token. Rollouts of so many
    later steps are under way while the trainer updates. 0: each step waits for its own, sampled with its weights."""
    oversampling: Annotated[float, Range(low=1, high=8)] = 1.0
    """So many times data.prompts_per_step groups are started; when that number of groups is complete, the others are
    aborted, and their tasks do not come again in this pass over the data. 1: none."""


def groups_started(config: "Config") -> int:
    """How many groups are started for a batch of data.prompts_per_step."""
    return math.ceil(config.async_.oversampling * config.data.prompts_per_step - 1e-9)


def async_problems(config: "Config") -> Iterator[Problem]:
    """What cannot go together with rollouts ahead of their step, or with oversampling."""
    lag, more = config.async_.max_policy_lag, config.async_.oversampling
    ahead = ("async.max_policy_lag", f"async.max_policy_lag={lag}", "async.max_policy_lag = 0")
    over = ("async.oversampling", f"async.oversampling={more:g}", "async.oversampling = 1.0")
    on = [each for each, is_on in ((ahead, lag > 0), (over, more > 1)) if is_on]
    if lag and config.sidecar.share_gpu:
        yield (
            ("async.max_policy_lag", "sidecar.share_gpu"),
            f"{ahead[1]} samples while the trainer updates, and sidecar.share_gpu takes the engine's memory for the "
            f"update; give the engine a GPU of its own and set sidecar.share_gpu = False, or {ahead[2]}",
        )
    for field, value, off in on:
        if config.curriculum.kind == "pools" or config.curriculum.class_path:
            chooser = "class_path" if config.curriculum.class_path else "kind"
            yield (
                (field, f"curriculum.{chooser}"),
                f"{value} takes tasks before it is known what came of the earlier ones, by which curriculum.{chooser} "
                f"chooses; set {off}, or use curriculum.stages",
            )
        if config.grpo.zero_variance == "refill":
            yield (
                (field, "grpo.zero_variance"),
                f"{value} cannot go with grpo.zero_variance='refill': which tasks fill a step up would depend on "
                f"timing, and a resumed run would take others; set grpo.zero_variance = 'skip', or {off}",
            )
    if more > 1 and config.grpo.adv_estimator == "remax":
        yield (
            ("async.oversampling", "grpo.adv_estimator"),
            f"{over[1]} aborts groups, and grpo.adv_estimator='remax' samples a baseline for every one of them; "
            f"set {over[2]}, or another estimator",
        )
