"""Distributions of a step, against numbers worked by hand; docs/metrics.md has each."""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from rollout_sidecar.protocol import Trajectory, Turn
from tooljax.batch import PackItem, pack, pack_mixed
from tooljax.distributions import NAMES, distributions
from tooljax.sampled import Sampled
from tooljax.store.store import Credit
from tooljax.training_batch import ZERO_VARIANCE

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def trajectory(mask: list[bool], **changes) -> Trajectory:
    fields = {
        "task_index": 0,
        "sample_index": 0,
        "task_id": "t",
        "seed": 1,
        "status": "completed",
        "token_ids": [1] * len(mask),
        "prompt_tokens": 2,
        "loss_mask": mask,
        "turns": [Turn(start=2, end=3, policy_version=0, finish="stop")],
    }
    return Trajectory(**fields | changes)


def item(log_probs: list[float]) -> PackItem:
    """One token of prompt, then those that were sampled."""
    return PackItem(
        token_ids=[1] * (1 + len(log_probs)),
        loss_mask=[False] + [True] * len(log_probs),
        advantage=1.0,
        rollout_log_probs=[0.0, *log_probs],
    )


def new_batch():
    """Two rows of 4: three sampled tokens and two, in microbatches of one row."""
    return pack([item([-1.0, -1.0, -1.0]), item([-2.0, -2.0])], row_lengths=(4,), rows_multiple=1)


NOTHING = Credit(np.zeros((0, 0), np.float32), [])


def test_trajectories_by_hand():
    sampled = [False, False, True, True, False, True]  # of 4 beyond the prompt, 3
    groups = [
        [trajectory(sampled, reward=1.0), trajectory([False, False, True], reward=0.5)],
        [trajectory([False, False, True], scored=False), trajectory([], status="aborted")],
    ]
    dropped = [["", ""], [ZERO_VARIANCE, "aborted"]]
    credit = Credit(np.array([[0.75, -0.75], [9.0, 9.0]], np.float32), dropped)
    found = distributions(groups, credit, new_batch(), seen=[])
    assert {name: values.tolist() for name, values in found.items()} == {
        "distribution/reward": [1.0, 0.5],
        "distribution/advantage": [0.75, -0.75],
        "distribution/completion_tokens": [3.0, 1.0, 1.0],
        "distribution/observation_tokens": [1.0, 0.0, 0.0],
        "distribution/turns": [1.0, 1.0, 1.0],
    }
    assert all(values.dtype == np.float64 for values in found.values())


def seen(*rows: list[float]) -> list[Sampled | None]:
    """Of each microbatch, its one row of log-probs; a microbatch without a loss token has none."""
    return [Sampled(jnp.array([row]), jnp.ones((1, len(row)))) if row else None for row in rows]


def ratios(batch, kept, prepared=None) -> dict[str, list[float]]:
    """Logarithms, rounded."""
    found = distributions([], NOTHING, batch, kept, prepared)
    return {name: np.log(values).round(5).tolist() for name, values in found.items()}


def test_ratios_of_one_update_are_those_of_trainer_to_engine():
    kept = seen([0.0, -1.5, -0.5, -1.0], [0.0, -2.25, -1.75, 0.0])
    assert ratios(new_batch(), kept) == {
        "distribution/mismatch_ratio": [-0.5, 0.5, 0.0, -0.25, 0.25]
    }


def test_ratios_of_a_later_update_are_to_the_policy_before_the_first():
    old = np.array([[0.0, -1.25, -1.0, -1.0], [0.0, -2.0, -2.0, 0.0]], np.float32)
    batch = replace(new_batch(), old_log_probs=old)
    kept = seen([0.0, -1.5, -0.5, -1.0], [0.0, -2.25, -1.75, 0.0])
    assert ratios(batch, kept) == {
        "distribution/ratio": [-0.25, 0.5, 0.0, -0.25, 0.25],
        "distribution/mismatch_ratio": [-0.25, 0.0, 0.0, 0.0, 0.0],
    }


def test_rejected_tokens_are_compared_with_the_engine_and_have_no_ratio():
    prepared = np.array([[0.0, -1.5, -9.0, -1.0], [0.0, -2.0, -2.0, 0.0]], np.float32)
    kept = seen([0.0, -1.5, 0.0, -1.0], [])  # a token of the first row, and all of the second
    told = ratios(new_batch(), kept, prepared)
    assert told == {"distribution/mismatch_ratio": [-0.5, -8.0, 0.0, 0.0, 0.0]}
    batch = replace(new_batch(), old_log_probs=prepared)
    assert ratios(batch, kept)["distribution/ratio"] == [0.0, 0.0]


def test_rows_of_several_lengths():
    batch = pack_mixed([item([-1.0]), item([-1.0] * 7)], row_lengths=(2, 8), rows_per_microbatch=1)
    by_length = {2: [0.0, -1.5], 8: [0.0] + [-2.0] * 7}
    kept = seen(*(by_length[group.tokens.shape[1]] for group in batch.groups))
    assert sorted(ratios(batch, kept)["distribution/mismatch_ratio"]) == [-1.0] * 7 + [-0.5]


def test_nothing_is_told_of_nothing():
    assert distributions([], NOTHING, new_batch(), seen=[]) == {}


def test_the_page_has_each():
    table = PAGE.read_text(encoding="utf-8").split("| histogram | of what |")[1].split("\n\n")[0]
    told = [f"distribution/{name}" for name in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)]
    assert tuple(told) == NAMES
