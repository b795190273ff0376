"""Plots: what is on the picture, and that it is one."""

import json

import matplotlib.image
import numpy as np
import pytest

from tooljax import plots


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda f, png: figures.append(f) or save(f, png))
    return figures


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_learning_curve_shows_what_was_logged(tmp_path, drawn):
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "tools/use_rate": 1.0},
        {"step": 2, "reward/mean": None, "tools/use_rate": 0.5},
        {"step": 3, "reward/mean": 0.75, "tools/use_rate": 0.0, "eval/accuracy": 0.5},
    ]
    png = plots.learning_curve(
        write(tmp_path / "metrics.jsonl", rows), tmp_path / "x" / "curve.png", {5: 0.75}
    )
    upper, lower = drawn[0].axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in upper.lines}
    assert curves == {
        "reward": [[1, 0.5], [3, 0.75]],
        "accuracy (held-out)": [[0, 0.25], [3, 0.5], [5, 0.75]],
    }
    assert [line.get_xydata().tolist() for line in lower.lines] == [[[1, 1], [2, 0.5], [3, 0]]]
    assert [text.get_text() for text in upper.get_legend().get_texts()] == list(curves)
    assert (upper.get_title(), lower.get_title()) == ("Reward and accuracy", "Tool use")
    assert lower.get_xlabel() == "step"
    picture = matplotlib.image.imread(png)
    assert picture.shape[:2] == (840, 1080)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10


def test_long_runs_are_smoothed_over_the_past(tmp_path, drawn):
    rows = [{"step": i, "reward/mean": float(i % 2)} for i in range(50)]
    plots.learning_curve(write(tmp_path / "m.jsonl", rows), tmp_path / "c.png")
    raw, smooth = drawn[0].axes[0].lines
    assert raw.get_ydata()[:4].tolist() == [0, 1, 0, 1]
    # 0, 1/2, 1/3, 2/4, ... and from the tenth on half of ten
    np.testing.assert_allclose(smooth.get_ydata()[:4], [0, 1 / 2, 1 / 3, 2 / 4])
    np.testing.assert_allclose(smooth.get_ydata()[9:], 0.5)
    assert smooth.get_label() == "reward"


def test_a_run_without_metrics_says_so(tmp_path, drawn):
    plots.learning_curve(tmp_path / "none.jsonl", tmp_path / "c.png")
    assert [ax.texts[0].get_text() for ax in drawn[0].axes] == ["nothing logged"] * 2


def test_bars_have_intervals_and_values(tmp_path, drawn):
    bars = {"before": (0.25, 0.2, 0.3), "after": (0.5, 0.5, 0.6)}
    png = plots.comparison(bars, tmp_path / "bars.png", title="Held-out", ylabel="accuracy")
    [ax] = drawn[0].axes
    assert [bar.get_height() for bar in ax.patches] == [0.25, 0.5]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["before", "after"]
    assert [text.get_text() for text in ax.texts] == ["0.250", "0.500"]
    ends = [c.get_segments()[0][:, 1].tolist() for c in ax.collections]
    np.testing.assert_allclose(ends, [[0.2, 0.3], [0.5, 0.6]])
    assert matplotlib.image.imread(png).shape[0] == 540
