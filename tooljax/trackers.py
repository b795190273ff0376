"""Where metrics and trajectories go: metrics.jsonl always; TensorBoard, MLflow and WandB as configured.

Metrics have the same names in all. TensorBoard and WandB have histograms and sample conversations too; metrics.jsonl
and MLflow have quantiles of the histograms, as metrics.

A run that is resumed leaves no duplicates in metrics.jsonl and in TensorBoard: what they say of steps after the
restored one is dropped. MLflow and WandB continue the same run, but cannot forget: MLflow keeps both values of a step
that was made twice, WandB the first.
"""

import html
import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rollout_sidecar.protocol import Trajectory
from tooljax.config import Config, to_gin
from tooljax.histograms import Values, buckets, finite, quantiles
from tooljax.metrics import check_names


@dataclass(frozen=True)
class Logged:
    """What belongs to one step."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Markdown."""
    distributions: Mapping[str, Values] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """Metrics, and quantiles of the distributions: all that a tracker without histograms can carry."""
        return {**self.metrics, **quantiles(self.distributions)}


class Tracker(Protocol):
    """A place for what a step logs."""

    def log(self, step: int, logged: Logged) -> None:
        """Writes as much of it as the tracker can carry."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class Trackers:
    """All trackers that a config asks for. A context manager."""

    def __init__(self, config: Config, *, resume_step: int = 0):
        """Opens them.

        Args:
            config: its run and track sections say what and where.
            resume_step: step of the restored checkpoint, 0 for a run that begins. Later steps are forgotten.
        """
        run_dir = Path(config.run.dir)
        self._samples = config.track.samples_per_step
        self._trackers: list[Tracker] = []
        with ExitStack() as opened:  # closes those that are open, should a later one fail
            for wanted, tracker in (
                (True, JsonLines),
                (config.track.tensorboard, TensorBoard),
                (config.track.mlflow, MLflow),
                (config.track.wandb, WandB),
            ):
                if wanted:
                    self._trackers.append(tracker(config, run_dir, resume_step))
                    opened.callback(self._trackers[-1].close)
            self._opened = opened.pop_all()

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        trajectories: Sequence[Trajectory] = (),
        distributions: Mapping[str, Values] | None = None,
    ) -> None:
        """Writes the metrics of a step, a few of its trajectories as text, and how values are distributed.

        Raises ValueError for a metric or distribution that tooljax.metrics does not register.
        """
        values = {name: float(value) for name, value in metrics.items()}
        count = min(self._samples, len(trajectories))
        shown = [trajectories[i * len(trajectories) // count] for i in range(count)]
        texts = {f"samples/{i}": render_trajectory(t) for i, t in enumerate(shown)}
        logged = Logged(values, texts, finite(distributions or {}))
        check_names(logged.numbers)
        for tracker in self._trackers:
            tracker.log(step, logged)

    def close(self) -> None:
        """Closes all, even if one fails."""
        self._opened.close()


class JsonLines:
    """metrics.jsonl: one object a step, {"step": 3, "reward/mean": 0.5, ...}. What is not finite is null."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int):
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if 0 < resume_step >= row["step"]]
        _write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._file = path.open("a")

    def log(self, step: int, logged: Logged) -> None:
        """Appends a line; it is on disk when this returns, and so before the step's checkpoint."""
        numbers = logged.numbers.items()
        row = {name: value if math.isfinite(value) else None for name, value in numbers}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Scalars, histograms, sample conversations, the config and its settings, under <run.dir>/tensorboard."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int):
        # 0.3 s, and only if it is wanted
        from tooljax.tensorboard import RESULTS, STORY, TensorBoardWriter

        self._writer = TensorBoardWriter(run_dir / "tensorboard", resume_step=resume_step)
        self._writer.text(resume_step, "config", _fenced(to_gin(config)))
        self._writer.layout(resume_step, STORY)
        settings = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in _flat(asdict(config)).items()
        }
        self._writer.hparams(resume_step, settings, RESULTS)

    def log(self, step: int, logged: Logged) -> None:
        """Writes and flushes, so that a running dashboard shows the step."""
        self._writer.scalars(step, logged.metrics)
        for name, values in logged.distributions.items():
            self._writer.histogram(step, name, values)
        for name, text in logged.texts.items():
            self._writer.text(step, name, text)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class MLflow:
    """Metrics and parameters in MLflow: MLFLOW_TRACKING_URI, or a database in the run's folder."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int):
        mlflow = _optional("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{(run_dir / 'mlflow.db').resolve()}")
        mlflow.set_experiment(config.track.project)
        ids = _RunIds(run_dir)
        known = ids.get("mlflow") if resume_step else None
        run = mlflow.start_run(run_id=known, run_name=None if known else run_dir.resolve().name)
        if known is None:
            mlflow.log_params(_flat(asdict(config)))
        ids.set("mlflow", run.info.run_id)
        self._mlflow = mlflow

    def log(self, step: int, logged: Logged) -> None:
        """Sends the metrics, and quantiles; texts stay in TensorBoard and trajectories/."""
        self._mlflow.log_metrics(logged.numbers, step=step, synchronous=True)

    def close(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()


class WandB:
    """Metrics, histograms, config and sample conversations in Weights & Biases; WANDB_MODE=offline keeps them here."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int):
        self._wandb = _optional("wandb")
        ids = _RunIds(run_dir)
        self._run = self._wandb.init(
            project=config.track.project,
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=asdict(config),
            id=ids.get("wandb") if resume_step else None,
            resume="allow",
            settings=self._wandb.Settings(console="off", silent=True),
        )
        ids.set("wandb", self._run.id)

    def log(self, step: int, logged: Logged) -> None:
        """Sends metrics, histograms and texts."""
        page, texts = self._wandb.Html, logged.texts.items()
        pages = {name: page(f"<pre>{html.escape(text)}</pre>") for name, text in texts}
        histograms = {
            name: self._wandb.Histogram(np_histogram=buckets(values))
            for name, values in logged.distributions.items()
        }
        self._run.log({**logged.metrics, **histograms, **pages}, step=step)

    def close(self) -> None:
        """Waits until all is sent or written."""
        self._run.finish()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order; a last line that a crash cut short is left out."""
    path = Path(path)
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def best_and_worst(
    trajectories: Sequence[Trajectory], count: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Those with the highest and the lowest reward, most extreme first; none is in both."""
    ordered = sorted(trajectories, key=lambda t: (-t.reward, t.task_index, t.sample_index))
    return ordered[:count], ordered[max(count, len(ordered) - count) :][::-1]


def write_best_and_worst(
    run_dir: str | Path, trajectories: Sequence[Trajectory], count: int = 10
) -> Path:
    """Writes them, readable, to <run_dir>/best_and_worst.md and returns its path."""
    best, worst = best_and_worst(trajectories, count)
    parts = [f"# {len(best)} best and {len(worst)} worst of {len(trajectories)} trajectories"]
    for title, chosen in (("Best", best), ("Worst", worst)):
        parts += [f"## {title} {i}\n\n{render_trajectory(t)}" for i, t in enumerate(chosen, 1)]
    path = Path(run_dir) / "best_and_worst.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, ("\n\n".join(parts) + "\n").encode())
    return path


def render_trajectory(trajectory: Trajectory) -> str:
    """A trajectory as markdown: what it came to, then its messages, each call's fate below the turn that made it."""
    t = trajectory
    terms = "".join(f", {name} {value:g}" for name, value in t.reward_terms.items())
    parts = [
        f"**reward {t.reward:g}**{terms and ' (' + terms[2:] + ')'} | {t.status} | task "
        f"{t.task_id}, sample {t.sample_index} | {len(t.turns)} turns, {sum(t.loss_mask)} tokens "
        f"sampled, {t.total_s:.1f} s"
    ]
    if t.error:
        parts.append(f"error: {t.error}")
    by_policy = [i for i, m in enumerate(t.messages) if m.get("role") == "assistant"]
    sampled = by_policy[-len(t.turns) :] if t.turns else []
    turns = dict(zip(sampled, t.turns, strict=False))
    for i, message in enumerate(t.messages):
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        parts.append(f"**{message.get('role', '?')}**\n\n{_fenced(text)}")
        parts += [
            f"- {call.name or '(unreadable call)'}: {call.status}, {call.latency_s:.3f} s"
            + (", result truncated" if call.truncated else "")
            for call in (turns[i].calls if i in turns else ())
        ]
    return "\n\n".join(parts)


class _RunIds:
    """The identities of this run at remote trackers, so that a resumed run goes on under them."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / "tracker_runs.json"
        self._ids: dict[str, str] = (
            json.loads(self._path.read_text()) if self._path.exists() else {}
        )

    def get(self, tracker: str) -> str | None:
        return self._ids.get(tracker)

    def set(self, tracker: str, run_id: str) -> None:
        self._ids[tracker] = run_id
        _write_atomically(self._path, json.dumps(self._ids).encode())


def _optional(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f'track.{name}=True needs {name}; install it with pip install "tooljax[{name}]", '
            f"or set track.{name}=False"
        ) from error


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"grpo": {"kl_coef": 0}} to {"grpo.kl_coef": 0}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _fenced(text: str) -> str:
    """A code block that the text cannot close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
