"""A world for the log-prob gate: a small random model, the embedded engine that serves it, and a trainer of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from random_decoder import random_decoder
from served_sidecars import Served, make_tasks, serve

from rollout_sidecar.engines.jax import JaxEngine
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.config import Config
from tooljax.config.schema import (
    BatchConfig,
    GateConfig,
    LimitsConfig,
    MeshConfig,
    ModelConfig,
    SamplingConfig,
    SidecarConfig,
)
from tooljax.log_prob_gate import LogProbGate, Verdict
from tooljax.model import hf, tiny
from tooljax.model.decoder import DecoderConfig
from tooljax.policy import Policy, make_updater
from tooljax.rollouts import Sidecars
from tooljax.update import TrainState, Updater

TEMPERATURE = 0.7
TASKS = 6


def make_folder(folder: Path, **changes: Any) -> Path:
    """A model folder. Its decoder has biases and a head of its own, and norms that are not 1, so that each shows."""
    tokenizer = tiny.train_tokenizer(["What is 2? Count to two."], 300)
    cfg = DecoderConfig(
        family="qwen2",
        vocab=tokenizer.get_vocab_size(),
        embed=32,
        layers=2,
        q_heads=2,
        kv_heads=1,
        head_dim=16,
        ffw=48,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tied_head=False,
        max_positions=256,
        qkv_bias=True,
        dtype="float32",
    )
    hf.save(random_decoder(replace(cfg, **changes)), folder)
    tiny.write_tokenizer(tokenizer, folder)
    return folder


def make_config(folder: Path, **sections: Any) -> Config:
    sections = {
        "model": ModelConfig(path=str(folder), dtype="float32"),
        "sampling": SamplingConfig(temperature=TEMPERATURE),
        "limits": LimitsConfig(
            max_tokens_per_turn=24, max_prompt_tokens=64, max_trajectory_tokens=96
        ),
        "sidecar": SidecarConfig(max_model_tokens=128),
        "batch": BatchConfig(row_lengths=(96,), rows_per_microbatch=4),
        "mesh": MeshConfig(fsdp=1),
        "gate": GateConfig(prompts=TASKS),
        **sections,
    }
    return Config(**sections)


@contextmanager
def serve_model(folder: Path) -> Iterator[Served]:
    """The embedded engine behind a sidecar, in this process: its parts can be tampered with."""

    def engine(tokenizer: ChatTokenizer, script: object) -> Any:
        return JaxEngine(str(folder), dtype="float32", slots=TASKS, max_model_tokens=128)

    with serve(ChatTokenizer.from_folder(folder), [], engine=engine) as (served,):
        yield served


@cache
def _parts(config: Config) -> tuple[Policy, Updater]:
    policy = Policy.load(config.model.path, "float32")
    return policy, make_updater(config, policy, total_updates=1, learning_rate=0.0)


@dataclass
class Trainer:
    """The trainer's side, with its weights in the sidecar."""

    config: Config
    policy: Policy
    updater: Updater
    state: TrainState
    gate: LogProbGate

    @classmethod
    def of(cls, config: Config, *, updater_config: Config | None = None) -> "Trainer":
        """With `updater_config`, the update is made by other settings than the run's."""
        # Shared, because it compiles; the gate's settings are nothing to it.
        policy, updater = _parts(replace(updater_config or config, gate=GateConfig()))
        gate = LogProbGate(config, policy, updater, make_tasks(TASKS))
        return cls(config, policy, updater, updater.init(policy.params), gate)

    def push(self, sidecars: Sidecars, step: int = 0) -> None:
        """Sends the weights."""
        tensors = self.policy.tensors(self.updater.compute_params(self.state))
        sidecars.push(tensors, step=step, weights=self.config.weights)

    def look(self, sidecars: Sidecars, step: int = 0) -> Verdict:
        """Sends the weights, and looks."""
        self.push(sidecars, step)
        return self.gate.look(sidecars, self.state, step)
