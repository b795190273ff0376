"""The sections of the schema by which a run is judged: its evaluations, and the guard rails."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tooljax.config.types import Count, CountOrZero, Fraction, NonNegative, Range

Condition = Literal[
    "base",
    "base/no_tools",
    "base/single_turn",
    "trained",
    "trained/no_tools",
    "trained/single_turn",
]
"""A policy, and what is withheld from it."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Held-out evaluation with the full tool loop."""

    every_steps: CountOrZero = 0
    """Steps between evaluations during training, 0 for none."""
    max_tasks: CountOrZero = 200
    """Problems used of each file, 0 for all."""
    samples: Count = 1
    """Trajectories per problem."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    conditions: tuple[Condition, ...] = (
        "base",
        "trained",
        "trained/no_tools",
        "trained/single_turn",
    )
    """What `python -m tooljax.evaluate` compares, on the same prompts and seeds: model.path (base) or trained weights,
    with their tools, with none offered, or in one turn. The first trained one is compared with each of the others."""
    trained: str = "best"
    """Which trained weights: those of the run's best checkpoint ("best"; where none is marked, the newest), "newest",
    the number of a step, or a Hugging Face folder."""
    output: str = ""
    """Folder of the report. Empty: <run.dir>/evaluation."""
    best_metric: str = "eval/accuracy"
    """The checkpoint with the best value of it in the run's evaluations is kept beside the newest ones, and named in
    checkpoints/best.json. Empty: none is."""
    best_mode: Literal["max", "min"] = "max"
    """Whether more of it is better, or less."""


@dataclass(frozen=True)
class GuardConfig:
    """Guard rails: limits of what a step logs, 0 for no limit, and what happens beyond them."""

    action: Literal["warn", "skip", "rollback", "stop"] = "warn"
    """Say so; leave the step's update out; go back to the newest checkpoint's weights and train on with the data that
    comes next; or end the run, without saving what went wrong."""
    max_actions: Count = 3
    """Steps in a row that may be skipped or rolled back before the run stops: what is wrong does not go away then."""
    max_mismatch_kl: NonNegative = 0.1
    """Of policy/kl_mismatch, in nats a token."""
    min_entropy: NonNegative = 0.0
    """Of policy/entropy, in nats. A policy that is sure and right has little: set it for the model and its task."""
    max_entropy: NonNegative = 0.0
    """Of policy/entropy, in nats."""
    max_grad_norm: NonNegative = 0.0
    """Of optim/grad_norm, before optimizer.clip_norm."""
    max_truncated_frac: Fraction = 0.5
    """Of rollout/truncated_frac: trajectories that ended by a turn, token or time limit."""
    max_call_rate_fall: Fraction = 0.5
    """Tool collapse: how far tools/use_rate may fall below the highest mean that it had over `window` steps, as a share
    of that. Counted from the first full window, where that mean is at least 0.1."""
    max_accuracy_fall: Fraction = 0.1
    """Signs of reward hacking: how far accuracy may fall from one half of the last `window` values of rollout/accuracy
    (or of 4 of eval/accuracy) to the other while reward/mean rises. Changes within two standard errors are noise."""
    window: Annotated[int, Range(low=4)] = 20
    """Steps that the two rules above look back on."""
