"""A sampler of the user's with verl's contract: rows in its order, and each step's trajectories for its `update`.

As in verl up to 0.7.1: rows are taken a step at a time, the end of a pass that fills no step is dropped, and `update`
is called between two steps. Differs: with `state_dict` and `load_state_dict` (torch's names) what the sampler knows is
in the checkpoint. Without them a resumed run takes the rows that were taken before once more, unused, from a new
sampler: the same order goes on if it depends on nothing that `update` was told.
"""

import importlib.util
import json
import logging
import operator
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from rollout_sidecar.protocol import Task
from rollout_sidecar.verl_names import import_user_object, load_user_file
from tooljax.config import Config
from tooljax.curriculum.base import Seen
from tooljax.curriculum.verl import Rows, VerlConfig, data_config, data_proto, from_json, to_json
from tooljax.update import Metrics

log = logging.getLogger("tooljax")


class UserSampler:
    """A Curriculum."""

    def __init__(self, tasks: Sequence[Task], config: Config):
        """Loads the class and makes one. ValueError names the setting, or what the user's code raised."""
        self._tasks = tasks
        self._config = config
        self._per_step = config.data.prompts_per_step
        self._name = config.curriculum.class_name
        self._class = _load(config.curriculum.class_path, self._name)
        self._sampler = self._make()
        self._passing: Iterator[Any] | None = None
        self._rows = 0
        """Taken from the sampler."""
        self._kept: list[list[int]] = []
        """Batches since the last step was observed: after an interruption they come again."""
        self._given = 0
        """How many of them."""
        self._batches = 0
        """Given since the run began."""
        self._saves = all(hasattr(self._sampler, n) for n in ("state_dict", "load_state_dict"))
        if hasattr(self._sampler, "update") and not self._saves:
            log.warning(
                "what %s learns from update() is not in checkpoints, so a resumed run has another order; give it "
                "state_dict() and load_state_dict(state)",
                self._name,
            )
        self._own_state()  # what cannot be saved is told now, not at the first checkpoint

    def next(self, step: int, batch: int) -> list[int]:
        """See Curriculum."""
        if self._given == len(self._kept):
            self._kept.append(self._take())
        self._given += 1
        self._batches += 1
        return self._kept[self._given - 1]

    def observe(self, seen: Seen) -> Metrics:
        """See Curriculum."""
        self._kept, self._given = self._kept[self._given :], 0
        if hasattr(self._sampler, "update"):
            batch = data_proto(self._tasks, seen)
            with self._theirs("update()"):
                self._sampler.update(batch=batch)
        return {}

    def state(self) -> dict[str, Any]:
        """See Curriculum."""
        return {
            "class_name": self._name,
            "batches": self._batches,
            "rows": self._rows,
            "to_come": self._kept[self._given :],
            "state": self._own_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Curriculum."""
        if state["class_name"] != self._name:
            raise ValueError(
                f"the checkpoint was saved with the sampler {state['class_name']}, and curriculum.class_name is "
                f"{self._name!r}; put it back, or start a new run in another run.dir"
            )
        place, to_come = self._given - (self._batches - state["batches"]), state["to_come"]
        if (
            0 <= place <= self._given
            and self._kept[place:][: len(to_come)] == to_come
            and self._rows >= state["rows"]
        ):  # an interruption, in this process
            self._given, self._batches = place, state["batches"]
            return
        self._sampler, self._passing, self._rows = self._make(), None, 0
        if state["state"] is not None and self._saves:
            with self._theirs("load_state_dict()"):
                self._sampler.load_state_dict(from_json(state["state"]))
        else:
            while self._rows < state["rows"]:
                self._pull(state["rows"] - self._rows)
        self._rows, self._batches = state["rows"], state["batches"]
        self._kept, self._given = [list(rows) for rows in to_come], 0

    def _make(self) -> Any:
        with self._theirs("__init__(data_source, data_config)"):
            return self._class(data_source=Rows(self._tasks), data_config=data_config(self._config))

    def _take(self) -> list[int]:
        """The next rows, of one pass."""
        rows = self._pull(self._per_step)
        if len(rows) < self._per_step:
            rows = self._pull(self._per_step)
        if len(rows) < self._per_step:
            raise ValueError(
                f"curriculum.class_name: {self._name} gave {len(rows)} rows in a pass, fewer than "
                f"data.prompts_per_step={self._per_step}; a pass must fill a step"
            )
        return [self._checked(row) for row in rows]

    def _pull(self, count: int) -> list[Any]:
        """So many rows, or what is left of the pass; then the next one begins."""
        with self._theirs("__iter__()"):
            if self._passing is None:
                self._passing = iter(self._sampler)
            rows = list(islice(self._passing, count))
        self._rows += len(rows)
        if len(rows) < count:
            self._passing = None
        return rows

    def _checked(self, row: Any) -> int:
        try:
            number = operator.index(row)
        except TypeError:
            number = -1
        if not 0 <= number < len(self._tasks):
            raise ValueError(
                f"curriculum.class_name: {self._name} gave row {row!r:.60}, but rows are numbered from 0 to "
                f"{len(self._tasks) - 1}"
            )
        return number

    def _own_state(self) -> Any:
        if not self._saves:
            return None
        with self._theirs("state_dict()"):
            state = to_json(self._sampler.state_dict())
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"curriculum.class_name: state_dict() of {self._name} cannot be saved: {error}; give it numbers, text, "
                "lists, dicts with text as keys, and arrays"
            ) from None
        return state

    @contextmanager
    def _theirs(self, what: str) -> Iterator[None]:
        """The boundary around the user's code."""
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"curriculum.class_name: {what} of {self._name} failed: {error!r}"
            ) from error


def _load(path: str, name: str) -> Any:
    where = "curriculum.class_path"
    with _omegaconf_names():
        if path.startswith("pkg://"):
            return import_user_object(f"{path.removeprefix('pkg://')}.{name}", where, key=where)
        module = load_user_file(Path(path.removeprefix("file://")), where)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(
            f"curriculum.class_name: {path} has no class {name!r}; name one that is in it"
        ) from None


@contextmanager
def _omegaconf_names() -> Iterator[None]:
    """Samplers name omegaconf's class in their signature. Where it is not installed, a class of ours has that name
    while the user's file is loaded."""
    if "omegaconf" in sys.modules or importlib.util.find_spec("omegaconf"):
        yield
        return
    stand_in: Any = types.ModuleType("omegaconf", "Stands in for omegaconf.")
    stand_in.DictConfig, stand_in.ListConfig = VerlConfig, list
    sys.modules["omegaconf"] = stand_in
    try:
        yield
    finally:
        del sys.modules["omegaconf"]
