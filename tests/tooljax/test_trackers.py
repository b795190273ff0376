"""Trackers: what was written is read back with each tracker's own reader."""

# The classes of TensorBoard's protobuf modules exist at run time only.
# pyright: reportAttributeAccessIssue=false

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from rollout_sidecar.protocol import ToolCallRecord, Trajectory, Turn
from tooljax.config import Config, RunConfig, TrackConfig, to_gin
from tooljax.metrics import describe
from tooljax.trackers import (
    Trackers,
    best_and_worst,
    read_metrics,
    render_trajectory,
    write_best_and_worst,
)


def config(run_dir, **track) -> Config:
    return Config(
        run=RunConfig(dir=str(run_dir)), track=TrackConfig(**{"tensorboard": False, **track})
    )


def trajectory(reward: float = 1.0, task: int = 0, sample: int = 0) -> Trajectory:
    """One turn with a call, one with the answer."""
    record = ToolCallRecord(
        name="calculator", arguments={"expression": "6*7"}, status="ok", result="42", latency_s=0.25
    )
    return Trajectory(
        task_index=task,
        sample_index=sample,
        task_id=f"task-{task}",
        seed=1,
        status="completed",
        token_ids=[5, 6, 7, 8, 9],
        prompt_tokens=1,
        loss_mask=[False, True, True, False, True],
        turns=[
            Turn(start=1, end=3, policy_version=0, finish="stop", calls=[record]),
            Turn(start=4, end=5, policy_version=0, finish="stop"),
        ],
        reward=reward,
        reward_terms={"outcome": reward - 0.5, "valid_call": 0.5},
        messages=[
            {"role": "user", "content": "6 times 7?"},
            {"role": "assistant", "content": "<tool_call>...</tool_call>"},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "#### 42"},
        ],
        total_s=1.5,
    )


def test_metrics_jsonl_has_one_object_a_step(tmp_path):
    with Trackers(config(tmp_path)) as trackers:
        trackers.log(1, {"reward/mean": 0.25})
        trackers.log(2, {"reward/mean": 0.5, "policy/kl_ref": float("nan")})
        # On disk before the tracker is closed: a killed run keeps its curve.
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5, "policy/kl_ref": None},
    ]


def test_an_unregistered_metric_is_refused(tmp_path):
    with Trackers(config(tmp_path)) as trackers:
        with pytest.raises(ValueError, match="unknown metric 'reward/maen'"):
            trackers.log(1, {"reward/maen": 0.25})
        assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_has_each_step_once(tmp_path):
    with Trackers(config(tmp_path)) as trackers:
        for step in (0, 1, 2, 3):
            trackers.log(step, {"reward/mean": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewa')  # killed while writing
    with Trackers(config(tmp_path), resume_step=2) as trackers:
        trackers.log(3, {"reward/mean": 30.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_a_run_that_begins_anew_forgets_the_one_before(tmp_path):
    for value in (1.0, 2.0):
        with Trackers(config(tmp_path)) as trackers:
            trackers.log(0, {"reward/mean": value})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "reward/mean": 2.0}]


def events(run_dir):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return reader.EventAccumulator(str(run_dir / "tensorboard")).Reload()


def test_tensorboard_reads_scalars_texts_and_config(tmp_path):
    cfg = config(tmp_path, tensorboard=True)
    with Trackers(cfg) as trackers:
        trackers.log(1, {"reward/mean": 0.25, "eval/accuracy": 0.5}, [trajectory(), trajectory(0)])
        trackers.log(2, {"reward/mean": 0.75})
        # Flushed at each step: a running dashboard shows it.
        scalars = events(tmp_path).Scalars("reward/mean")
        assert [(e.step, e.value) for e in scalars] == [(1, 0.25), (2, 0.75)]
    read = events(tmp_path)
    assert [e.value for e in read.Scalars("eval/accuracy")] == [0.5]
    [sample] = read.Tensors("samples/0")
    assert sample.step == 1
    assert sample.tensor_proto.string_val[0].decode() == render_trajectory(trajectory())
    assert "samples/1" in read.Tags()["tensors"]
    assert read.SummaryMetadata("samples/0").plugin_data.plugin_name == "text"
    [shown] = read.Tensors("config")
    assert to_gin(cfg).strip() in shown.tensor_proto.string_val[0].decode()


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")  # TensorBoard's own
def test_the_text_dashboard_shows_a_sample(tmp_path):
    from tensorboard.context import RequestContext
    from tensorboard.plugins.text.text_plugin import TextPlugin

    with Trackers(config(tmp_path, tensorboard=True)) as trackers:
        trackers.log(1, {"reward/mean": 0.25}, [trajectory()])
    plugin = TextPlugin(served(tmp_path))
    [shown] = plugin.text_impl(RequestContext(), "tensorboard", "samples/0", "", True)
    assert "<strong>reward 1</strong>" in shown["text"]
    assert "&lt;tool_call&gt;" in shown["text"]


def test_tensorboard_has_histograms_and_metrics_jsonl_their_quantiles(tmp_path):
    values = np.array([0.0, 1.0, 2.0, 3.0, 100.0, np.inf])
    with Trackers(config(tmp_path, tensorboard=True)) as trackers:
        trackers.log(1, {"reward/mean": 0.5}, [], {"distribution/reward": values})
        trackers.log(2, {}, [], {"distribution/reward": np.array([np.nan])})
    [event] = events(tmp_path).Histograms("distribution/reward")  # of nothing, none
    told = event.histogram_value
    assert (event.step, told.min, told.max, told.num, told.sum) == (1, 0.0, 100.0, 5, 106.0)
    # 40 buckets of 2.5: the first holds 0, 1 and 2, the second 3, the last 100.
    assert told.bucket_limit[:2] == [2.5, 5.0]
    assert told.bucket[:2] + told.bucket[-1:] == [3, 1, 1]
    assert "distribution/reward/p50" not in events(tmp_path).Tags()["scalars"]
    # p5 of five values lies 0.2 of the way from the first to the second, p95 0.8 from the fourth to the fifth.
    row, empty = read_metrics(tmp_path / "metrics.jsonl")
    quantiles = {"min": 0.0, "p5": 0.2, "p50": 2.0, "p95": 80.6, "max": 100.0}
    expected = {f"distribution/reward/{name}": value for name, value in quantiles.items()}
    assert row == pytest.approx({"step": 1, "reward/mean": 0.5} | expected)
    assert empty == {"step": 2}


def served(tmp_path):
    """A run as the plugins of TensorBoard's server get it."""
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins.base_plugin import TBContext

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    return TBContext(data_provider=provider, plugin_name_to_instance={})


def test_the_first_page_tells_the_story(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.context import RequestContext
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

    with Trackers(config(tmp_path, tensorboard=True)) as trackers:
        trackers.log(1, {"rollout/accuracy": 0.25, "rollout/accuracy_with_tools": 0.5})
        trackers.log(2, {"rollout/accuracy": 0.75})
    read = events(tmp_path)
    [event] = read.Tensors(metadata.CONFIG_SUMMARY_TAG)
    plugin = read.SummaryMetadata(metadata.CONFIG_SUMMARY_TAG).plugin_data.plugin_name
    assert plugin == metadata.PLUGIN_NAME
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = [chart for category in layout.category for chart in category.chart]
    patterns = [tag for chart in charts for tag in chart.multiline.tag]
    names = [pattern.removeprefix("^").removesuffix("$") for pattern in patterns]
    assert all(describe(name) for name in names), names
    story = {"reward/mean", "eval/accuracy", "tools/use_rate", "policy/kl_mismatch"}
    assert story | {"perf/tokens_per_s"} <= set(names)
    assert layout.category[0].title == "Does it learn?"
    # Each pattern is of one metric: that of accuracy finds no accuracy with tools.
    context = served(tmp_path)
    assert context.plugin_name_to_instance is not None
    context.plugin_name_to_instance["scalars"] = ScalarsPlugin(context)
    shown = CustomScalarsPlugin(context)
    found = shown.scalars_impl(RequestContext(), "tensorboard", "^rollout/accuracy$", "")
    assert {tag: [row[1:] for row in rows] for tag, rows in found["tag_to_events"].items()} == {
        "rollout/accuracy": [(1, 0.25), (2, 0.75)]
    }


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")  # TensorBoard's own
def test_the_table_of_hyperparameters_has_every_setting_and_the_last_result(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.context import RequestContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    cfg = config(tmp_path, tensorboard=True)
    with Trackers(cfg) as trackers:
        trackers.log(1, {"eval/accuracy": 0.25})
        trackers.log(2, {"eval/accuracy": 0.5})
    context = backend_context.Context(served(tmp_path))
    statuses = [api_pb2.STATUS_UNKNOWN]  # it is not said that a run has ended: it may go on
    request = api_pb2.ListSessionGroupsRequest(slice_size=10, allowed_statuses=statuses)
    asked = RequestContext()
    found = list_session_groups.Handler(asked, context, "", request).run()
    [group] = found.session_groups
    settings = dict(group.hparams.items())
    assert settings["grpo.group_size"].number_value == cfg.grpo.group_size
    assert settings["track.tensorboard"].bool_value is True
    assert settings["run.dir"].string_value == str(tmp_path)
    assert json.loads(settings["data.train"].string_value) == list(cfg.data.train)
    values = {
        metric.name.tag: (metric.value, metric.training_step) for metric in group.metric_values
    }
    assert values["eval/accuracy"] == (0.5, 2)


def test_tensorboard_forgets_steps_that_a_resumed_run_makes_again(tmp_path):
    cfg = config(tmp_path, tensorboard=True)
    with Trackers(cfg) as trackers:
        for step in (1, 2, 3, 4):
            trackers.log(step, {"reward/mean": float(step)})
    with Trackers(cfg, resume_step=2) as trackers:
        trackers.log(3, {"reward/mean": 30.0})
    scalars = events(tmp_path).Scalars("reward/mean")
    assert [(e.step, e.value) for e in scalars] == [(1, 1), (2, 2), (3, 30)]


def test_samples_are_spread_over_the_batch(tmp_path):
    cfg = config(tmp_path, tensorboard=True, samples_per_step=2)
    with Trackers(cfg) as trackers:
        trackers.log(1, {}, [trajectory(task=i) for i in range(8)])
    read = events(tmp_path)
    texts = [read.Tensors(f"samples/{i}")[0].tensor_proto.string_val[0].decode() for i in (0, 1)]
    assert ["task-0" in texts[0], "task-4" in texts[1]] == [True, True]
    assert "samples/2" not in read.Tags()["tensors"]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_tracker_says_how_to_install_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # what Python does with a package that is absent
    message = rf'track\.{name}=True needs {name}; install it with pip install "tooljax\[{name}\]"'
    with pytest.raises(ValueError, match=message):
        Trackers(config(tmp_path, **{name: True}))


@pytest.mark.filterwarnings("ignore")  # MLflow's own, at import
def test_mlflow_has_the_metrics_and_goes_on_in_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    cfg = config(tmp_path, mlflow=True, project="sums")
    with Trackers(cfg) as trackers:
        spread = {"distribution/turns": np.array([1.0, 2.0, 3.0])}
        trackers.log(1, {"reward/mean": 0.25, "tools/calc/calls": 3.0}, [trajectory()], spread)
        trackers.log(2, {"reward/mean": 0.5})
    with Trackers(cfg, resume_step=2) as trackers:
        trackers.log(3, {"reward/mean": 0.75})
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sums")
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["tools/calc/calls"] == 3
    assert run.data.metrics["distribution/turns/p50"] == 2
    assert run.data.params["grpo.group_size"] == str(cfg.grpo.group_size)
    assert run.info.status == "FINISHED"


@pytest.mark.filterwarnings("ignore")  # WandB's own
def test_wandb_writes_a_run_offline(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    cfg = config(tmp_path, wandb=True)
    spread = {"distribution/turns": np.array([1.0, 2.0, 3.0])}
    with Trackers(cfg) as trackers:
        trackers.log(1, {"reward/mean": 0.25}, [trajectory()], spread)
    with Trackers(cfg, resume_step=1) as trackers:
        trackers.log(2, {"reward/mean": 0.5})
    records = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(records) == 2
    assert b"reward/mean" in records[0].read_bytes()
    assert b"distribution/turns" in records[0].read_bytes()
    run_id = json.loads((tmp_path / "tracker_runs.json").read_text())["wandb"]
    assert [path.stem for path in records] == [f"run-{run_id}"] * 2
    assert capfd.readouterr().out == ""


def test_best_and_worst():
    rewards = [0.5, 1.0, 0.0, 1.0, -1.0]
    made = [trajectory(reward, task=i) for i, reward in enumerate(rewards)]
    best, worst = best_and_worst(made, 2)
    assert [t.task_index for t in best] == [1, 3]
    assert [t.task_index for t in worst] == [4, 2]
    # too few for both lists: none is shown twice
    best, worst = best_and_worst(made, 3)
    assert [t.task_index for t in best + worst] == [1, 3, 0, 4, 2]


def test_best_and_worst_are_written_readable(tmp_path):
    made = [trajectory(reward, task=i) for i, reward in enumerate((0.0, 1.0, 0.5))]
    text = write_best_and_worst(tmp_path / "new", made, count=1).read_text()
    assert text.startswith("# 1 best and 1 worst of 3 trajectories\n\n## Best 1\n\n**reward 1**")
    assert "## Worst 1\n\n**reward 0**" in text


def test_a_trajectory_is_rendered_with_the_fate_of_its_calls():
    shown = render_trajectory(trajectory())
    assert shown == (
        "**reward 1** (outcome 0.5, valid_call 0.5) | completed | task task-0, sample 0 | "
        "2 turns, 3 tokens sampled, 1.5 s\n\n"
        "**user**\n\n```\n6 times 7?\n```\n\n"
        "**assistant**\n\n```\n<tool_call>...</tool_call>\n```\n\n"
        "- calculator: ok, 0.250 s\n\n"
        "**tool**\n\n```\n42\n```\n\n"
        "**assistant**\n\n```\n#### 42\n```"
    )


def test_rendering_survives_what_policies_write():
    base = trajectory()
    fields = {f: getattr(base, f) for f in base.__struct_fields__}
    odd = Trajectory(
        **{
            **fields,
            "status": "engine_error",
            "error": "out of memory",
            "messages": [
                {"role": "assistant", "content": "a few-shot example"},
                {"role": "user", "content": [{"type": "text", "text": "é"}]},
                {"role": "assistant", "content": "```` closes nothing"},
                {"role": "assistant", "content": None},
            ],
        }
    )
    shown = render_trajectory(odd)
    assert "error: out of memory" in shown
    assert "`````\n```` closes nothing\n`````" in shown
    assert '[{"type": "text", "text": "é"}]' in shown
    # The call belongs to the first sampled message, not to the example in the prompt.
    assert shown.index("- calculator: ok") > shown.index("closes nothing")
    assert render_trajectory(replace_turns(odd, [])).count("calculator") == 0


def replace_turns(base: Trajectory, turns: list[Turn]) -> Trajectory:
    return Trajectory(**{**{f: getattr(base, f) for f in base.__struct_fields__}, "turns": turns})


def test_the_run_section_names_the_folder(tmp_path):
    cfg = replace(config(tmp_path), run=RunConfig(dir=str(tmp_path / "a" / "b")))
    Trackers(cfg).close()
    assert (tmp_path / "a" / "b" / "metrics.jsonl").exists()
