"""Trains a tool-using policy with GRPO: `python -m tooljax.train --config configs/x.gin --set grpo.kl_coef=0.01`.

One step: take tasks ▸ roll them out in the sidecars, those of coming steps too where async says so ▸ advantages ▸ batch
▸ update ▸ push the weights ▸ compare log-probs ▸ evaluate ▸ log ▸ save. Guard rails look on, and may leave an update
out, take weights back or end the run. A run that finds checkpoints in its folder goes on after the newest; Ctrl-C and
SIGTERM save and end.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rollout_sidecar.client import SidecarError
from rollout_sidecar.protocol import Task
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.async_rollouts import AsyncRollouts
from tooljax.batch import Batch
from tooljax.busy import busy_times
from tooljax.checkpoint import Checkpointer, CheckpointError
from tooljax.config import Config, parse_args
from tooljax.curriculum.source import Source, open_source
from tooljax.data.records import read_tasks
from tooljax.distributed import joined
from tooljax.distributions import distributions
from tooljax.evaluate import evaluate, held_out_tasks, keep, reward_weights
from tooljax.evaluation.best import better, check_best_metric
from tooljax.grpo.controller import KlController
from tooljax.guards import Guard, GuardStop
from tooljax.launch import check_files
from tooljax.log_prob_gate import LogProbGate, LogProbMismatch, Verdict
from tooljax.metrics import rollout_metrics, with_speed
from tooljax.origin import Origin
from tooljax.plots import learning_curve
from tooljax.policy import Policy, abstract_state, load_policy, make_updater
from tooljax.profile import traced
from tooljax.progress import Progress
from tooljax.rollouts import Groups, InterruptedRollout, Sidecars
from tooljax.run_dir import make_run_dir, write_config
from tooljax.shared_sidecars import open_shared_sidecars
from tooljax.store.evaluations import DURING
from tooljax.store.records import values_of_items
from tooljax.store.store import Credit, TrajectoryStore
from tooljax.trackers import Trackers
from tooljax.training_batch import (
    make_batch,
    sampled,
    why_untrainable,
    with_kl_in_reward,
)
from tooljax.update import Metrics, TrainState, Updater


def train(config: Config, sidecars: Sidecars) -> int:
    """Runs until config.run.steps, an interruption or an error; returns the number of steps made in all."""
    run = Run.open(config, sidecars)
    state, step = run.restore()
    # The first rollout must see the weights that the trainer has, fresh or restored.
    run.push(state, step)
    verdict = run.gate.look(sidecars, state, step)
    verdict.require()
    run.store.forget_after(step)
    with (
        Trackers(config, resume_step=step) as trackers,
        Progress(config.run.progress, config.run.steps, title=run.dir.name, start=step) as progress,
        run.checkpointer,
    ):
        if step == 0 and config.evaluate.every_steps:
            trackers.log(0, run.evaluate(0) | verdict.metrics)
        while step < config.run.steps and not sidecars.stop_requested:
            try:
                with progress.phase("rollout"):
                    groups = run.rollouts.take(step, progress.rollout)
            except InterruptedRollout:
                break
            step += 1
            with progress.phase("batch"):
                batch, metrics, credit = make_batch(config, groups, shards=run.shards)
                metrics |= run.describe(groups, step)
                metrics |= run.source.observe(step - 1, groups, credit.advantages)
            with progress.phase("update"), traced(config, step):
                state, batch, update_metrics = run.update(state, batch, groups, step, metrics)
                state = run.guarded(state, step, update_metrics)
            # Before anything that can fail: the next rollout must see these weights.
            with progress.phase("push"):
                metrics |= update_metrics | run.push(state, step)
            with progress.phase("gate"):
                verdict = run.look(state, step)
            with progress.phase("store"):
                run.store_step(step, groups, batch, credit, update_metrics)
            metrics |= verdict.metrics | sidecars.metrics()
            if config.evaluate.every_steps and step % config.evaluate.every_steps == 0:
                with progress.phase("evaluate"):
                    metrics |= run.evaluate(step)
            metrics |= run.guard.metrics()
            told = with_speed(metrics | progress.timings(), run.updater.work.metrics)
            told |= busy_times(told, [t for group in groups for t in group])
            spread = distributions(groups, credit, batch, run.updater.seen, run.updater.prepared)
            trackers.log(step, told, [t for group in groups for t in group], spread)
            progress.step(step, metrics)
            # After logging: a step that was saved is a step that was logged. What a run is ended for is not saved.
            run.guard.require()
            with progress.phase("checkpoint"):  # which the next step's metrics tell
                run.keep(state, step, metrics, due=bool(verdict.problem))
            verdict.require()
        run.save(state, step)
    if step == config.run.steps:
        run.policy.save(run.updater.compute_params(state), run.dir / "policy")
        if run.policy.adapters:
            run.policy.save_adapter(state.params, run.dir / "policy" / "adapter")
    learning_curve(run.dir / "metrics.jsonl", run.dir / "learning_curve.png")
    return step


@dataclass(frozen=True)
class Run:
    """What a training run works with, and the steps of its loop."""

    config: Config
    sidecars: Sidecars
    policy: Policy
    source: Source
    rollouts: AsyncRollouts
    held_out: list[Task]
    updater: Updater
    checkpointer: Checkpointer
    gate: LogProbGate
    kl: KlController
    guard: Guard
    store: TrajectoryStore
    origin: Origin

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds beside the training state, by name: each has `state` and `restore`."""
        return {"origin": self.origin, "source": self.rollouts, "kl": self.kl, "guard": self.guard}

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    @property
    def shards(self) -> int:
        """Devices that the rows of a microbatch are spread over."""
        return self.policy.layout.ways("batch")

    @classmethod
    def open(cls, config: Config, sidecars: Sidecars) -> "Run":
        """Reads policy and data, and writes the resolved config into the run's folder."""
        check_best_metric(config.evaluate)
        run_dir = make_run_dir(config)
        policy = load_policy(config)
        sidecars.check_fit(
            vocab_hash=ChatTokenizer.from_folder(config.model.path).vocab_hash,
            max_trajectory_tokens=config.limits.max_trajectory_tokens,
        )
        tasks = read_tasks(
            config.data.train,
            max_rows=config.data.max_rows,
            prompt_key=config.data.prompt_key,
            reward_key=config.data.reward_key,
        )
        updater = make_updater(
            config,
            policy,
            total_updates=config.run.steps * config.grpo.updates_per_batch,
            learning_rate=config.optimizer.learning_rate,
        )
        source = open_source(config, tasks)
        run = cls(
            config,
            sidecars,
            policy,
            source,
            AsyncRollouts(config, sidecars, source),
            held_out_tasks(config),
            updater,
            Checkpointer(run_dir / "checkpoints", keep=config.checkpoint.keep),
            LogProbGate(config, policy, updater, tasks),
            KlController(
                config.grpo.kl_coef, config.grpo.kl_target or None, config.grpo.kl_horizon
            ),
            Guard(config.guard),
            TrajectoryStore(config, tasks),
            Origin(config),
        )
        changes = write_config(config)
        if changes and run.checkpointer.latest_step() is not None:
            print("going on with changed settings:", *changes, sep="\n  ", file=sys.stderr)
        return run

    def restore(self) -> tuple[TrainState, int]:
        """State and step of the newest checkpoint, with the data at its position; a fresh start if there is none."""
        state, step, extra = self.newest()
        if extra:
            for name, part in self.parts.items():
                part.restore(extra[name])
        return state, step

    def newest(self) -> tuple[TrainState, int, dict[str, Any]]:
        """State, step and extras of the newest checkpoint; the first weights, 0 and nothing if there is none."""
        found = self.checkpointer.restore(
            abstract_state(self.updater, self.policy.trained),
            changes=lambda extra: self.origin.changes(extra["origin"]),
        )
        if found is None:
            return self.updater.init(self.policy.trained), 0, {}
        step, saved, extra = found
        return self.updater.restored(saved), step, extra

    def save(self, state: TrainState, step: int, *, block: bool = True) -> None:
        """Writes a checkpoint of `step`, unless it is there."""
        extra: dict[str, Any] = {name: part.state() for name, part in self.parts.items()}
        self.checkpointer.save(step, self.updater.saved(state), extra, block=block)

    def keep(self, state: TrainState, step: int, metrics: Metrics, *, due: bool) -> None:
        """Saves the step if it is due, or every so many steps, or the best that was evaluated so far."""
        self.checkpointer.look()
        best = better(self.config.evaluate, self.checkpointer.best(), step, metrics)
        if due or best or step % self.config.checkpoint.every_steps == 0:
            self.save(state, step, block=not self.config.checkpoint.background)
        if best:
            self.checkpointer.mark_best(best)

    def guarded(self, state: TrainState, step: int, metrics: Metrics) -> TrainState:
        """The state after an update with these metrics: the newest checkpoint's where the guard rails roll back. The
        data goes on."""
        if not self.guard.after_update(step, metrics):
            return state
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # there may be no memory for two
        self.rollouts.give_up()  # they are of weights that are no more
        state, back, _ = self.newest()
        self.guard.rolled_back(step - back)
        return state

    def push(self, state: TrainState, step: int) -> Metrics:
        """Sends the weights to every sidecar and waits until all serve them. One that fails when the run is to end may
        be ending too: the step is logged and saved all the same."""
        try:
            if self.config.sidecar.share_gpu:
                self.sidecars.on_each(lambda client: client.resume_engine(), interruptible=False)
            report = self.sidecars.push(
                self.policy.tensors(self.updater.compute_params(state)),
                step=step,
                weights=self.config.weights,
            )
        except SidecarError:
            if self.sidecars.stop_requested:
                return {}
            raise
        return report.metrics()

    def look(self, state: TrainState, step: int) -> Verdict:
        """The gate's verdict; none where a sidecar fails when the run is to end."""
        try:
            return self.gate.look(self.sidecars, state, step)
        except SidecarError:
            if self.sidecars.stop_requested:
                return Verdict({})
            raise

    def update(
        self, state: TrainState, batch: Batch, groups: Groups, step: int, seen: Metrics
    ) -> tuple[TrainState, Batch, Metrics]:
        """All updates on one batch, which comes back with the log-probs that they took. Metrics are the last one's,
        except that every skip counts. None is made where the guard rails object to what was `seen` of the rollouts."""
        grpo, metrics = self.config.grpo, {}
        if self.guard.before_update(step, seen):
            state, metrics = self.updater.update(state, batch.without_loss())
            return state, batch, metrics
        if self.config.sidecar.share_gpu:
            self.sidecars.on_each(lambda client: client.release_engine(), interruptible=False)
        if grpo.kl_coef > 0:
            batch = batch.with_log_probs(ref=self.updater.log_probs(self.policy.params, batch))
        in_reward = grpo.kl_coef > 0 and grpo.kl_in == "reward"
        # The engine's log-probs stand for the old ones where they are bypassed.
        if in_reward or (grpo.updates_per_batch > 1 and grpo.rollout_correction != "bypass"):
            batch = batch.with_log_probs(old=self.updater.log_probs(state.params, batch))
        told: Metrics = {"policy/kl_coef": self.kl.coef} if grpo.kl_target else {}
        if in_reward:
            batch, told["policy/kl_reward"] = with_kl_in_reward(
                self.config, groups, batch, self.kl.coef
            )
        for _ in range(grpo.updates_per_batch):
            skipped = metrics.get("optim/skipped", 0.0)
            state, metrics = self.updater.update(
                state, batch, kl_coef=self.kl.coef, limits=self.guard.update_limits()
            )
            metrics["optim/skipped"] += skipped
        kl = told.get("policy/kl_reward", metrics.get("policy/kl_ref"))
        if kl is not None:
            self.kl.steer(kl, len(sampled(grpo, groups)))
        told["perf/compilations"] = float(self.updater.compilations.since_last())
        return state, batch, metrics | told

    def store_step(
        self, step: int, groups: Groups, batch: Batch, credit: Credit, metrics: Metrics
    ) -> None:
        """Keeps what led to `step`, and what the loss was given for it."""
        self.store.write(
            step,
            groups,
            credit=credit,
            values=values_of_items(batch, self.updater.seen, self.updater.prepared),
            metrics=metrics,
            reward_weights=reward_weights(self.config.reward, step - 1),
        )

    def describe(self, groups: Groups, step: int) -> Metrics:
        """Metrics of the trajectories that led to `step`."""
        trajectories = sampled(self.config.grpo, groups)
        if all(map(why_untrainable, trajectories)):
            first = trajectories[0]
            print(
                f"step {step}: none of {len(trajectories)} trajectories can be trained on; the first "
                f"ended as {first.status}: {first.error or 'see the trajectories folder'}",
                file=sys.stderr,
            )
        bound, now = self.config.async_.max_policy_lag, step - 1
        late = sum(self.sidecars.policy_lag(each, now) > bound for each in trajectories)
        return {
            "policy/lag/max": 0.0,  # where nothing was sampled
            "policy/lag/dropped_frac": late / len(trajectories),
            **rollout_metrics(trajectories, policy_version=self.sidecars.version_of(now)),
        }

    def evaluate(self, step: int) -> Metrics:
        """Metrics on held-out tasks, with the weights that the sidecars serve; none if it is interrupted."""
        try:
            found = evaluate(self.config, self.sidecars, self.held_out)
        except InterruptedRollout:  # the step itself is done: it is logged and saved without them
            return {}
        keep(self.config, self.held_out, found, name=DURING, step=step)
        self.guard.after_evaluation(step, found.metrics)
        return found.metrics


def _open_and_train(config: Config) -> int:
    """As `train`."""
    check_files(config)
    make_run_dir(config)
    # A glance, so that a misspelt path is told before a sidecar has loaded its model.
    read_tasks(
        (*config.data.train, *config.data.eval), max_rows=1, prompt_key=config.data.prompt_key
    )
    with open_shared_sidecars(config) as sidecars:
        return train(config, sidecars)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: all steps made; 1: an error, told in a sentence; 130: interrupted and saved."""
    config = parse_args(
        argv, prog="tooljax.train", description=__doc__ or "", check_files=check_files
    )
    try:
        with joined(config) as own:
            step = _open_and_train(own)
    except (
        ValueError,
        SidecarError,
        CheckpointError,
        LogProbMismatch,
        GuardStop,
        OSError,
    ) as error:
        print(f"tooljax.train: {error}", file=sys.stderr)
        return 1
    if step == config.run.steps:
        print(f"all {step} steps are made, see {config.run.dir}")
    else:
        print(
            f"interrupted after step {step}, saved; run the same command to go on", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
