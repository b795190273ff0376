"""Guard rails: looks at what each step logs, says what is wrong, and what is to be done about it.

Pure logic over metrics by name (`tooljax.metrics`); the loop in `tooljax.train` does what is asked. What rollouts show
(truncation, tool collapse, reward hacking) is known before the update; what the update shows (mismatch, entropy,
gradient norm) while it is made: `update_limits` are for the updater, which leaves out an update beyond them.
"""

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import fmean, variance
from typing import Any, NamedTuple

from tooljax.config.schema import GuardConfig

log = logging.getLogger("tooljax")

EVALUATIONS = 4
"""Of eval/accuracy, how many the rule against reward hacking looks back on: two against the two before."""

USED = 0.1
"""A call rate below this is no tool use that could collapse."""

_LOOK = {
    "policy/kl_mismatch": "engine and trainer disagree about the sampled tokens; gate/mean_kl says how much of it is "
    "numerics, policy/lag/max how stale the samples are",
    "low policy/entropy": "the policy no longer explores; look at reward/zero_variance_group_frac, and raise "
    "grpo.clip_high, grpo.kl_coef or sampling.temperature",
    "policy/entropy": "the policy falls apart into noise; read samples of the step, look at policy/kl_ref, and lower "
    "optimizer.learning_rate",
    "optim/grad_norm": "look at policy/ratio_max and rollout/completion_tokens/max of the step, and lower "
    "optimizer.learning_rate or optimizer.clip_norm",
    "rollout/truncated_frac": "rollout/status/*_frac say which limit is met; raise that one of the limits section, or "
    "set reward.overlong",
    "tools/use_rate": "the policy stops calling tools; compare rollout/accuracy_with_tools with "
    "rollout/accuracy_without_tools, look at tools/valid_call_rate and tools/<name>/error_rate; reward.valid_call "
    "pays for calls",
    "accuracy": "the reward is earned by something else than right answers; look at reward/terms/*/mean, and read "
    "wrong trajectories of high reward",
}


class Alarm(NamedTuple):
    """A metric beyond its limit."""

    metric: str
    value: float
    setting: str
    """The field of the guard section that holds the limit."""
    sentence: str
    """For people: metric, value, limit, and what to look at."""


class GuardStop(RuntimeError):
    """The guard rails end the run."""


class Guard:
    """The guard rails of a run, step by step. Each step: `before_update`, `after_update`, `after_evaluation` where
    there was one, `metrics`, `require`."""

    def __init__(self, config: GuardConfig):
        self._config = config
        self._alarms: list[Alarm] = []
        """Of this step, and those of the evaluation before it, which are acted on now."""
        self._late: list[Alarm] = []
        self._known: set[str] = set()
        """Metrics that were beyond their limit in the step before: with action="warn" they are told once."""
        self._in_a_row = 0
        self._rolled_back = 0
        self._rates: deque[float] = deque(maxlen=config.window)
        self._level = 0.0
        """The highest mean of a full window of call rates."""
        self._trends = {
            "rollout/accuracy": _Trend(config.window),
            "eval/accuracy": _Trend(EVALUATIONS),
        }

    def update_limits(self) -> dict[str, tuple[float, float]]:
        """From and to which a metric of the update may be for it to be made; none where alarms only warn."""
        config = self._config
        if config.action == "warn":
            return {}
        limits = {
            "policy/kl_mismatch": (-math.inf, config.max_mismatch_kl or math.inf),
            "policy/entropy": (config.min_entropy or -math.inf, config.max_entropy or math.inf),
            "optim/grad_norm": (-math.inf, config.max_grad_norm or math.inf),
        }
        return {k: bounds for k, bounds in limits.items() if bounds != (-math.inf, math.inf)}

    def before_update(self, step: int, metrics: Mapping[str, float]) -> str:
        """Why the step's batch is to be left out; "" if it is not. `metrics` are those of the rollouts."""
        self._rolled_back = 0
        self._alarms, self._late = self._late, []
        found = [
            *self._above(step, metrics, "rollout/truncated_frac", "max_truncated_frac"),
            *self._tool_collapse(step, metrics),
            *self._hacking(step, metrics, "rollout/accuracy"),
        ]
        self._tell(found)
        self._alarms += found
        acts = self._alarms and self._config.action != "warn"
        return f"guard: {', '.join(alarm.metric for alarm in self._alarms)}" if acts else ""

    def after_update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether to go back to the newest checkpoint. `metrics` are those of the update."""
        found = [
            *self._above(step, metrics, "policy/kl_mismatch", "max_mismatch_kl"),
            *self._low_entropy(step, metrics),
            *self._above(step, metrics, "policy/entropy", "max_entropy"),
            *self._above(step, metrics, "optim/grad_norm", "max_grad_norm"),
        ]
        self._tell(found)
        self._alarms += found
        self._known = {alarm.metric for alarm in self._alarms}
        acts = bool(self._alarms) and self._config.action != "warn"
        self._in_a_row = self._in_a_row + 1 if acts else 0
        return acts and self._config.action == "rollback" and not self._stops()

    def rolled_back(self, steps: int) -> None:
        """To be told when it was done: how many steps it took back. Trends begin anew."""
        self._rolled_back = steps
        for trend in self._trends.values():
            trend.clear()
        log.warning("guard: rolled back %d steps; the data goes on", steps)

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks at the metrics of an evaluation too. The weights it saw are sent already: what is wrong with them is
        acted on in the next step."""
        self._late = list(self._hacking(step, metrics, "eval/accuracy"))
        self._tell(self._late)

    def metrics(self) -> dict[str, float]:
        """What a step logs."""
        acts = bool(self._alarms) and self._config.action != "warn"
        found = {"guard/alarms": float(len(self._alarms) + len(self._late))}
        if self._config.action != "warn":
            found["guard/skipped"] = float(acts)
        if self._config.action == "rollback":
            found["guard/rolled_back_steps"] = float(self._rolled_back)
        return found

    def require(self) -> None:
        """Raises GuardStop if the run is to end."""
        if not self._stops():
            return
        reasons = " ".join(f"{alarm.sentence}." for alarm in self._alarms)
        why = (
            "guard.action is stop"
            if self._config.action == "stop"
            else f"{self._in_a_row} steps in a row were left out, more than "
            f"guard.max_actions={self._config.max_actions}"
        )
        raise GuardStop(
            f"{reasons} The run stops: {why}. Nothing was saved since; started again, it goes on from the newest "
            "checkpoint"
        )

    def state(self) -> dict[str, Any]:
        """JSON for the checkpoint: a resumed run looks back on the same steps."""
        return {
            "late": [list(alarm) for alarm in self._late],
            "known": sorted(self._known),
            "in_a_row": self._in_a_row,
            "rates": list(self._rates),
            "level": self._level,
            "trends": {name: trend.state() for name, trend in self._trends.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave."""
        self._late = [Alarm(*alarm) for alarm in state["late"]]
        self._known = set(state["known"])
        self._in_a_row = state["in_a_row"]
        self._rates = deque(state["rates"], maxlen=self._config.window)
        self._level = state["level"]
        for name, trend in self._trends.items():
            trend.restore(state["trends"][name])

    # --- the rules ----------------------------------------------------------------------------------------------

    def _above(
        self, step: int, metrics: Mapping[str, float], metric: str, setting: str
    ) -> Iterator[Alarm]:
        """What is not a number is above every limit."""
        limit = getattr(self._config, setting)
        if limit and metric in metrics and not metrics[metric] <= limit:
            comparison = f"above guard.{setting}={limit:g}"
            yield _alarm(step, metric, metrics[metric], setting, comparison, _LOOK[metric])

    def _low_entropy(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        metric, limit = "policy/entropy", self._config.min_entropy
        if limit and metric in metrics and metrics[metric] < limit:
            comparison = f"below guard.min_entropy={limit:g}"
            look = _LOOK["low policy/entropy"]
            yield _alarm(step, metric, metrics[metric], "min_entropy", comparison, look)

    def _tool_collapse(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        metric, fall = "tools/use_rate", self._config.max_call_rate_fall
        if metric not in metrics or not fall:
            return
        value = metrics[metric]
        if self._level >= USED and value < (1 - fall) * self._level:
            comparison = (
                f"below the {self._level:.3g} that it was at by more than "
                f"guard.max_call_rate_fall={fall:g} of that"
            )
            yield _alarm(step, metric, value, "max_call_rate_fall", comparison, _LOOK[metric])
            return  # what has collapsed is no level to compare with
        self._rates.append(value)
        if len(self._rates) == self._config.window:
            self._level = max(self._level, fmean(self._rates))

    def _hacking(self, step: int, metrics: Mapping[str, float], metric: str) -> Iterator[Alarm]:
        trend, limit = self._trends[metric], self._config.max_accuracy_fall
        if not limit:
            return
        if metric == "rollout/accuracy" and "reward/mean" in metrics:
            for each in self._trends.values():
                each.see_reward(metrics["reward/mean"])
        if metric not in metrics:
            return
        trend.see_accuracy(metrics[metric])
        found = trend.opposite()
        if found and found.fall > limit:
            comparison = (
                f"lower by {found.fall:.3g} than before, more than guard.max_accuracy_fall={limit:g}, while "
                f"reward/mean rose by {found.rise:.3g}"
            )
            look = _LOOK["accuracy"]
            yield _alarm(step, metric, found.now, "max_accuracy_fall", comparison, look)

    # --- small parts --------------------------------------------------------------------------------------------

    def _stops(self) -> bool:
        acting = bool(self._alarms) and self._config.action != "warn"
        too_often = self._in_a_row > self._config.max_actions
        return acting and (self._config.action == "stop" or too_often)

    def _tell(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            if alarm.metric not in self._known or self._config.action != "warn":
                log.warning("%s", alarm.sentence)


class _Opposite(NamedTuple):
    """Two halves of a window in which reward rose and accuracy fell, beyond what chance does."""

    fall: float
    rise: float
    now: float
    """Mean accuracy of the second half."""


class _Trend:
    """Accuracies, and the mean reward of the steps that led to each."""

    def __init__(self, window: int):
        self._window = window
        self._rewards: list[float] = []
        self._pairs: deque[tuple[float, float]] = deque(maxlen=window)

    def see_reward(self, reward: float) -> None:
        if math.isfinite(reward):
            self._rewards.append(reward)

    def see_accuracy(self, accuracy: float) -> None:
        if self._rewards and math.isfinite(accuracy):
            self._pairs.append((fmean(self._rewards), accuracy))
        self._rewards = []

    def opposite(self) -> _Opposite | None:
        """None too where the window is not full, and where either difference is within two standard errors."""
        if len(self._pairs) < self._window:
            return None
        half = self._window // 2
        pairs = list(self._pairs)
        rise, reward_error = _change([r for r, _ in pairs[:half]], [r for r, _ in pairs[-half:]])
        change, error = _change([a for _, a in pairs[:half]], [a for _, a in pairs[-half:]])
        if rise > 2 * reward_error and -change > 2 * error:
            return _Opposite(-change, rise, fmean(a for _, a in pairs[-half:]))
        return None

    def clear(self) -> None:
        self._rewards = []
        self._pairs.clear()

    def state(self) -> dict[str, Any]:
        return {"rewards": self._rewards, "pairs": [list(pair) for pair in self._pairs]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rewards = list(state["rewards"])
        self._pairs = deque(((r, a) for r, a in state["pairs"]), maxlen=self._window)


def _change(before: list[float], after: list[float]) -> tuple[float, float]:
    """Difference of the means, and its standard error."""
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return fmean(after) - fmean(before), error


def _alarm(step: int, metric: str, value: float, setting: str, comparison: str, look: str) -> Alarm:
    sentence = f"guard: {metric}={value:.4g} at step {step} is {comparison}: {look}"
    return Alarm(metric, value, setting, sentence)
