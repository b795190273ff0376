"""Two policies on the same problems: the difference of their means, with a paired bootstrap interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tooljax.evaluation.conditions import Condition
from tooljax.evaluation.result import Evaluation, mean
from tooljax.intervals import Interval, paired_bootstrap


class Measured(NamedTuple):
    """A condition, and what came of it."""

    condition: Condition
    evaluation: Evaluation


class Difference(NamedTuple):
    """The reference's mean less another condition's, over the problems that both have a value for."""

    measure: str
    """accuracy, pass@k or maj@k."""
    other: Condition
    value: float
    interval: Interval
    """95 %, a paired bootstrap over problems."""
    problems: int
    won: int
    """Problems on which the reference's value is the higher one."""
    lost: int


@dataclass(frozen=True)
class Comparison:
    """All conditions of an evaluation, on the same prompts and seeds."""

    measured: list[Measured]
    source: str = ""
    """Where the trained weights came from."""
    note: str = ""
    """What was not as the settings asked, in a sentence."""

    @property
    def reference(self) -> Measured:
        """What the others are compared with: the trained policy with everything, else the first with everything."""
        whole = [one for one in self.measured if not one.condition.withheld]
        trained = [one for one in self.measured if one.condition.who == "trained"]
        unhindered = [one for one in whole if one in trained]
        return (unhindered or trained or whole or self.measured)[0]

    def differences(self) -> list[Difference]:
        """Accuracy first, condition by condition; pass@k and maj@k of the largest k too where k > 1."""
        reference = self.reference
        others = [one for one in self.measured if one is not reference]
        k = min((max(one.evaluation.ks, default=0) for one in self.measured), default=0)
        found = []
        for other in others:
            both = reference.evaluation, other.evaluation
            pairs = {"accuracy": [one.scores for one in both]}
            if k > 1:
                pairs[f"pass@{k}"] = [one.pass_at(k) for one in both]
                pairs[f"maj@{k}"] = [one.majority_at(k) for one in both]
            for measure, (ours, theirs) in pairs.items():
                found += _difference(measure, other.condition, ours, theirs, both[0].seed)
        return found


def _difference(
    measure: str, other: Condition, ours: Sequence[float], theirs: Sequence[float], seed: int
) -> list[Difference]:
    """One, or none where no problem has both values."""
    pairs = [
        (a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isnan(a) or math.isnan(b))
    ]
    if not pairs:
        return []
    mine, other_ones = [a for a, _ in pairs], [b for _, b in pairs]
    return [
        Difference(
            measure,
            other,
            mean(mine) - mean(other_ones),
            paired_bootstrap(other_ones, mine, seed=seed),
            len(pairs),
            sum(a > b for a, b in pairs),
            sum(a < b for a, b in pairs),
        )
    ]
