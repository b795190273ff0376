"""Trains a tool-using policy with GRPO: `python -m tooljax.train --config configs/x.gin --set grpo.kl_coef=0.01`.

One step: take tasks ▸ roll them out in the sidecars ▸ advantages ▸ batch ▸ update ▸ push the weights ▸ log ▸ evaluate
▸ save. A run that finds checkpoints in its folder goes on after the newest; Ctrl-C and SIGTERM save and end.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollout_sidecar.client import SidecarError
from tooljax.batch import PackItem, TrainBatch, pack
from tooljax.checkpoint import Checkpointer, CheckpointError
from tooljax.config import Config, parse_args, to_gin
from tooljax.data.records import read_tasks
from tooljax.data.source import TaskSource
from tooljax.evaluate import evaluate, limits, sampling
from tooljax.grpo.advantages import group_advantages, zero_variance
from tooljax.metrics import rollout_metrics
from tooljax.plots import learning_curve
from tooljax.policy import Policy, abstract_state, make_updater
from tooljax.progress import Progress
from tooljax.rollouts import Groups, InterruptedRollout, Sidecars, open_sidecars
from tooljax.trackers import Trackers, write_trajectories
from tooljax.update import Metrics, Params, TrainState, Updater

UNTRAINABLE = ("engine_error", "tool_error", "aborted")
"""Trajectories that ended so say nothing about the policy, whatever was sampled before."""


def train(config: Config, sidecars: Sidecars) -> int:
    """Runs until config.run.steps, an interruption or an error; returns the number of steps made in all."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    policy = Policy.load(config.model.path, config.model.dtype)
    source = TaskSource(
        read_tasks(config.data.train, max_rows=config.data.max_rows),
        prompts_per_step=config.data.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    held_out = read_tasks(config.data.eval, max_rows=config.evaluate.max_tasks)
    updates = config.run.steps * config.grpo.updates_per_batch
    updater = make_updater(
        config, policy, total_updates=updates, learning_rate=config.optimizer.learning_rate
    )
    checkpointer = Checkpointer(run_dir / "checkpoints", keep=config.checkpoint.keep)
    state, step = _restore(checkpointer, updater, policy, source)
    (run_dir / "config.gin").write_text(to_gin(config))

    # The first rollout must see the weights that the trainer has, fresh or restored.
    _push(config, sidecars, policy, updater.compute_params(state), step)
    with (
        Trackers(config, resume_step=step) as trackers,
        Progress(config.run.progress, config.run.steps, title=run_dir.name, start=step) as progress,
    ):
        if step == 0 and held_out and config.evaluate.every_steps:
            trackers.log(0, evaluate(config, sidecars, held_out).metrics)
        while step < config.run.steps and not sidecars.stop_requested:
            position = source.state()
            try:
                with progress.phase("rollout"):
                    groups = _rollout(config, sidecars, source, step, progress)
            except InterruptedRollout:
                source.restore(position)
                break
            with progress.phase("batch"):
                advantages, batch_metrics, batch = make_batch(config, groups)
            with progress.phase("update"):
                state, update_metrics = _update(config, updater, policy, state, batch)
            step += 1
            # Before anything that can fail: the next rollout must see these weights.
            with progress.phase("push"):
                _push(config, sidecars, policy, updater.compute_params(state), step)
            trajectories = [trajectory for group in groups for trajectory in group]
            lag = max(sidecars.policy_lag(trajectory, step - 1) for trajectory in trajectories)
            metrics = {
                **rollout_metrics(trajectories),
                **batch_metrics,
                **update_metrics,
                "policy/lag/max": float(lag),
            }
            if held_out and config.evaluate.every_steps and step % config.evaluate.every_steps == 0:
                with progress.phase("evaluate"):
                    metrics |= evaluate(config, sidecars, held_out).metrics
            trackers.log(step, metrics | progress.timings(), trajectories)
            if config.track.save_trajectories:
                write_trajectories(run_dir, step, trajectories)
            progress.step(step, metrics)
            # After logging: a step that was saved is a step that was logged.
            if step % config.checkpoint.every_steps == 0 or step == config.run.steps:
                checkpointer.save(step, state, {"source": source.state()})
        if checkpointer.latest_step() != step:
            checkpointer.save(step, state, {"source": source.state()})
    if step == config.run.steps:
        policy.save(updater.compute_params(state), run_dir / "policy")
    learning_curve(run_dir / "metrics.jsonl", run_dir / "learning_curve.png")
    return step


def make_batch(config: Config, groups: Groups) -> tuple[np.ndarray, Metrics, TrainBatch]:
    """Advantages within each group, and the batch that they weight.

    Trajectories without a sampled token, or that ended by somebody's fault but the policy's, count for nothing. A
    group whose rewards are all equal teaches nothing; grpo.zero_variance says whether its tokens stay for the KL term.
    """
    reward = np.array([[t.reward for t in group] for group in groups], np.float32)
    valid = np.array(
        [[any(t.loss_mask) and t.status not in UNTRAINABLE for t in group] for group in groups]
    )
    advantages = np.asarray(
        group_advantages(reward, scale_by_std=config.grpo.scale_by_std, valid=valid)
    )
    flat = np.asarray(zero_variance(reward, valid=valid))
    trained = valid & (~flat[:, None] | (config.grpo.zero_variance == "keep"))
    items = [
        PackItem.from_trajectory(trajectory, float(advantages[i, j]), trained=bool(trained[i, j]))
        for i, group in enumerate(groups)
        for j, trajectory in enumerate(group)
        if trained[i, j]
    ]
    batch = pack(
        items,
        row_lengths=config.batch.row_lengths,
        rows_multiple=config.batch.rows_per_microbatch,
    )
    metrics = {
        "reward/zero_variance_group_frac": float(flat.mean()),
        "perf/padding_fraction": batch.padding_fraction,
        "perf/loss_tokens": float(batch.loss_tokens),
        "rollout/untrainable_frac": float(1 - valid.mean()),
    }
    return advantages, metrics, batch


def _restore(
    checkpointer: Checkpointer, updater: Updater, policy: Policy, source: TaskSource
) -> tuple[TrainState, int]:
    """The newest checkpoint's state and step, with the data at its position; a fresh start if there is none."""
    found = checkpointer.restore(abstract_state(updater, policy.params))
    if found is None:
        return updater.init(policy.params), 0
    step, state, extra = found
    source.restore(extra["source"])
    return state, step


def _rollout(
    config: Config, sidecars: Sidecars, source: TaskSource, step: int, progress: Progress
) -> Groups:
    return sidecars.rollout(
        source.next(),
        samples=config.grpo.group_size,
        seed=(config.run.seed, step),
        sampling=sampling(config.sampling),
        limits=limits(config.limits),
        step=step,
        on_progress=progress.rollout,
    )


def _update(
    config: Config, updater: Updater, policy: Policy, state: TrainState, batch: TrainBatch
) -> tuple[TrainState, Metrics]:
    """All updates on one batch. Their metrics are the last one's, except that any skip counts."""
    if config.grpo.kl_coef > 0:
        batch = batch.with_log_probs(ref=updater.log_probs(policy.params, batch))
    if config.grpo.updates_per_batch > 1:
        batch = batch.with_log_probs(old=updater.log_probs(state.params, batch))
    metrics: Metrics = {}
    for _ in range(config.grpo.updates_per_batch):
        skipped = metrics.get("optim/skipped", 0.0)
        state, metrics = updater.update(state, batch)
        metrics["optim/skipped"] += skipped
    return state, metrics


def _push(config: Config, sidecars: Sidecars, policy: Policy, params: Params, step: int) -> None:
    sidecars.push(
        policy.tensors(params),
        step=step,
        part_bytes=config.weights.part_bytes,
        timeout_s=config.weights.timeout_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: all steps made; 1: an error, told in a sentence; 130: interrupted and saved."""
    config = parse_args(argv, prog="tooljax.train", description=__doc__ or "")
    try:
        with open_sidecars(config) as sidecars:
            step = train(config, sidecars)
    except (ValueError, SidecarError, CheckpointError, OSError) as error:
        print(f"tooljax.train: {error}", file=sys.stderr)
        return 1
    if step < config.run.steps:
        print(
            f"interrupted after step {step}, saved; run the same command to go on", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
