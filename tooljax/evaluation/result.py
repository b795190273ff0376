"""What one evaluation saw, and the numbers that it comes to."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np

from rollout_sidecar.protocol import ToolCallRecord, Trajectory
from tooljax.evaluation.answers import answer_of
from tooljax.intervals import Interval, bootstrap_mean, clustered_wilson
from tooljax.metrics import pass_at_k, rollout_metrics

SUBSETS = 1000
"""Of a problem's samples: where there are more of size k, maj@k is the mean over so many random ones."""

Item = TypeVar("Item")

Problem = list[Trajectory]
"""The samples of one problem."""


class Row(NamedTuple):
    """One number of a report."""

    name: str
    """As a metric, without eval/."""
    label: str
    value: float
    interval: Interval | None = None
    """95 %; None for counts and for means that are no proportion."""
    n: int = 0
    """What it is the mean of: trajectories, calls or problems."""


@dataclass(frozen=True)
class Evaluation:
    """What a policy did on held-out problems."""

    problems: list[Problem]
    """Trajectories by task, then by sample."""
    seed: int = 0
    """Of the bootstraps, and of what is drawn for maj@k."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them."""
        return [trajectory for problem in self.problems for trajectory in problem]

    @cached_property
    def correct(self) -> list[list[bool]]:
        """By problem: whether each of its scored samples is right. A reward that failed is neither right nor wrong."""
        return [[is_correct(t) for t in problem if t.scored] for problem in self.problems]

    @property
    def accuracy(self) -> float:
        """Share of correct trajectories among the scored ones; NaN if there are none."""
        return mean([value for problem in self.correct for value in problem])

    @property
    def interval(self) -> Interval:
        """95 % interval of the accuracy."""
        return clustered_wilson(self.correct) if any(self.correct) else Interval(0.0, 1.0)

    @property
    def scores(self) -> list[float]:
        """Accuracy of each problem, NaN where nothing was scored: what a paired comparison compares."""
        return [mean(values) for values in self.correct]

    def pass_at(self, k: int) -> list[float]:
        """By problem: unbiased pass@k (Chen et al. 2021, eq. 1), NaN where fewer than k samples were scored."""
        return [
            pass_at_k(len(values), sum(values), k) if len(values) >= k else math.nan
            for values in self.correct
        ]

    def majority_at(self, k: int) -> list[float]:
        """By problem: maj@k, NaN where fewer than k samples were scored."""
        values = []
        for i, problem in enumerate(self.problems):
            votes = [(answer_of(t), is_correct(t)) for t in problem if t.scored]
            enough = len(votes) >= k
            values.append(majority(votes, k, seed=(self.seed, i)) if enough else math.nan)
        return values

    @property
    def ks(self) -> list[int]:
        """1, 2, 4, ... and the most samples that every problem with a scored one has."""
        most = min((len(values) for values in self.correct if values), default=0)
        return sorted({2**i for i in range(most.bit_length())} | ({most} if most else set()))

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Under eval/, for the trackers."""
        found = {f"eval/{k}": value for k, value in rollout_metrics(self.trajectories).items()}
        if any(self.correct):
            found["eval/accuracy"] = self.accuracy
        for k in self.ks:
            found[f"eval/pass_at_{k}"] = mean(self.pass_at(k))
            if k > 1:
                found[f"eval/maj_at_{k}"] = mean(self.majority_at(k))
        return found

    def rows(self) -> list[Row]:
        """The numbers of a report, in its order."""
        return [
            *self._accuracy_rows(),
            *self._tool_rows(),
            *self._length_rows(),
            *self.endings(),
        ]

    def endings(self) -> Iterator[Row]:
        """Why trajectories ended, the commonest first."""
        for status, _ in Counter(t.status for t in self.trajectories).most_common():
            label = f"ended: {status.replace('_', ' ')}"
            yield from _share(f"rollout/status/{status}_frac", label, self.problems, _is(status))

    # --- parts of the report ------------------------------------------------------------------------------------

    def _accuracy_rows(self) -> Iterator[Row]:
        scored = [[t for t in problem if t.scored] for problem in self.problems]
        yield from _share("accuracy", "accuracy", scored, is_correct)
        for k in self.ks[1:]:
            for name, values in (("pass", self.pass_at(k)), ("maj", self.majority_at(k))):
                kept = [value for value in values if not math.isnan(value)]
                interval = bootstrap_mean(kept, seed=self.seed)
                yield Row(f"{name}_at_{k}", f"{name}@{k}", mean(kept), interval, len(kept))
        for name, label, wanted in (
            ("with", "accuracy with a call", True),
            ("without", "accuracy without a call", False),
        ):
            kept = [[t for t in problem if bool(_calls(t)) == wanted] for problem in scored]
            yield from _share(f"rollout/accuracy_{name}_tools", label, kept, is_correct)
        yield from _share(
            "rollout/unscored_frac", "reward failed", self.problems, lambda t: not t.scored
        )

    def _tool_rows(self) -> Iterator[Row]:
        yield from _share("tools/use_rate", "tool use", self.problems, lambda t: bool(_calls(t)))
        counts = [len(_calls(t)) for t in self.trajectories]
        yield Row("tools/calls_per_trajectory", "calls", mean(counts), None, len(counts))
        calls = [[call for t in problem for call in _calls(t)] for problem in self.problems]
        yield from _share("tools/valid_call_rate", "calls that succeeded", calls, _is("ok"))
        for status in sorted({call.status for of_one in calls for call in of_one} - {"ok"}):
            label = f"calls: {status.replace('_', ' ')}"
            yield from _share(f"tools/status/{status}_frac", label, calls, _is(status))

    def _length_rows(self) -> Iterator[Row]:
        played = self.trajectories
        sampled = [sum(sum(s.loss_mask) for s in t.streams) for t in played]
        after = [sum(len(s.token_ids) - s.prompt_tokens for s in t.streams) for t in played]
        for name, label, values in (
            ("turns/mean", "turns", [len(t.turns) for t in played]),
            ("prompt_tokens/mean", "prompt tokens", [t.streams[0].prompt_tokens for t in played]),
            ("completion_tokens/mean", "tokens sampled", sampled),
            (
                "observation_tokens/mean",
                "tokens of tools",
                [a - s for a, s in zip(after, sampled, strict=True)],
            ),
        ):
            yield Row(f"rollout/{name}", label, mean(values), None, len(values))


def is_correct(trajectory: Trajectory) -> bool:
    """Whether the reward function called the answer right: acc >= 0.5, or the reward where it reports no acc."""
    return trajectory.scored and trajectory.metrics.get("acc", trajectory.reward) >= 0.5


def majority(
    votes: Sequence[tuple[str | None, bool]], k: int, *, seed: tuple[int, ...] = (0,)
) -> float:
    """maj@k: how often the commonest answer of k of the votes is right; the mean over all subsets of k.

    Over SUBSETS random ones where there are more. Of answers that are equally common, each counts its part. No answer
    (None) is no vote; k votes without one are wrong. An answer that was called right in some samples only, as a text
    may be that the reward reads otherwise, counts that share.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@{k} of {len(votes)} votes; needs 1 <= k <= votes")
    if math.comb(len(votes), k) <= SUBSETS:
        chosen = combinations(votes, k)
    else:
        rng = np.random.default_rng(seed)
        draws = (rng.choice(len(votes), k, replace=False) for _ in range(SUBSETS))
        chosen = ([votes[i] for i in draw] for draw in draws)
    return mean([_of_commonest(subset) for subset in chosen])


def _of_commonest(votes: Sequence[tuple[str | None, bool]]) -> float:
    right: dict[str, list[bool]] = {}
    for answer, correct in votes:
        if answer is not None:
            right.setdefault(answer, []).append(correct)
    if not right:
        return 0.0
    most = max(map(len, right.values()))
    return mean([mean(values) for values in right.values() if len(values) == most])


def _share(
    name: str, label: str, groups: Sequence[Sequence[Item]], holds: Callable[[Item], bool]
) -> Iterator[Row]:
    """The share of items for which something holds, with its interval; nothing where there are none."""
    values = [[float(holds(item)) for item in group] for group in groups]
    flat = [value for group in values for value in group]
    if flat:
        yield Row(name, label, mean(flat), clustered_wilson(values), len(flat))


def _is(status: str) -> Callable[[Trajectory | ToolCallRecord], bool]:
    return lambda item: item.status == status


def _calls(trajectory: Trajectory) -> list[ToolCallRecord]:
    return [call for turn in trajectory.turns for call in turn.calls]


def mean(values: Sequence[float]) -> float:
    """Of the values that are not NaN; NaN if all are."""
    kept = np.asarray(values, np.float64)
    kept = kept[~np.isnan(kept)]
    return float(kept.mean()) if len(kept) else math.nan
