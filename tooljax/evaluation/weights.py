"""The weights of the policies that are compared: model.path, and what a run has made of it."""

from collections.abc import Iterator
from pathlib import Path

import jax

from tooljax.checkpoint import Checkpointer
from tooljax.config import Config
from tooljax.policy import Policy, layout_of
from tooljax.saved_policy import checkpoints_of, read_saved


def base(config: Config) -> Iterator[tuple[str, jax.Array]]:
    """The tensors of model.path, as they are pushed to sidecars."""
    policy = Policy.load(config.model.path, config.model.dtype, layout_of(config))
    return policy.tensors(policy.params)


class Trained:
    """Where trained weights are: found when this is made, read when they are asked for."""

    def __init__(self, config: Config):
        """Raises ValueError if evaluate.trained names what is not there."""
        self._config = config
        self._checkpoints = checkpoints_of(config)
        self.folder = ""
        """Of Hugging Face; "" for a checkpoint."""
        self.step: int | None = None
        """Of the checkpoint; None if there is none."""
        wanted = config.evaluate.trained
        if wanted not in ("best", "newest") and not wanted.isdecimal():
            if not (Path(wanted) / "config.json").is_file():
                raise ValueError(
                    f"evaluate.trained={wanted!r} is no Hugging Face folder; name one, the number of a saved step, "
                    '"best" or "newest"'
                )
            self.folder = wanted
            return
        if self._checkpoints.is_dir():
            self.step = self._find(wanted)
        elif wanted.isdecimal():
            raise ValueError(f"evaluate.trained={wanted}, but {self._checkpoints} does not exist")

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self.folder) or self.step is not None

    def __str__(self) -> str:
        return self.folder or f"step {self.step} of {self._checkpoints}"

    def tensors(self) -> Iterator[tuple[str, jax.Array]]:
        """As they are pushed to sidecars. Raises CheckpointError."""
        config = self._config
        if self.folder:
            policy = Policy.load(self.folder, config.model.dtype, layout_of(config))
            return policy.tensors(policy.params)
        saved = read_saved(config, self.step)
        return saved.policy.tensors(saved.params)

    def _find(self, wanted: str) -> int | None:
        with Checkpointer(self._checkpoints, keep=self._config.checkpoint.keep) as checkpointer:
            steps, best = checkpointer.steps(), checkpointer.best()
        if not wanted.isdecimal():
            return best.step if best and wanted == "best" else max(steps, default=None)
        if int(wanted) not in steps:
            raise ValueError(
                f"evaluate.trained={wanted}, but {self._checkpoints} holds the steps {steps}; name one of them"
            )
        return int(wanted)
