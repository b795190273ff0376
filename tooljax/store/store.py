"""The trajectories of a run on disk: <run.dir>/trajectories/step_12.log, one file a step, and the tokenizer's files.

A step that is made again replaces its file; a run that goes on after step k forgets the files of later steps first. So
no trajectory is there twice, whenever a run was killed.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from rollout_sidecar.protocol import RewardWeights, Task, Trajectory
from tooljax.config import Config, to_gin
from tooljax.store.frames import FrameReader, FrameWriter
from tooljax.store.records import FORMAT, Header, Record, make_record

FOLDER = "trajectories"
_FILE = re.compile(r"step_(\d+)\.log")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json", "config.json"),
)
"""What the text of tokens takes: the run's folder can be read elsewhere, and after the model has moved."""


class StoreError(ValueError):
    """What is stored cannot be read: the sentence says which file, and why."""


@dataclass(frozen=True)
class Credit:
    """What a step made of its trajectories: both by group, then by sample."""

    advantages: np.ndarray
    dropped: Sequence[Sequence[str]]
    """Why a trajectory was left out of the batch; "" for those that were packed into it."""


class TrajectoryStore:
    """Writes the steps of a run."""

    def __init__(self, config: Config, tasks: Sequence[Task], folder: Path | None = None):
        """Nothing is written yet, nor ever if store.enabled is off.

        Args:
            config: its sections run, model and store; all of it is stored with each step.
            tasks: all that trajectories may be of; each step's own are stored with it.
            folder: where to; default: <run.dir>/trajectories.
        """
        self._config = config
        self._enabled = config.store.enabled
        self._tasks = {task.task_id: task for task in tasks}
        self._folder = folder or Path(config.run.dir) / FOLDER

    def forget_after(self, step: int) -> None:
        """Removes what an earlier run wrote of later steps: to be called with the step of the restored checkpoint, 0
        for a run that begins."""
        if self._enabled:
            for later, path in _files(self._folder).items():
                if later > step:
                    path.unlink()
            _copy_tokenizer(Path(self._config.model.path), self._folder / "tokenizer")

    def write(
        self,
        step: int,
        groups: Sequence[Sequence[Trajectory]],
        *,
        credit: Credit,
        values: Sequence[Mapping[str, np.ndarray]],
        metrics: Mapping[str, float],
        reward_weights: RewardWeights,
    ) -> Path | None:
        """Writes step_N.log into the folder; its path, None if the store is off.

        Args:
            step: optimizer steps made, this one included.
            groups: all trajectories of the step, trained on or not.
            credit: what was made of them.
            values: what the loss was given for each token of what was trained on: in the order of `groups`, each stream
                with a sampled token of each trajectory that was not dropped.
            metrics: what the update reported.
            reward_weights: what the rewards were put together with.
        """
        if not self._enabled:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step}.log"
        trajectories = [t for group in groups for t in group]
        header = Header(
            step=step,
            config=to_gin(self._config),
            reward_weights=reward_weights,
            metrics=dict(metrics),
            tasks={
                t.task_id: self._tasks[t.task_id] for t in trajectories if t.task_id in self._tasks
            },
            trajectories=len(trajectories),
        )
        with FrameWriter(path, level=self._config.store.compression_level) as file:
            file.append(header)
            for record in _records(groups, credit, values):
                file.append(record)
        self._forget_old(step)
        return path

    def _forget_old(self, step: int) -> None:
        if self._config.store.keep_steps:
            for old, path in _files(self._folder).items():
                if old <= step - self._config.store.keep_steps:
                    path.unlink()


@dataclass(frozen=True)
class StoredStep:
    """A step as it was read back."""

    header: Header
    records: list[Record]
    notes: list[str] = field(default_factory=list)
    """What was lost, in sentences."""

    @cached_property
    def groups(self) -> list[list[int]]:
        """Places in `records` of each group's trajectories."""
        groups: dict[int, list[int]] = {}
        for i, record in enumerate(self.records):
            groups.setdefault(record.group, []).append(i)
        return list(groups.values())


def stored_steps(run_dir: str | Path) -> list[int]:
    """The steps that a run has stored, in order; none if there is no such folder."""
    return sorted(_files(Path(run_dir) / FOLDER))


def read_step(run_dir: str | Path, step: int) -> StoredStep:
    """One step. What a crash cut off is left out, with a note. StoreError if nothing of it can be read."""
    path = Path(run_dir) / FOLDER / f"step_{step}.log"
    if not path.is_file():
        there = stored_steps(run_dir)
        known = f"stored are {there[0]} to {there[-1]}" if there else "no step is stored"
        raise StoreError(f"{path} is not there; {known} (store.enabled, store.keep_steps)")
    reader = FrameReader(path)
    frames = iter(reader)
    head = next(frames, None)
    if head is None:
        raise StoreError(f"{path} holds nothing that can be read: {reader.note or 'it is empty'}")
    header = decode_header(head, path)
    try:
        records = [msgspec.msgpack.decode(frame, type=Record) for frame in frames]
    except msgspec.DecodeError as error:
        raise StoreError(f"{path} holds what no release of tooljax wrote: {error}") from error
    return StoredStep(header, records, losses(path, header, len(records), reader.note))


def decode_header(head: bytes, path: Path) -> Header:
    """The first frame of a step's file. StoreError if it is no header, or of another format."""
    try:
        found = msgspec.msgpack.decode(head, type=_Format).format
        if found != FORMAT:
            raise StoreError(
                f"{path} has format {found}, and this release reads format {FORMAT}: use the release "
                "that wrote it"
            )
        return msgspec.msgpack.decode(head, type=Header)
    except msgspec.DecodeError as error:
        raise StoreError(f"{path} holds what no release of tooljax wrote: {error}") from error


def losses(path: Path, header: Header, left: int, note: str) -> list[str]:
    """What a step's file has lost, in sentences, when `left` records could be read and the reader left a note."""
    notes = [note] if note else []
    if left < header.trajectories:
        notes.append(f"{path.name}: {left} of {header.trajectories} trajectories are left")
    return notes


class _Format(msgspec.Struct, tag="step"):
    """The part of a header that every release understands."""

    format: int


def _records(
    groups: Sequence[Sequence[Trajectory]],
    credit: Credit,
    items: Sequence[Mapping[str, np.ndarray]],
) -> Iterator[Record]:
    left = iter(items)
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group):
            packed = not credit.dropped[i][j]
            values = [
                next(left) if packed and any(stream.loss_mask) else {}
                for stream in trajectory.streams
            ]
            yield make_record(
                trajectory,
                group=i,
                advantage=float(credit.advantages[i, j]),
                dropped=credit.dropped[i][j],
                values=values,
            )
    assert next(left, None) is None, "there are values of streams of none of these trajectories"


def _files(folder: Path) -> dict[int, Path]:
    found = ((path, _FILE.fullmatch(path.name)) for path in folder.glob("step_*.log"))
    return {int(match[1]): path for path, match in found if match}


def _copy_tokenizer(model: Path, folder: Path) -> None:
    """The files that make text of tokens; what the model lacks is left out."""
    for name in _TOKENIZER_FILES:
        if (model / name).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model / name, folder / name)
