"""Which checkpoint of a run is the best, by one metric of its evaluations."""

import math
from collections.abc import Mapping

from tooljax.checkpoint import Best
from tooljax.config.schema import EvaluateConfig
from tooljax.metrics import describe


def check_best_metric(config: EvaluateConfig) -> None:
    """Raises ValueError if no evaluation gives evaluate.best_metric."""
    name = config.best_metric
    if name and (not name.startswith("eval/") or describe(name) is None):
        raise ValueError(
            f"evaluate.best_metric={name!r} is no metric of evaluations; name one such as 'eval/accuracy' or "
            "'eval/reward/mean', or '' to keep no best checkpoint"
        )


def better(
    config: EvaluateConfig, best: Best | None, step: int, metrics: Mapping[str, float]
) -> Best | None:
    """The step, if its metrics hold the best value so far; None if not, or if they hold none. Equal is not better."""
    name = config.best_metric
    value = metrics.get(name, math.nan)
    if not name or not math.isfinite(value):
        return None
    sign = 1 if config.best_mode == "max" else -1
    # A best by another metric is none: the setting has changed since.
    if best and best.metric == name and sign * value <= sign * best.value:
        return None
    return Best(step, name, value)
