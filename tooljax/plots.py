"""Pictures of a run: learning curves, and what compares policies, with intervals. PNG files, no display needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tooljax.trackers import read_metrics

CURVES = (
    (
        "Reward and accuracy",
        (
            ("reward/mean", "reward"),
            ("rollout/accuracy", "accuracy (training)"),
            ("eval/accuracy", "accuracy (held-out)"),
        ),
    ),
    (
        "Tool use",
        (
            ("tools/use_rate", "trajectories with a call"),
            ("tools/valid_call_rate", "calls that succeeded"),
            ("tools/calls_per_trajectory", "calls per trajectory"),
        ),
    ),
)
"""Panels from top to bottom; of each, metrics and their labels."""

SMOOTHING = 10
"""Steps that the bold line averages over, once a run is four times as long."""

Point = tuple[int, float]
Bar = tuple[float, float, float]
"""Estimate, and the interval's low and high end."""


def learning_curve(
    metrics_jsonl: str | Path, png: str | Path, evaluations: Mapping[int, float] | None = None
) -> Path:
    """Draws reward, accuracy and tool use over the steps of a run; returns the path of the PNG.

    Args:
        metrics_jsonl: what the run wrote.
        png: file to write.
        evaluations: held-out accuracy by step, in addition to the eval/accuracy of the run.
    """
    rows = read_metrics(metrics_jsonl)
    figure = _figure(9, 7)
    axes = figure.subplots(len(CURVES), 1, sharex=True)
    for ax, (title, curves) in zip(axes, CURVES, strict=True):
        for i, (metric, label) in enumerate(curves):
            points = _points(rows, metric)
            if metric == "eval/accuracy":
                points = sorted({**dict(points), **(evaluations or {})}.items())
            _draw(ax, points, label, f"C{i}", marked=metric.startswith("eval/"))
        ax.set_title(title)
        ax.set_ylabel("mean of the step")
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(loc="best")
        else:
            ax.text(0.5, 0.5, "nothing logged", ha="center", transform=ax.transAxes)
    axes[-1].set_xlabel("step")
    return _save(figure, png)


def comparison(bars: Mapping[str, Bar], png: str | Path, *, title: str, ylabel: str) -> Path:
    """Draws one bar a policy with its interval, and the value above it; returns the path of the PNG."""
    figure = _figure(max(4.0, 1.6 * len(bars)), 4.5)
    ax = figure.subplots()
    for i, (value, low, high) in enumerate(bars.values()):
        ax.bar(i, value, color=f"C{i}", width=0.6)
        error = [[max(0.0, value - low)], [max(0.0, high - value)]]
        ax.errorbar(i, value, yerr=error, color="black", capsize=5)
        ax.annotate(f"{value:.3f}", (i, high), (0, 4), textcoords="offset points", ha="center")
    ax.set_xticks(range(len(bars)), list(bars))
    ax.set_title(title)
    ax.set_ylabel(ylabel)
    ax.grid(axis="y", alpha=0.3)
    ax.margins(y=0.12)
    return _save(figure, png)


def curves(
    lines: Mapping[str, Mapping[int, float]], png: str | Path, *, title: str, xlabel: str
) -> Path:
    """Draws one line a key over counts that double, dashed if its label ends in maj@k; returns the path of the PNG."""
    figure = _figure(6.5, 4.5)
    ax = figure.subplots()
    for i, (label, line) in enumerate(lines.items()):
        style = "--" if label.endswith("maj@k") else "-"
        ax.plot(list(line), list(line.values()), style, color=f"C{i // 2}", marker="o", label=label)
    ax.set_xscale("log", base=2)
    ticks = sorted({k for line in lines.values() for k in line})
    ax.set_xticks(ticks, [str(k) for k in ticks])
    ax.minorticks_off()
    ax.set_title(title)
    ax.set_xlabel(xlabel)
    ax.grid(alpha=0.3)
    if lines:
        ax.legend(loc="best", fontsize="small")
    return _save(figure, png)


def stacked(bars: Mapping[str, Mapping[str, float]], png: str | Path, *, title: str) -> Path:
    """Draws one horizontal bar a key, cut into named shares; returns the path of the PNG."""
    figure = _figure(8, 1.5 + 0.6 * len(bars))
    ax = figure.subplots()
    names = list(dict.fromkeys(name for shares in bars.values() for name in shares))
    left = [0.0] * len(bars)
    for i, name in enumerate(names):
        widths = [shares.get(name, 0.0) for shares in bars.values()]
        ax.barh(range(len(bars)), widths, left=left, color=f"C{i}", label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(bars)), list(bars))
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.set_title(title)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return _save(figure, png)


def differences(bars: Mapping[str, Bar], png: str | Path, *, title: str, xlabel: str) -> Path:
    """Draws each estimate with its interval beside a line at 0; returns the path of the PNG."""
    figure = _figure(8, 1.5 + 0.4 * len(bars))
    ax = figure.subplots()
    for i, (value, low, high) in enumerate(bars.values()):
        ax.errorbar(
            value, i, xerr=[[value - low], [high - value]], color="C0", marker="o", capsize=4
        )
    ax.axvline(0, color="black", linewidth=1)
    ax.set_yticks(range(len(bars)), list(bars))
    ax.invert_yaxis()
    ax.set_title(title)
    ax.set_xlabel(xlabel)
    ax.grid(axis="x", alpha=0.3)
    return _save(figure, png)


def _points(rows: Sequence[Mapping[str, float | None]], metric: str) -> list[Point]:
    """(step, value) where the metric has a finite value."""
    points = []
    for row in rows:
        step, value = row["step"], row.get(metric)
        if step is not None and value is not None:
            points.append((int(step), value))
    return points


def _draw(ax: Axes, points: Sequence[Point], label: str, colour: str, *, marked: bool) -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    if marked or len(points) < 4 * SMOOTHING:
        marker = "o" if marked or len(points) == 1 else None
        ax.plot(steps, values, color=colour, marker=marker, label=label)
        return
    ax.plot(steps, values, color=colour, alpha=0.25)
    ax.plot(steps, _smoothed(values), color=colour, label=label)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Each value averaged with up to SMOOTHING - 1 before it: the line never knows the future."""
    windows = (values[max(0, i + 1 - SMOOTHING) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _figure(width: float, height: float) -> Figure:
    """Not through pyplot, which keeps figures and chooses a backend by the display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, png: str | Path) -> Path:
    path = Path(png)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path
