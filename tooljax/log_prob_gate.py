"""The log-prob gate: engine and trainer score the same sampled tokens, and a run whose two sides disagree stops.

Weights can arrive to the byte and still be served wrong: another temperature, a truncated support, a stale head. Every
sidecar samples one turn of a few fixed tasks, with fixed seeds; the trainer scores exactly those tokens with the
forward pass that it trains with. Only log-probs of sampled tokens are compared: engines compute those of prompts
otherwise.

A run in float32 agrees to rounding, one in bfloat16 to a few per cent of a token's probability.
"""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.protocol import (
    RolloutRequest,
    RolloutSpec,
    ServedWeights,
    Task,
    Trajectory,
    derive_seed,
)
from tooljax.batch import TrainBatch, pack, trajectory_items
from tooljax.config import Config
from tooljax.evaluate import limits, sampling
from tooljax.grpo.mismatch import Mismatch, measure
from tooljax.mismatch_causes import Probes, hashes, weights_sentence
from tooljax.policy import Policy
from tooljax.rollouts import Sidecars
from tooljax.update import Metrics, TrainState, Updater

log = logging.getLogger("tooljax")

MAX_MEAN_KL = {"float32": 1e-5, "bfloat16": 5e-3}
"""Nats a token, where gate.max_mean_kl is 0; see there."""

MAX_TRUNCATION_Z = 6.0
"""Standard errors. An engine that samples from the whole distribution exceeds it once in a thousand million runs."""

EXPLAINS = 0.1
"""An experiment that leaves at most this share of the KL, or less than the limit, is called the explanation."""

_GATE = 2**32 + 1
"""Takes the place of the step in seeds."""


class LogProbMismatch(RuntimeError):
    """Engine and trainer do not give the same tokens the same probability."""


@dataclass(frozen=True)
class Verdict:
    """What a look at every sidecar came to."""

    metrics: Metrics
    problem: str = ""
    """Why the run must stop; "" if it need not."""

    def require(self) -> None:
        """Raises LogProbMismatch if there is a problem."""
        if self.problem:
            raise LogProbMismatch(self.problem)


@dataclass(frozen=True)
class Compared:
    """One sidecar's probes, and how far its log-probs are from the trainer's."""

    url: str
    mismatch: Mismatch
    batch: TrainBatch


class LogProbGate:
    """Looks at every sidecar with the first gate.prompts of `tasks`."""

    def __init__(self, config: Config, policy: Policy, updater: Updater, tasks: Sequence[Task]):
        self._config = config
        self._policy = policy
        self._updater = updater
        # No interaction: a judge has nothing to say about numerics.
        self._tasks = [
            msgspec.structs.replace(task, interaction="") for task in tasks[: config.gate.prompts]
        ]
        self.max_mean_kl = config.gate.max_mean_kl or MAX_MEAN_KL[config.model.dtype]
        self._looked = False

    def due(self, step: int) -> bool:
        """Whether the push after `step` steps is to be looked at."""
        every = self._config.gate.every_pushes
        return every > 0 and (not self._looked or step % every == 0)

    def look(self, sidecars: Sidecars, state: TrainState, step: int) -> Verdict:
        """Compares all sidecars, which serve the weights after `step` steps, with the trainer, if that is due.

        Metrics are those of the worst sidecar. Raises SidecarError. It is short, and not interrupted: a step that is
        made has all its metrics.
        """
        if not self.due(step):
            return Verdict({})
        measured = self.compare(sidecars, state, step)
        if not measured:
            log.warning("log-prob gate: no look, its %d prompts are too long", len(self._tasks))
            return Verdict({})
        worst = max(measured, key=lambda one: one.mismatch.mean_kl)
        metrics = worst.mismatch.metrics("gate")
        problem = ""
        if self._exceeds(worst.mismatch):
            problem = self._problem(sidecars, state, worst, measured)
        elif not self._looked:
            truncated, problem = self._truncation(state, measured)
            metrics |= truncated
        self._looked = True
        return Verdict(metrics, problem)

    def compare(self, sidecars: Sidecars, state: TrainState, step: int) -> list[Compared]:
        """Samples from every sidecar, which must serve the weights after `step` steps, and scores what came.

        Nothing of a sidecar that rejected every prompt as too long: that is the data's fault.
        """
        sampled = self._sample(sidecars, step)
        return [self._measure(url, probes, state) for url, probes in sampled if _has_tokens(probes)]

    def probes(self, state: TrainState, batch: TrainBatch) -> Probes:
        """Sampled tokens, to be scored in other ways than the trainer does."""
        return Probes(
            self._policy,
            self._policy.whole(self._updater.compute_params(state)),
            batch,
            rows_per_microbatch=self._config.batch.rows_per_microbatch,
            temperature=self._config.sampling.temperature,
        )

    # --- sampling and scoring ---

    def _sample(self, sidecars: Sidecars, step: int) -> list[tuple[str, list[Trajectory]]]:
        """One turn of each task from every sidecar, in the order of the tasks."""
        config, version = self._config, sidecars.version_of(step)
        most = min(config.gate.max_tokens, config.limits.max_tokens_per_turn)
        request = RolloutRequest(
            request_id=f"gate.{uuid.uuid4().hex}",
            tasks=self._tasks,
            rollouts=[
                RolloutSpec(
                    task_index=i, sample_index=0, seed=derive_seed(config.run.seed, _GATE, i)
                )
                for i in range(len(self._tasks))
            ],
            sampling=sampling(config.sampling),
            limits=msgspec.structs.replace(
                limits(config.limits), max_turns=1, max_tokens_per_turn=most
            ),
            min_policy_version=version,
        )

        async def ask(client: SidecarClient) -> list[Trajectory]:
            probes = [trajectory async for trajectory in client.rollouts(request)]
            _check_probes(client.url, probes, version)
            return sorted(probes, key=lambda trajectory: trajectory.task_index)

        return sidecars.on_each(ask, interruptible=False)

    def _measure(self, url: str, probes: Sequence[Trajectory], state: TrainState) -> Compared:
        batch = pack(
            [item for probe in probes for item in trajectory_items(probe, 0.0)],
            row_lengths=self._config.batch.row_lengths,
            rows_multiple=self._config.batch.rows_per_microbatch,
        )
        log_probs = self._updater.log_probs(state.params, batch)
        mask = np.asarray(batch.loss_mask)
        return Compared(url, measure(log_probs[mask], batch.rollout_log_probs[mask]), batch)

    # --- what is wrong ---

    def _exceeds(self, mismatch: Mismatch) -> bool:
        max_rms = self._config.gate.max_rms
        return mismatch.mean_kl > self.max_mean_kl or 0 < max_rms < mismatch.rms

    def _truncation(self, state: TrainState, measured: Sequence[Compared]) -> tuple[Metrics, str]:
        """Whether a sidecar samples from fewer tokens than it reports log-probs for."""
        found = [(one.url, *self.probes(state, one.batch).truncation()) for one in measured]
        url, z, sentence = max(found, key=lambda one: one[1])
        if z <= MAX_TRUNCATION_Z:
            return {"gate/truncation_z": z}, ""
        return {"gate/truncation_z": z}, (
            f"log-prob gate: {url} samples from a truncated distribution, and reports log-probs of the whole one: its "
            f"tokens are {z:.1f} standard errors likelier than they should be. {sentence}. Switch that off in the "
            "sidecar's engine"
        )

    def _problem(
        self,
        sidecars: Sidecars,
        state: TrainState,
        worst: Compared,
        measured: Sequence[Compared],
    ) -> str:
        """The whole error: who, how much, and what is most likely at fault."""
        m = worst.mismatch
        others = [o.url for o in measured if o is not worst and self._exceeds(o.mismatch)]
        sentences = [
            f"log-prob gate: {worst.url} and the trainer disagree about the tokens that it samples: mean KL "
            f"{m.mean_kl:.2g} nats a token (limit {self.max_mean_kl:g}), RMS {m.rms:.2g}, 99 % below {m.p99:.2g}, "
            f"largest {m.max_abs:.2g}, effective sample size {m.ess:.0%}, {m.within_1pct:.0%} of {m.tokens} tokens "
            f"within 1 % and {m.within_5pct:.0%} within 5 %"
        ]
        if others:
            sentences.append(f"So do {', '.join(others)}")
        weights, explained = self._compare_weights(sidecars, state, worst.url)
        sentences.append(weights)
        if not explained:
            sentences.append(self._experiments(self.probes(state, worst.batch), m.mean_kl))
        sentences.append(
            "Every step made is saved: with that mended, the same command goes on (gate.max_mean_kl is the limit)"
        )
        return ". ".join(sentences)

    def _compare_weights(self, sidecars: Sidecars, state: TrainState, url: str) -> tuple[str, bool]:
        """Which tensors the sidecar does not have as the trainer has them."""

        async def ask(client: SidecarClient) -> ServedWeights | None:
            return await client.served_weights() if client.url == url else None

        try:
            answers = sidecars.on_each(ask, interruptible=False)
        except SidecarError as error:
            return f"Its weights could not be compared: {error}", False
        served = next((answer for _, answer in answers if answer is not None), None)
        if served is None:
            return "Its weights could not be compared: it does not answer any more", False
        own = self._policy.tensors(self._updater.compute_params(state))
        return weights_sentence(hashes(own), served)

    def _experiments(self, probes: Probes, mean_kl: float) -> str:
        """Which fault of an engine would explain what was seen."""
        findings = probes.findings()
        told = [f"{finding.text} (mean KL {finding.mean_kl:.2g} if so)" for finding in findings[:3]]
        if findings[0].mean_kl <= max(self.max_mean_kl, EXPLAINS * mean_kl):
            return f"What explains it: {told[0]}. Next best: {'; '.join(told[1:])}"
        values = probes.values()
        off = np.abs(values.log_probs - probes.rollout_log_probs)
        return (
            f"No experiment explains it; best were: {'; '.join(told)}. First tokens of turns differ by "
            f"{off[probes.first].mean():.2g} nats on average, later ones by {off[~probes.first].mean():.2g}"
        )


def _has_tokens(probes: Sequence[Trajectory]) -> bool:
    """Whether the policy sampled anything."""
    return any(any(stream.loss_mask) for probe in probes for stream in probe.streams)


def _check_probes(url: str, probes: Sequence[Trajectory], version: int) -> None:
    """SidecarError unless tokens were sampled, and all of them by this version."""
    failed = next((probe for probe in probes if probe.status == "engine_error"), None)
    if failed is not None:
        raise SidecarError(f"log-prob gate: {url}: {failed.error}", kind="engine_error")
    rejected = probes and all(probe.status == "prompt_too_long" for probe in probes)
    if not _has_tokens(probes) and not rejected:
        first = f"{probes[0].status}: {probes[0].error}" if probes else "nothing came back"
        raise SidecarError(
            f"log-prob gate: {url} sampled no token of {len(probes)} tasks; the first ended as {first}. Mend that, or "
            "set gate.every_pushes = 0 to go without the gate",
            kind="no_tokens",
        )
    spans = [span for probe in probes for stream in probe.streams for span in stream.version_spans]
    wrong = next((span for span in spans if span.policy_version != version), None)
    if wrong is not None:
        raise SidecarError(
            f"log-prob gate: {url} sampled with version {wrong.policy_version} of the weights although version "
            f"{version} was pushed; only one trainer may push to a sidecar",
            kind="policy_version",
        )
