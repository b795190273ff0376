"""Checkpoints: everything an exact resume needs, in one atomic step (Orbax).

A step is a folder `<dir>/<step>` with two items: `arrays`, any pytree of arrays, and `extra`, JSON. It is written
beside its final name and renamed when complete, so a crash leaves no half step under a good name. A step that cannot
be read all the same (a truncated file) is skipped at restore, with a warning, and set aside.

A save may go on in the background, from a copy in host memory: what the caller waits for is that copy, and a save
before that is still being written. Everything that reads waits for it, and so does the end of the `with` block.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

log = logging.getLogger("tooljax")

FORMAT = 3
"""Of the envelope around `extra`, and of a training state."""

Layout = dict[str, str]
"""What a step holds, by pytree path: "float32[8, 4]"."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none fits what is asked for. Older checkpoints are untouched."""


class Best(NamedTuple):
    """The step with the best evaluation so far; `best.json` holds it."""

    step: int
    metric: str
    value: float


class Checkpointer:
    """Saves and restores steps in one folder; the newest `keep` stay, and the best one. A context manager."""

    def __init__(self, dir: str | Path, *, keep: int = 2):
        self.dir = Path(dir).resolve()  # all processes of a run must name it alike
        self.keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._pending: int | None = None
        """The step that a save with block=False may still be writing."""

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The complete steps, oldest first; not one that may still be being written."""
        with _quiet_orbax():
            return sorted(set(self._open().all_steps()) - {self._pending})

    def latest_step(self) -> int | None:
        """The newest complete step; None when the folder has none."""
        return max(self.steps(), default=None)

    def save(self, step: int, arrays: Any, extra: dict[str, Any], block: bool = True) -> None:
        """Writes a step; one that is there already is left as it is.

        `extra` comes back as JSON returns it: tuples as lists, keys as strings. With block=False the arrays are
        copied to host memory before the call returns, so that they may be donated, and written in the background; an
        error then comes from the next call that writes, reads or waits, or from `look`. One step is written at a time:
        the one before is complete first. Raises CheckpointError when the step cannot be written.
        """
        self.wait()
        steps = self.steps()
        if step in steps:
            return
        if steps and steps[-1] > step:
            raise CheckpointError(
                f"{self.dir} holds step {steps[-1]}, newer than step {step}; restore it, or use another run.dir"
            )
        envelope = {"format": FORMAT, "layout": _layout(arrays), "extra": extra}
        json.dumps(
            envelope
        )  # a TypeError here is the caller's, and must not look like a disk fault
        self._forget_mark(step)
        self._pending = step
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), extra=ocp.args.JsonSave(envelope)
        )
        with _quiet_orbax(), self._write_faults(step):
            self._open().save(step, args=items, force=True)
        if block:
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written; raises the CheckpointError of a save with block=False."""
        if self._pending is None:
            return
        with _quiet_orbax(), self._write_faults(self._pending):
            self._open().wait_until_finished()
        self._pending = None

    def is_writing(self) -> bool:
        """Whether a save with block=False is under way."""
        return self._pending is not None and self._open().is_saving_in_progress()

    def look(self) -> None:
        """Raises the CheckpointError of a save with block=False that has failed since; waits for nothing."""
        if not self.is_writing():
            self.wait()

    def best(self) -> Best | None:
        """The step that `mark_best` named last; None if there is none, or its checkpoint is gone.

        In another process, or after a crash, one that was not written in the end does not count: the best before it is
        still there.
        """
        found = self._marked()
        return found if found and found.step in (*self.steps(), self._pending) else None

    def mark_best(self, best: Best) -> None:
        """Keeps its checkpoint until another is marked; the one before is then like others. It must be there, or be
        under way (`save` with block=False), which is not waited for."""
        if best.step not in (*self.steps(), self._pending):
            raise CheckpointError(
                f"step {best.step} of {self.dir} is not saved, so it cannot be kept as the best"
            )
        record: dict[str, Any] = best._asdict()
        if best.step == self._pending and (before := self._marked()):
            record["before"] = before._asdict()
        self._write_mark(record)

    def restore(
        self,
        abstract: Any,
        *,
        step: int | None = None,
        changes: Callable[[dict[str, Any]], list[str]] = lambda extra: [],
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest readable step, or the one asked for: its number, its arrays and `extra`. None when the folder has
        no such step.

        `abstract` is a pytree of jax.ShapeDtypeStruct (or arrays) like the one saved; each array is placed on the
        sharding of its counterpart. Raises CheckpointError when the step's arrays differ from it in name, shape or
        dtype, with what `changes` says of `extra` (settings that are others now), and when there are steps but none
        can be read.
        """
        self.wait()
        faults: dict[int, str] = {}
        wanted = [one for one in reversed(self.steps()) if step in (None, one)]
        for one in wanted:
            try:
                with _quiet_orbax():
                    arrays, extra = self._read(one, abstract, changes)
            except CheckpointError:
                raise
            except Exception as error:  # the boundary around Orbax: it has no base class for damage
                faults[one] = _first_line(error)
                continue
            for damaged, fault in faults.items():
                self._set_aside(damaged, fault)
            return one, arrays, extra
        if faults:
            listed = "; ".join(f"step {step}: {fault}" for step, fault in faults.items())
            raise CheckpointError(
                f"no checkpoint in {self.dir} can be read ({listed}); "
                "move the folder away to start from the beginning"
            )
        return None

    def close(self) -> None:
        """Waits for what is being written, then lets go of the folder."""
        try:
            self.wait()
        finally:
            self._drop_manager()

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_NewestAndBest(self.keep, self._marked),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            )
            self._manager = ocp.CheckpointManager(self.dir, options=options)
        return self._manager

    def _marked(self) -> Best | None:
        """What best.json names: the step it was written for, or the one before if that was never completed."""
        best, before = self._read_mark()
        # Orbax renames a step to its number when it is complete.
        if best and (best.step == self._pending or (self.dir / str(best.step)).is_dir()):
            return best
        return before

    def _read_mark(self) -> tuple[Best | None, Best | None]:
        """The best step, and the best before it if that was complete when it was marked."""
        try:
            record = json.loads((self.dir / "best.json").read_text())
            before = record.pop("before", None)
            return Best(**record), before and Best(**before)
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
        ):  # none yet, or what is no such file
            return None, None

    def _write_mark(self, record: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            temporary = self.dir / "best.json.tmp"
            temporary.write_text(json.dumps(record) + "\n")
            os.replace(temporary, self.dir / "best.json")

    def _forget_mark(self, step: int) -> None:
        """A step that was marked and then lost in a crash is made again: whether it is the best is open."""
        best, before = self._read_mark()
        if best and best.step == step:
            self._write_mark(before._asdict() if before else {})

    def _read(
        self, step: int, abstract: Any, changes: Callable[[dict[str, Any]], list[str]]
    ) -> tuple[Any, dict[str, Any]]:
        manager = self._open()
        only_extra = ocp.args.Composite(extra=ocp.args.JsonRestore())
        envelope = manager.restore(step, args=only_extra)["extra"]
        if envelope["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {self.dir / str(step)} has format {envelope['format']}, "
                f"this version reads {FORMAT}; continue the run with the version that began it"
            )
        differences = _differences(saved=envelope["layout"], asked=_layout(abstract))
        if differences:
            changed = "; ".join(changes(envelope["extra"]))
            raise CheckpointError(
                f"checkpoint {self.dir / str(step)} does not fit the model or optimizer: {differences}. Use the config "
                f"that wrote it, or another run.dir{f' (changed since: {changed})' if changed else ''}"
            )
        target = jax.tree.map(_abstract, abstract)
        only_arrays = ocp.args.Composite(arrays=ocp.args.StandardRestore(target))
        return manager.restore(step, args=only_arrays)["arrays"], envelope["extra"]

    @contextmanager
    def _write_faults(self, step: int) -> Iterator[None]:
        """Turns whatever Orbax raises into one CheckpointError, and removes what the failed save left."""
        try:
            yield
        except Exception as error:
            self._pending = None
            self._drop_manager()  # it would raise the same error again
            if jax.process_index() == 0:
                for leftover in self.dir.glob(f"{step}.orbax-checkpoint-tmp*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            steps = self.steps()
            good = f"step {steps[-1]} is still readable" if steps else "no earlier step exists"
            raise CheckpointError(
                f"could not save step {step} to {self.dir}: {_reason(error)}; {good}"
            ) from error

    def _drop_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            with _quiet_orbax(), suppress(Exception):
                manager.close()

    def _set_aside(self, step: int, fault: str) -> None:
        """Renames a damaged step, so that the run can save that step again."""
        target = self.dir / f"damaged_{step}"
        log.warning(
            "skipped the damaged checkpoint of step %d (kept as %s): %s", step, target, fault
        )
        if jax.process_index() == 0:
            shutil.rmtree(target, ignore_errors=True)
            (self.dir / str(step)).rename(target)
        self._drop_manager()  # its list of steps is cached


class _NewestAndBest:
    """Orbax's preservation policy: asked which of the steps, oldest first, outlive a save."""

    def __init__(self, keep: int, marked: Callable[[], Best | None]):
        self._keep = keep
        self._marked = marked

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Orbax's call."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self._marked()
        kept = {*steps[-self._keep :], best.step if best else None}
        return [step in kept for step in steps]


def _layout(tree: Any) -> Layout:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _differences(*, saved: Layout, asked: Layout) -> str:
    """The first of them; "" for none. Orbax would cast a dtype silently, and names paths in its own way, so the
    comparison is ours."""
    found = [
        f"{path} is {saved.get(path, 'absent')}, expected {asked.get(path, 'absent')}"
        for path in sorted(saved.keys() | asked.keys())
        if saved.get(path) != asked.get(path)
    ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _reason(error: Exception) -> str:
    """A full disk is an OSError or TensorStore's ValueError, depending on which file was being written."""
    text = str(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in text:
        return (
            "the disk is full (free some space or lower checkpoint.keep, then start the run again)"
        )
    return _first_line(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


@contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Orbax logs progress and whole tracebacks through absl; what matters reaches the caller as an exception."""
    absl_log = logging.getLogger("absl")
    level = absl_log.level
    absl_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        absl_log.setLevel(level)
