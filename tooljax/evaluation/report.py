"""The report of an evaluation: report.md, report.html (one file), results.json, plots, and the trajectories."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollout_sidecar.protocol import Task, Trajectory
from tooljax import plots
from tooljax.config import Config
from tooljax.evaluation.comparison import Comparison, Measured
from tooljax.evaluation.document import (
    Block,
    Heading,
    Paragraph,
    Picture,
    Table,
    Verbatim,
    to_html,
    to_markdown,
)
from tooljax.evaluation.result import Row, is_correct, mean
from tooljax.trackers import render_trajectory

EXAMPLES = 3
"""Trajectories that are shown of each kind."""


def write_report(
    config: Config, comparison: Comparison, tasks: Sequence[Task], folder: Path
) -> Path:
    """Writes everything into the folder, over what an earlier report left; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [
        Heading("Evaluation", 1),
        *_setting(config, comparison, tasks),
        *_differences(comparison, folder),
        *_numbers(comparison, folder),
        *_examples(comparison),
    ]
    results = json.dumps(_results(config, comparison), indent=1, allow_nan=False)
    (folder / "results.json").write_text(results + "\n")
    if config.store.enabled:
        for condition, evaluation in comparison.measured:
            lines = b"".join(msgspec.json.encode(t) + b"\n" for t in evaluation.trajectories)
            (folder / f"{condition.name.replace('/', '_')}.jsonl").write_bytes(lines)
    (folder / "report.md").write_text(to_markdown(blocks))
    page = folder / "report.html"
    page.write_text(to_html(blocks))
    return page


def _setting(config: Config, comparison: Comparison, tasks: Sequence[Task]) -> Iterator[Block]:
    evaluate = config.evaluate
    yield Paragraph(
        f"{len(tasks)} problems of {', '.join(config.data.eval) or 'no file'}, {evaluate.samples} "
        f"samples each at temperature {evaluate.temperature:g}, run.seed {config.run.seed}. All "
        "conditions see the same prompts, but for the tools in them, and draw from the same seeds."
    )
    yield Paragraph(
        f"Base: {config.model.path or 'as the sidecars served it'}. "
        f"Trained: {comparison.source or 'not measured'}."
    )
    if comparison.note:
        yield Paragraph(comparison.note)


def _differences(comparison: Comparison, folder: Path) -> Iterator[Block]:
    found = comparison.differences()
    if not found:
        return
    reference = comparison.reference.condition.label
    yield Heading(f"What {reference} gains")
    yield Paragraph(
        "Mean differences over the problems that both have a value for, with 95 % intervals from a paired bootstrap "
        "over problems. An interval that holds 0 shows no difference. Won and lost count problems."
    )
    rows = [
        [
            f"over {one.other.label}",
            one.measure,
            f"{one.value:+.3f}",
            f"{one.interval.low:+.3f} to {one.interval.high:+.3f}",
            f"{one.won} / {one.lost} of {one.problems}",
        ]
        for one in found
    ]
    yield Table(["", "measure", "difference", "95 % interval", "won / lost"], rows)
    bars = {
        f"{one.measure}, over {one.other.label}": (one.value, one.interval.low, one.interval.high)
        for one in found
    }
    png = folder / "differences.png"
    title = f"What {reference} gains"
    yield Picture(plots.differences(bars, png, title=title, xlabel="difference"), title)


def _numbers(comparison: Comparison, folder: Path) -> Iterator[Block]:
    measured = {one.condition.label: one.evaluation for one in comparison.measured}
    yield Heading("Numbers")
    yield Paragraph(
        "Shares have 95 % intervals: Wilson's, widened where a problem's samples resemble each other; for pass@k and "
        "maj@k a bootstrap over problems. pass@k is the unbiased estimate of Chen et al. (2021, eq. 1); maj@k is the "
        "accuracy of the commonest answer of k. Trajectories whose reward failed are in no accuracy."
    )
    table: dict[str, dict[str, Row]] = {}
    for label, evaluation in measured.items():
        for row in evaluation.rows():
            table.setdefault(row.label, {})[label] = row
    rows = [[name, *(_cell(row.get(label)) for label in measured)] for name, row in table.items()]
    yield Table(["", *measured], rows)
    drawable = {
        label.replace(", ", ",\n"): (e.accuracy, e.interval.low, e.interval.high)
        for label, e in measured.items()
        if not math.isnan(e.accuracy)
    }
    if drawable:
        png = folder / "accuracy.png"
        plots.comparison(drawable, png, title="Held-out accuracy", ylabel="accuracy")
        yield Picture(png, "Held-out accuracy with 95 % intervals")
    lines: dict[str, dict[int, float]] = {}
    for label, evaluation in measured.items():
        lines[f"{label}: pass@k"] = {k: mean(evaluation.pass_at(k)) for k in evaluation.ks}
        lines[f"{label}: maj@k"] = {k: mean(evaluation.majority_at(k)) for k in evaluation.ks}
    if any(len(line) > 1 for line in lines.values()):
        png = folder / "pass_at_k.png"
        plots.curves(lines, png, title="pass@k and maj@k", xlabel="samples k")
        yield Picture(png, "pass@k and maj@k over k")
    endings = {
        label: {row.label.removeprefix("ended: "): row.value for row in evaluation.endings()}
        for label, evaluation in measured.items()
    }
    png = plots.stacked(endings, folder / "endings.png", title="How trajectories ended")
    yield Picture(png, "How trajectories ended")


def _examples(comparison: Comparison) -> Iterator[Block]:
    reference = comparison.reference
    yield Heading("Trajectories to look at")
    wrong = [t for t in reference.evaluation.trajectories if t.scored and not is_correct(t)]
    label = reference.condition.label
    yield Paragraph(f"{label}: {len(wrong)} wrong trajectories; the first {EXAMPLES}, if any.")
    yield from (Verbatim(_title(label, t), render_trajectory(t)) for t in wrong[:EXAMPLES])
    for other in comparison.measured:
        if other is reference:
            continue
        lost = list(_lost(reference, other))
        yield Paragraph(
            f"Right for {other.condition.label}, wrong for {label}: {len(lost)} samples; the first {EXAMPLES}, if any."
        )
        for mine, theirs in lost[:EXAMPLES]:
            yield Verbatim(_title(label, mine), render_trajectory(mine))
            yield Verbatim(_title(other.condition.label, theirs), render_trajectory(theirs))


def _lost(reference: Measured, other: Measured) -> Iterator[tuple[Trajectory, Trajectory]]:
    """Samples of the same seed that the other got right and the reference wrong."""
    both = zip(reference.evaluation.trajectories, other.evaluation.trajectories, strict=True)
    return ((a, b) for a, b in both if a.scored and not is_correct(a) and is_correct(b))


def _title(label: str, t: Trajectory) -> str:
    return f"{label}: task {t.task_id}, sample {t.sample_index}, reward {t.reward:g}, {t.status}"


def _cell(row: Row | None) -> str:
    if row is None or math.isnan(row.value):
        return ""
    if row.interval is None:
        return f"{row.value:.2f}"
    return f"{row.value:.3f} ({row.interval.low:.3f} to {row.interval.high:.3f})"


def _results(config: Config, comparison: Comparison) -> dict:
    """For programs: every number with its interval, and each problem's accuracy in each condition."""
    return {
        "reference": comparison.reference.condition.name,
        "trained": comparison.source,
        "note": comparison.note,
        "seed": config.run.seed,
        "samples": config.evaluate.samples,
        "temperature": config.evaluate.temperature,
        "conditions": {
            one.condition.name: {
                "numbers": {
                    row.name: {
                        "value": _number(row.value),
                        "low": None if row.interval is None else _number(row.interval.low),
                        "high": None if row.interval is None else _number(row.interval.high),
                        "n": row.n,
                    }
                    for row in one.evaluation.rows()
                },
                "problems": {
                    f"{i}:{problem[0].task_id}": _number(score)
                    for i, (problem, score) in enumerate(
                        zip(one.evaluation.problems, one.evaluation.scores, strict=True)
                    )
                },
            }
            for one in comparison.measured
        },
        "differences": [
            {
                "measure": one.measure,
                "other": one.other.name,
                "value": _number(one.value),
                "low": _number(one.interval.low),
                "high": _number(one.interval.high),
                "problems": one.problems,
                "won": one.won,
                "lost": one.lost,
            }
            for one in comparison.differences()
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
