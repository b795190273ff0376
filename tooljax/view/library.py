"""The runs below a folder, their steps, and their curves. Names in requests are looked up, never made into paths."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tooljax.store import stored_steps
from tooljax.store.evaluations import DURING
from tooljax.store.store import FOLDER
from tooljax.trackers import read_metrics
from tooljax.view.index import StepIndex

MAX_DEPTH = 4
"""How far below the folder runs are looked for."""

KEPT = 4
"""Steps whose rows stay in memory: as many as two people compare."""

METRICS = "metrics.jsonl"

EVALUATION = "evaluation"
"""The folder of a run that its evaluations are in, each like a run: `tooljax.store.evaluations`."""


class NotThere(LookupError):
    """There is no such run, step or trajectory; the sentence says what there is."""


class Library:
    """What can be looked at. May be used from several threads."""

    def __init__(self, root: str | Path):
        """ValueError if the folder is not there, or holds no run."""
        self.root = Path(root).resolve()
        self._lock = threading.Lock()
        self._runs: dict[str, Path] = {}
        self._steps: OrderedDict[tuple[str, int], tuple[tuple[int, int], StepIndex]] = OrderedDict()
        self._metrics: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}
        if not self.root.is_dir():
            raise ValueError(f"{root} is not a folder; name a run's folder, or one of runs")
        if not self.runs():
            raise ValueError(
                f"{root} holds no run: neither it nor a folder in it has {FOLDER}/ or {METRICS} "
                "(run.dir, store.enabled)"
            )

    def runs(self) -> dict[str, Path]:
        """Folders of runs by name: the path from the root, or the root's own name if it is a run itself."""
        if _is_run(self.root):
            self._runs = _with_evaluations({self.root.name or "run": self.root})
            return self._runs
        found: dict[str, Path] = {}
        level = [self.root]
        for _ in range(MAX_DEPTH):
            # No symbolic links: a folder of runs shows what is in it.
            inside = [p for folder in level for p in _folders(folder)]
            found |= {p.relative_to(self.root).as_posix(): p for p in inside if _is_run(p)}
            level = [p for p in inside if not _is_run(p)]
        self._runs = _with_evaluations(dict(sorted(found.items())))
        return self._runs

    def evaluations(self, run: str) -> list[str]:
        """Names of a run's evaluations, which can be asked for like runs."""
        return [name for name in self._runs if _run_of(name) == run]

    def evaluated(self, name: str) -> str | None:
        """The run that an evaluation is of; None if the name is a run's own."""
        run = _run_of(name)
        return run if run in self._runs else None

    def folder(self, run: str) -> Path:
        """NotThere if the root has no such run. Looks for new runs only if the name is not known."""
        found = self._runs.get(run) or self.runs().get(run)
        if found is None:
            known = ", ".join(self._runs)[:300]
            raise NotThere(f"there is no run {run!r:.100}; there are: {known}")
        return found

    def steps(self, run: str) -> list[int]:
        """The stored steps of a run, in order."""
        return stored_steps(self.folder(run))

    def step(self, run: str, step: int) -> StepIndex:
        """The rows of a step, as its file is now. StoreError if it cannot be read, NotThere if it is not there."""
        path = self.folder(run) / FOLDER / f"step_{step}.log"
        try:
            stamp = _stamp(path)
        except OSError as error:
            there = self.steps(run)
            known = f"stored are {there[0]} to {there[-1]}" if there else "no step is stored"
            raise NotThere(f"step {step} of {run} is not stored; {known}") from error
        with self._lock:
            known = self._steps.get((run, step))
            if known is None or known[0] != stamp:
                known = stamp, StepIndex.read(path)
                self._steps[run, step] = known
            self._steps.move_to_end((run, step))
            while len(self._steps) > KEPT:
                self._steps.popitem(last=False)
        return known[1]

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The rows of the run's metrics.jsonl; none if it has none. Of an evaluation: what its run says of the steps
        that were evaluated, of evaluations only."""
        if (of := self.evaluated(run)) is not None:
            there = set(self.steps(run)) if run.endswith(f"/{DURING}") else set()
            rows = [row for row in self.metrics(of) if row["step"] in there]
            return [
                {k: v for k, v in row.items() if k == "step" or k.startswith("eval/")}
                for row in rows
            ]
        path = self.folder(run) / METRICS
        try:
            stamp = _stamp(path)
        except OSError:
            return []
        with self._lock:
            known = self._metrics.get(run)
            if known is None or known[0] != stamp:
                known = self._metrics[run] = stamp, read_metrics(path)
        return known[1]


def curve(rows: Sequence[dict[str, Any]], name: str, points: int) -> list[tuple[float, float]]:
    """(step, value) of a metric, each the mean of a stretch of steps if there are more than `points` values."""
    found = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    if len(found) <= points:
        return found
    cuts = [len(found) * i // points for i in range(points + 1)]
    parts = [found[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return [
        (sum(s for s, _ in part) / len(part), sum(v for _, v in part) / len(part)) for part in parts
    ]


def _is_run(folder: Path) -> bool:
    return (folder / FOLDER).is_dir() or (folder / METRICS).is_file()


def _with_evaluations(runs: dict[str, Path]) -> dict[str, Path]:
    """Each run, and after it its evaluations."""
    found: dict[str, Path] = {}
    for name, folder in runs.items():
        found[name] = folder
        if not (folder / EVALUATION).is_symlink():
            inside = [p for p in _folders(folder / EVALUATION) if _is_run(p)]
            found |= {f"{name}/{EVALUATION}/{p.name}": p for p in inside}
    return found


def _run_of(name: str) -> str:
    """The run that an evaluation of this name is of; "" if it is not the name of one."""
    run, is_one, rest = name.rpartition(f"/{EVALUATION}/")
    return run if is_one and "/" not in rest else ""


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:  # not ours to read
        return []


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
