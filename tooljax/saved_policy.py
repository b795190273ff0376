"""A policy as a checkpoint of its run has it: what is evaluated, and what is exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tooljax.checkpoint import Checkpointer, CheckpointError
from tooljax.config import Config
from tooljax.policy import Policy, abstract_state, load_policy, make_updater
from tooljax.update import Params, TrainState


class SavedPolicy(NamedTuple):
    """What a run trained, at one of its steps."""

    policy: Policy
    """As the config starts it; its trained weights are those below."""
    state: TrainState
    params: Params
    """The trained weights in the model's dtype."""
    extra: dict[str, Any]
    """What the checkpoint holds beside the state."""


def checkpoints_of(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.run.dir) / "checkpoints"


def read_saved(
    config: Config,
    step: int | None,
    changes: Callable[[dict[str, Any]], list[str]] = lambda extra: [],
) -> SavedPolicy:
    """Reads the checkpoint of a step of config.run.dir. CheckpointError if it is not there or does not fit.

    Args:
        changes: as `Checkpointer.restore` takes it.
    """
    folder = checkpoints_of(config)
    policy = load_policy(config)
    updater = make_updater(
        config, policy, total_updates=1, learning_rate=config.optimizer.learning_rate
    )
    with Checkpointer(folder, keep=config.checkpoint.keep) as checkpointer:
        found = checkpointer.restore(
            abstract_state(updater, policy.trained), step=step, changes=changes
        )
    if found is None:
        raise CheckpointError(f"step {step} of {folder} is no longer there")
    _, saved, extra = found
    state = updater.restored(saved)
    return SavedPolicy(policy, state, updater.compute_params(state), extra)
