"""Every metric's name, meaning and unit; and the metrics that trajectories give.

A name that is not in REGISTRY is an error when it is logged: a misspelt name would be a curve that nobody looks at.
A metric that has no value in a step (the accuracy of trajectories that used a tool, when none did) is left out of that
step, never written as 0 or NaN.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rollout_sidecar.protocol import Trajectory
from rollout_sidecar.statistics import facts, statistics


class Metric(NamedTuple):
    """What a metric says, and in what unit ("" for plain numbers)."""

    meaning: str
    unit: str = ""


REGISTRY: dict[str, Metric] = {
    # reward
    "reward/mean": Metric("Mean reward of trajectories."),
    "reward/std": Metric("Standard deviation of their rewards."),
    "reward/terms/{term}/mean": Metric("Mean of one part of the reward, where it is reported."),
    "reward/zero_variance_group_frac": Metric(
        "Groups whose rewards are all equal and so teach nothing.", "fraction"
    ),
    # rollout
    "rollout/accuracy": Metric("Mean of what reward functions report as acc.", "fraction"),
    "rollout/accuracy_with_tools": Metric("Accuracy where a tool was called.", "fraction"),
    "rollout/accuracy_without_tools": Metric("Accuracy where no tool was called.", "fraction"),
    "rollout/metrics/{key}/mean": Metric("Mean of a reward function's metric, where reported."),
    "rollout/metrics/{key}/count": Metric("Trajectories that report the metric.", "trajectories"),
    "rollout/trajectories": Metric("Trajectories of the batch, aborted ones not.", "trajectories"),
    "rollout/aborted_frac": Metric(
        "Trajectories that were aborted; in no other metric.", "fraction"
    ),
    "rollout/unscored_frac": Metric(
        "Trajectories whose reward failed; in no mean of rewards or accuracies.", "fraction"
    ),
    "rollout/untrainable_frac": Metric("Trajectories left out of the loss.", "fraction"),
    "rollout/turns/mean": Metric("Policy generations in a trajectory.", "turns"),
    "rollout/prompt_tokens/mean": Metric("Tokens of the prompt.", "tokens"),
    "rollout/completion_tokens/mean": Metric("Tokens that the policy sampled.", "tokens"),
    "rollout/completion_tokens/max": Metric("The most that one trajectory sampled.", "tokens"),
    "rollout/observation_tokens/mean": Metric("Tokens that tools wrote.", "tokens"),
    "rollout/truncated_frac": Metric("Ended by a turn, token or time limit.", "fraction"),
    "rollout/forks_per_trajectory": Metric(
        "Times that the chat template rewrote earlier turns, so that a new token stream began.",
        "forks",
    ),
    "rollout/status/{status}_frac": Metric("Trajectories that ended so.", "fraction"),
    "rollout/escaped_special_tokens": Metric("Special-token texts that were made plain.", "tokens"),
    "rollout/cached_token_frac": Metric("Context tokens that needed no prefill.", "fraction"),
    "rollout/trajectory_s/mean": Metric("Wall time of a trajectory.", "s"),
    "rollout/trajectory_s/max": Metric("Wall time of the slowest trajectory.", "s"),
    "rollout/tool_s/mean": Metric("Time that a trajectory waited for tools.", "s"),
    # tools
    "tools/use_rate": Metric("Trajectories with at least one attempt to call a tool.", "fraction"),
    "tools/calls_per_trajectory": Metric("Attempted calls.", "calls"),
    "tools/valid_call_rate": Metric("Attempted calls that succeeded.", "fraction"),
    "tools/parse_error_rate": Metric("Attempted calls that could not be read.", "fraction"),
    "tools/unknown_rate": Metric("Attempted calls of tools that do not exist.", "fraction"),
    "tools/not_executed_rate": Metric("Attempted calls beyond the limit of a turn.", "fraction"),
    "tools/{name}/calls": Metric("Attempted calls of this tool.", "calls"),
    "tools/{name}/calls_per_trajectory": Metric("The same, by trajectories.", "calls"),
    "tools/{name}/bad_arguments_rate": Metric("Calls whose arguments do not fit.", "fraction"),
    "tools/{name}/error_rate": Metric("Calls in which the tool failed.", "fraction"),
    "tools/{name}/timeout_rate": Metric("Calls that met their deadline.", "fraction"),
    "tools/{name}/unavailable_rate": Metric(
        "Calls refused because the tool was busy or kept failing.", "fraction"
    ),
    "tools/{name}/truncated_rate": Metric("Calls whose result was shortened.", "fraction"),
    "tools/{name}/result_tokens_mean": Metric(
        "Tokens of a result, as the policy saw it.", "tokens"
    ),
    "tools/{name}/latency_p50_s": Metric("Median duration of executed calls.", "s"),
    "tools/{name}/latency_p95_s": Metric("Duration that 95 % of them stay below.", "s"),
    "tools/{name}/queue_p50_s": Metric("Median time that calls waited for their turn.", "s"),
    "tools/{name}/queue_p95_s": Metric("Wait that 95 % of them stay below.", "s"),
    "tools/{name}/attempts_mean": Metric("Attempts of an executed call.", "attempts"),
    "tools/{name}/reward_mean": Metric(
        "Mean reward of a trajectory that used the tool: its calls' rewards and calc_reward's."
    ),
    "tools/{name}/reward_sum": Metric("Sum of these rewards over all trajectories."),
    "tools/{name}/program_failure_rate": Metric(
        "Programs that failed, of those that a sandbox ran. Their calls are ok.", "fraction"
    ),
    "tools/{name}/program_timeout_rate": Metric(
        "Programs that a sandbox stopped at their time limit.", "fraction"
    ),
    # interactions
    "interaction/replies_per_trajectory": Metric(
        "Replies, where an interaction replied at all.", "replies"
    ),
    "interaction/turn_score_mean": Metric("Mean score that interactions gave to a turn."),
    "interaction/done_frac": Metric(
        "Trajectories whose interaction ended the conversation, of those it replied in.", "fraction"
    ),
    "interaction/latency_p50_s": Metric("Median time of a reply.", "s"),
    "interaction/latency_p95_s": Metric("Time that 95 % of replies stay below.", "s"),
    # policy
    "policy/loss": Metric("What the optimizer minimises."),
    "policy/entropy": Metric("Mean entropy of the policy at sampled tokens.", "nats"),
    "policy/kl_ref": Metric("KL to the reference policy; k3 estimate.", "nats"),
    "policy/kl_mismatch": Metric(
        "KL between engine and trainer log-probs; k3 estimate. Numerics and staleness.", "nats"
    ),
    "policy/clip_frac": Metric("Tokens whose ratio was clipped.", "fraction"),
    "policy/ratio_max": Metric("Largest ratio of a token."),
    "policy/mismatch/kl": Metric(
        "Before off-policy correction: KL(engine || trainer), k1.", "nats"
    ),
    "policy/mismatch/k3_kl": Metric("The same, k3 estimate.", "nats"),
    "policy/mismatch/chi2_token": Metric("Mean squared ratio of trainer to engine, less 1."),
    "policy/mismatch/chi2_seq": Metric("The same of whole trajectories."),
    "policy/mismatch/training_ppl": Metric("Perplexity of trajectories, to the trainer."),
    "policy/mismatch/rollout_ppl": Metric("The same, to the engine."),
    "policy/is_weight/mean": Metric("Importance weight of a token."),
    "policy/is_weight/max": Metric("The largest."),
    "policy/is_weight/truncated_frac": Metric(
        "Tokens whose weight is at a bound or 0.", "fraction"
    ),
    "policy/is_weight/ess": Metric("Share of the sample that the weights leave.", "fraction"),
    "policy/rejected_frac": Metric("Tokens left out by off-policy rejection.", "fraction"),
    "policy/kl_coef": Metric("Weight of the KL in this step, where it is steered."),
    "policy/kl_reward": Metric("KL that was taken off the reward, mean of trajectories.", "nats"),
    "rollout/refill_batches": Metric("Batches of prompts that a step sampled.", "batches"),
    "policy/lag/mean": Metric("Steps between sampling policy and trained policy.", "steps"),
    "policy/lag/max": Metric("The same, of the oldest token.", "steps"),
    "policy/lag/dropped_frac": Metric(
        "Trajectories that were left out because a token was older than async.max_policy_lag.",
        "fraction",
    ),
    # curriculum: pools by pass rate, and stages, where there are any
    "curriculum/pool/{name}/size": Metric(
        "Tasks of the stage in this pool, or unknown: never measured.", "tasks"
    ),
    "curriculum/pool/{name}/share": Metric(
        "Groups of the step that came from this pool.", "fraction"
    ),
    "curriculum/pass_rate/mean": Metric(
        "Mean of the running pass rates of the stage's tasks that were measured.", "fraction"
    ),
    "curriculum/stage": Metric("Number of the stage, the first is 0."),
    # optimizer, speed, time
    "optim/grad_norm": Metric("Global norm of the gradient, before clipping."),
    "optim/learning_rate": Metric("Of this step's last update."),
    "optim/skipped": Metric(
        "Updates left out: no token to learn from, not finite, or beyond a limit of the guard section.",
        "updates",
    ),
    "perf/tokens_per_s": Metric("Tokens sampled per second of the whole step.", "tokens/s"),
    "perf/update_tflops": Metric("Operations that the update needed.", "TFLOP"),
    "perf/mfu": Metric(
        "Them per second of the update, over what the devices can do in bfloat16.", "fraction"
    ),
    "perf/padding_fraction": Metric("Share of the batch that is padding.", "fraction"),
    "perf/shared_prompt_frac": Metric("Share of tokens that shared prompts save.", "fraction"),
    "perf/compilations": Metric(
        "Programs that this update had to compile. After a run's first steps: 0.", "programs"
    ),
    "perf/loss_tokens": Metric("Tokens that the loss sums over.", "tokens"),
    "perf/{part}_busy_s": Metric(
        "Time in which a part works. trainer: batch and update; engine: a trajectory is being sampled; sync: pushes; "
        "tools: a trajectory waits for calls.",
        "s",
    ),
    "perf/{part}_idle_s": Metric("Time of the step in which it does not.", "s"),
    "perf/engine_tokens_per_s": Metric(
        "Tokens sampled per second in which the engine works.", "tokens/s"
    ),
    "weights/push_bytes": Metric("Bytes sent to each sidecar.", "bytes"),
    "weights/push_ratio": Metric("How many times more a push of all weights has.", ""),
    "weights/changed_frac": Metric("16-bit elements whose bits changed.", "fraction"),
    "weights/floor_ratio": Metric(
        "Bytes sent, relative to the entropy of the changes: elements x (H(p) + 16 p) bits, p the share that changed."
    ),
    "weights/full_resends": Metric("Sidecars that had lost the base of a delta.", "sidecars"),
    "fleet/live": Metric("Sidecars that can be used.", "sidecars"),
    "fleet/capacity": Metric("Trajectories that these take at once.", "trajectories"),
    "fleet/resumed": Metric(
        "Trajectories that went on in another sidecar from a finished turn, since the run began.",
        "trajectories",
    ),
    "fleet/restarted": Metric(
        "Trajectories that were asked for again from their prompt, since the run began: no turn had ended, or a tool "
        "that keeps state had been used.",
        "trajectories",
    ),
    # log-prob gate: tokens of probes, as engine and trainer score them; of the worst sidecar
    "gate/mean_kl": Metric("KL between engine and trainer; k3 estimate. Numerics only.", "nats"),
    "gate/mean_difference": Metric("Engine's log-probs minus the trainer's.", "nats"),
    "gate/rms": Metric("Root mean square of their differences.", "nats"),
    "gate/p99": Metric("Difference that 99 % of tokens stay below.", "nats"),
    "gate/max_abs": Metric("The largest difference.", "nats"),
    "gate/ess": Metric("Effective sample size after weighting by importance.", "fraction"),
    "gate/within_1pct": Metric("Tokens whose two probabilities differ by up to 1 %.", "fraction"),
    "gate/within_5pct": Metric("The same with 5 %.", "fraction"),
    "gate/tokens": Metric("Tokens compared in each sidecar.", "tokens"),
    "gate/truncation_z": Metric(
        "At a run's start: how much likelier sampled tokens are than they should be, in standard errors."
    ),
    "time/{phase}_s": Metric("Wall time of one phase of the step; time/step_s is all of it.", "s"),
    "distribution/{name}/{quantile}": Metric(
        "Least, greatest and quantiles of a distribution, where a tracker has no histograms."
    ),
    # evaluation
    "eval/accuracy": Metric("Held-out trajectories called correct.", "fraction"),
    "eval/pass_at_{k}": Metric("Chance that one of k samples is correct; unbiased.", "fraction"),
    "eval/maj_at_{k}": Metric("Chance that the commonest answer of k is correct.", "fraction"),
    # guard rails
    "guard/alarms": Metric("Limits of the guard section that the step is beyond.", "alarms"),
    "guard/skipped": Metric("1 where the step's update was left out for that."),
    "guard/rolled_back_steps": Metric("Steps that a rollback took back.", "steps"),
}
"""Names in braces stand for what a run fills in. Every reward, rollout, tools and interaction metric also exists under
eval/. Those of tools, interactions and endings are in the sidecar's /metrics too: rollout_sidecar.statistics."""

_EVALUATED = ("reward/", "rollout/", "tools/", "interaction/")
_BRACES = re.compile(r"\{\w+\}")
_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9_./ -]")
"""What trackers do not take in a name; MLflow is the strictest."""


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+\})", name)
    return re.compile("".join("[^\n]+" if p.startswith("{") else re.escape(p) for p in parts))


_PATTERNS = [(_pattern(name), metric) for name, metric in REGISTRY.items() if "{" in name]


def describe(name: str) -> Metric | None:
    """The registered meaning of a metric; None if there is no such metric."""
    if name in REGISTRY:
        return REGISTRY[name]
    evaluated = name.removeprefix("eval/")
    if evaluated != name and evaluated.startswith(_EVALUATED):
        return describe(evaluated)
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for names that are not registered."""
    unknown = sorted(name for name in names if describe(name) is None)
    if unknown:
        raise ValueError(
            f"unknown metric {unknown[0]!r}; add it, with its meaning, to REGISTRY in tooljax/metrics.py"
        )


def rollout_metrics(
    trajectories: Sequence[Trajectory],
    *,
    tool_names: Collection[str] = (),
    policy_version: int | None = None,
) -> dict[str, float]:
    """All metrics of a batch of trajectories. Aborted ones are counted, and are in nothing else.

    Args:
        trajectories: of one step, in any order.
        tool_names: tools to report even if none of their calls was executed. Others are reported once a tool has
            answered to the name; calls of names that no tool has are counted under `unknown`.
        policy_version: version that the trainer holds, for policy/lag.
    """
    kept = [t for t in trajectories if t.status != "aborted"]
    metrics: dict[str, float] = {"rollout/trajectories": float(len(kept))}
    if trajectories:
        metrics["rollout/aborted_frac"] = 1 - len(kept) / len(trajectories)
    if not kept:
        return metrics
    metrics |= _reward_metrics(kept) | _length_metrics(kept) | _reported_metrics(kept)
    for name, value, label in statistics([facts(t) for t in kept], tool_names):
        metrics[_BRACES.sub(_clean(label), name)] = value
    if policy_version is not None:
        metrics |= _lag_metrics(kept, policy_version)
    return metrics


def with_speed(
    step: dict[str, float], work: Callable[[float], dict[str, float]] | None = None
) -> dict[str, float]:
    """The metrics of a step and, where trajectories were sampled in it, perf/tokens_per_s of its whole wall time.

    `work` gives metrics of the update's work from its seconds (`tooljax.work.Work.metrics`).
    """
    if work is not None:
        step = step | work(step["time/update_s"])
    if "rollout/completion_tokens/mean" not in step:
        return step
    tokens = step["rollout/completion_tokens/mean"] * step["rollout/trajectories"]
    return {**step, "perf/tokens_per_s": tokens / max(step["time/step_s"], 1e-9)}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimate of arXiv:2107.03374, section 2.1.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} correct in {n} samples; needs 1 <= k <= n")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def pass_metrics(correct: Sequence[Sequence[bool]]) -> dict[str, float]:
    """eval/pass_at_1, 2, 4, ... up to the fewest samples of a task. `correct` is by task, then by sample."""
    most = min(map(len, correct), default=0)
    ks = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return {f"eval/pass_at_{k}": _mean([pass_at_k(len(c), sum(c), k) for c in correct]) for k in ks}


def _reward_metrics(kept: Sequence[Trajectory]) -> dict[str, float]:
    metrics = {"rollout/unscored_frac": _mean([not t.scored for t in kept])}
    rewards = np.array([t.reward for t in kept if t.scored], np.float64)
    if not len(rewards):
        return metrics
    terms = {
        f"reward/terms/{_clean(term)}/mean": _mean(values)
        for term, values in _columns(t.reward_terms for t in kept).items()
    }
    return {
        **metrics,
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **terms,
    }


def _reported_metrics(kept: Sequence[Trajectory]) -> dict[str, float]:
    """What reward functions report. A key is averaged over the trajectories that have it, and only those."""
    metrics: dict[str, float] = {}
    for key, values in _columns(t.metrics for t in kept).items():
        metrics[f"rollout/metrics/{_clean(key)}/mean"] = _mean(values)
        metrics[f"rollout/metrics/{_clean(key)}/count"] = float(len(values))
    return metrics


def _length_metrics(kept: Sequence[Trajectory]) -> dict[str, float]:
    streams = [t.streams for t in kept]
    completion = [sum(sum(s.loss_mask) for s in of_one) for of_one in streams]
    total = [sum(len(s.token_ids) - s.prompt_tokens for s in of_one) for of_one in streams]
    prompt = [of_one[0].prompt_tokens for of_one in streams]
    observation = [a - c for a, c in zip(total, completion, strict=True)]
    limits = ("max_turns", "max_tokens", "timeout")
    metrics = {
        "rollout/turns/mean": _mean([len(t.turns) for t in kept]),
        "rollout/prompt_tokens/mean": _mean(prompt),
        "rollout/completion_tokens/mean": _mean(completion),
        "rollout/completion_tokens/max": float(max(completion)),
        "rollout/observation_tokens/mean": _mean(observation),
        "rollout/truncated_frac": _mean([t.status in limits for t in kept]),
        "rollout/escaped_special_tokens": float(sum(t.escaped_special_tokens for t in kept)),
        "rollout/forks_per_trajectory": _mean([len(t.earlier_streams) for t in kept]),
        "rollout/trajectory_s/mean": _mean([t.total_s for t in kept]),
        "rollout/trajectory_s/max": max(t.total_s for t in kept),
        "rollout/tool_s/mean": _mean([t.tool_s for t in kept]),
    }
    turns = [turn for t in kept for turn in t.turns]
    if context := sum(turn.start for turn in turns):
        metrics["rollout/cached_token_frac"] = sum(turn.cached_tokens for turn in turns) / context
    return metrics


def _lag_metrics(kept: Sequence[Trajectory], policy_version: int) -> dict[str, float]:
    spans = [span for t in kept for stream in t.streams for span in stream.version_spans]
    if not spans:
        return {}
    lags = [policy_version - span.policy_version for span in spans]
    tokens = [span.end - span.start for span in spans]
    return {
        "policy/lag/mean": float(np.average(lags, weights=tokens)),
        "policy/lag/max": float(max(lags)),
    }


def _columns(rows: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    """The values of each key, from the rows that have it. Rows need not have the same keys."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            columns[key].append(value)
    return columns


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values, np.float64)))


def _clean(name: str) -> str:
    return _NAME_CHARACTERS.sub("_", name).strip("/ ") or "_"
