"""Traces of updates for XProf: TensorBoard's profile page, or Perfetto.

Operations are named after the stages of an update: cast, log_probs, gradients and apply, in them embedding, attention,
feed_forward and head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from tooljax.config import Config

FOLDER = "profile"
"""Under run.dir."""


@contextmanager
def traced(config: Config, step: int) -> Iterator[None]:
    """What runs within is traced into <run.dir>/profile, if it is one of profile.steps."""
    if step not in config.profile.steps:
        yield
        return
    folder = Path(config.run.dir) / FOLDER
    with jax.profiler.trace(folder), jax.profiler.StepTraceAnnotation("update", step_num=step):
        yield
